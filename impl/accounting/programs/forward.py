"""Forward of the transformer language model, operator by operator as eager PyTorch does it on one rank.

In float32; with everything in half precision, as FSDP's mixed precision computes; or under autocast, where matrix
products read half-precision copies of weights and inputs, which the graph keeps, while the residual stream, the norms
and the loss stay float32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from impl.accounting.ledger import Ledger
from impl.accounting.programs.attention import Eager, Efficient, Sdpa
from impl.accounting.programs.parameters import BYTES, EMBEDDING, FLOAT, ROOT, transformer_units
from impl.accounting.strategies import Strategy
from impl.model.sizes import SIZES

if TYPE_CHECKING:
    from impl.model.sizes import TransformerSize
    from impl.training_step.cases import TrainingStepCase

ATTENTION = ("attention.query", "attention.key", "attention.value")
FINAL_NORM = "norm"


class TransformerForward:
    """`autocast` where parameters and the residual stream are float32 whatever the case's dtype; `device` for the
    kernel of attention that SDPA chooses there."""

    has_moments = True

    def __init__(
        self,
        case: TrainingStepCase,
        strategy: Strategy,
        *,
        size: TransformerSize | None = None,
        autocast: bool = False,
        device: str = "cpu",
    ) -> None:
        size, self.ledger = size or SIZES[case.model], Ledger()
        self.case, self.size, self.strategy, self.device = case, size, strategy, device
        self.c = BYTES[case.dtype]  # bytes of a value that products are made in
        self.copies = autocast and self.c != FLOAT
        self.s = FLOAT if autocast else self.c  # bytes of a value of the residual stream, the norms and the loss
        tokens = case.tokens
        self.hidden_bytes, self.ffn_bytes = self.c * tokens * size.d_model, self.c * tokens * size.d_ff
        self.residual_bytes, self.column_bytes = self.s * tokens * size.d_model, self.s * tokens
        self.logits_bytes = self.s * tokens * size.vocab
        efficient = device == "cuda" and self.c == FLOAT
        rows = case.context + (-case.context % 32 if efficient else 0)
        self.log_sum_exp_bytes = FLOAT * case.batch * rows * size.heads
        self.rope_bytes = 0 if self.c == FLOAT else self.c * case.context * size.head_dim  # cosines and sines, cast
        self.units = transformer_units(size)
        self.output = EMBEDDING + 1 + size.layers
        self.blocks = range(EMBEDDING + 1, self.output)
        # Not the embedding's table, whose gradient is made of the indices alone.
        self.backward_order = [self.output, ROOT, *reversed(self.blocks)]
        self.of = [{parameter.name: parameter for parameter in unit} for unit in self.units]
        self.unit = ROOT
        self.kernel = Eager(self) if case.attention == "eager" else Efficient(self) if efficient else Sdpa(self)

    def unit_name(self, unit: int) -> str:
        others = {ROOT: "the root module", EMBEDDING: "the embedding", self.output: "the output projection"}
        return others.get(unit, f"block {unit - self.blocks.start}")

    def forward(self) -> None:
        """Leaves what backward needs, and the loss."""
        take, free, strategy = self.ledger.take, self.ledger.free, self.strategy
        strategy.enter(ROOT)
        self.enter(EMBEDDING)
        self.reading("embedding", "embedding output", self.residual_bytes)
        self.leave(EMBEDDING)
        for block in self.blocks:
            self.enter(block)
            self.forward_block()
            self.leave(block)
        self.unit = ROOT
        self.norm(FINAL_NORM)
        self.enter(self.output)
        product = "half-precision logits" if self.copies else "logits"
        self.linear("output", product, self.c * self.case.tokens * self.size.vocab)
        self.leave(self.output)
        strategy.leave(ROOT)
        if self.copies:
            free("norm: output")
            take("logits", self.logits_bytes)
            free("half-precision logits")
        take("log-probabilities", self.logits_bytes)
        take("loss", self.s)
        take("number of targets", self.s)
        free("logits")

    def enter(self, unit: int) -> None:
        self.unit = unit
        self.strategy.enter(unit)

    def leave(self, unit: int) -> None:
        self.strategy.leave(unit)

    def forward_block(self) -> None:
        self.norm("attention_norm")
        self.attention()
        self.norm("feed_forward_norm")
        self.feed_forward()

    def reading(self, name: str, result: str, nbytes: int) -> None:
        """An operator that reads the unit's parameter of that name."""
        parameter = self.of[self.unit][name]
        self.strategy.read(parameter)
        self.ledger.take(result, nbytes)
        self.strategy.drop(parameter)

    def linear(self, name: str, result: str, nbytes: int, casts_input: bool = True) -> None:
        if self.copies:
            self.ledger.take(f"{name}: weight in half precision", self.c * self.of[self.unit][name].values)
            self.ledger.take(f"{name}: input in half precision", self.hidden_bytes if casts_input else 0)
        self.reading(name, result, nbytes)

    def norm(self, name: str) -> None:
        """RMSNorm, x / rms(x) * weight. Leaves 1 / rms(x), x / rms(x) and its output."""
        in_float32 = 0 if self.s == FLOAT else FLOAT * self.case.tokens * self.size.d_model
        self.ledger.borrow(f"{name}: squares", self.residual_bytes + self.column_bytes + in_float32)
        self.ledger.take(f"{name}: 1 / rms(x)", self.column_bytes)
        self.ledger.take(f"{name}: x / rms(x)", self.residual_bytes)
        self.reading(name, f"{name}: output", self.residual_bytes)

    def attention(self) -> None:
        """Leaves q and k after RoPE, v, the output before and after its heads are put together, and log-sum-exp."""
        take, free, hidden = self.ledger.take, self.ledger.free, self.hidden_bytes
        for name in ATTENTION:
            self.linear(name, "v" if name == "attention.value" else "q and k before RoPE", hidden)
        for _ in ("q", "k"):
            take("RoPE's tables in half precision", self.rope_bytes)
            self.ledger.borrow("RoPE: halves of q or k", 2 * hidden)
            take("q and k", hidden)
        self.kernel.forward()
        self.linear("attention.output", "attention projection", hidden, casts_input=False)
        free("q and k before RoPE", 2 * hidden)
        self.kernel.end_of_forward()
        if self.copies:
            free("attention_norm: output", self.residual_bytes)
        take("residual stream", self.residual_bytes)
        free("attention projection", hidden)

    def feed_forward(self) -> None:
        """SwiGLU, W2 (silu(W1 x) * W3 x). Leaves W1 x, its silu, W3 x and their product."""
        self.linear("feed_forward.w1", "SwiGLU gate", self.ffn_bytes)
        self.ledger.take("silu of the SwiGLU gate", self.ffn_bytes)
        self.linear("feed_forward.w3", "SwiGLU up-projection", self.ffn_bytes)
        self.ledger.take("SwiGLU product", self.ffn_bytes)
        self.linear("feed_forward.w2", "feed-forward output", self.hidden_bytes, casts_input=False)
        if self.copies:
            self.ledger.free("feed_forward_norm: output", self.residual_bytes)
        self.ledger.take("residual stream", self.residual_bytes)
        self.ledger.free("feed-forward output", self.hidden_bytes)
