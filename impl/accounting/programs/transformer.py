"""The transformer language model's training step, operator by operator as eager PyTorch does it on one rank.

In float32; with everything in half precision, as FSDP's mixed precision computes; or under autocast, where matrix
products read half-precision copies of weights and inputs, which the graph keeps, while the residual stream, the norms
and the loss stay float32. A strategy says what happens to parameters and gradients on the way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from impl.accounting.ledger import Ledger
from impl.accounting.programs.attention import Eager, Sdpa
from impl.accounting.programs.parameters import BYTES, EMBEDDING, FLOAT, ROOT, transformer_units
from impl.accounting.strategies import GRADIENTS, Strategy
from impl.model.sizes import SIZES

if TYPE_CHECKING:
    from impl.model.sizes import TransformerSize
    from impl.training_step.cases import TrainingStepCase

ATTENTION = ("attention.query", "attention.key", "attention.value")
FINAL_NORM = "norm"


class TransformerStep:
    """One AdamW step (fused, so without temporaries). `autocast` where parameters and the residual stream are float32
    whatever the case's dtype; `norm_alone` where the final norm is a unit of its own."""

    def __init__(
        self,
        case: TrainingStepCase,
        strategy: Strategy,
        *,
        size: TransformerSize | None = None,
        autocast: bool = False,
        norm_alone: bool = False,
    ) -> None:
        size, self.ledger = size or SIZES[case.model], Ledger()
        self.case, self.size, self.strategy = case, size, strategy
        self.c = BYTES[case.dtype]  # bytes of a value that products are made in
        self.copies = autocast and self.c != FLOAT
        self.s = FLOAT if autocast else self.c  # bytes of a value of the residual stream, the norms and the loss
        tokens = case.tokens
        self.hidden_bytes, self.ffn_bytes = self.c * tokens * size.d_model, self.c * tokens * size.d_ff
        self.residual_bytes, self.column_bytes = self.s * tokens * size.d_model, self.s * tokens
        self.logits_bytes = self.s * tokens * size.vocab
        self.log_sum_exp_bytes = FLOAT * tokens * size.heads
        self.rope_bytes = 0 if self.c == FLOAT else self.c * case.context * size.head_dim  # cosines and sines, cast
        self.units = transformer_units(size, norm_alone)
        self.output = EMBEDDING + 1 + size.layers
        self.final_norm = self.output + 1 if norm_alone else ROOT
        self.blocks = range(EMBEDDING + 1, self.output)
        self.of = [{parameter.name: parameter for parameter in unit} for unit in self.units]
        self.unit = ROOT
        self.kernel = Eager(self) if case.attention == "eager" else Sdpa(self)

    def run(self) -> Ledger:
        """Marks "after_init", "before_step", "after_forward" and "after_backward"; the peak is that of the step."""
        self.ledger.take("RoPE's tables", FLOAT * self.case.context * self.size.head_dim)
        self.ledger.take("tokens and targets", 16 * self.case.tokens)  # int64
        self.strategy.begin(self)
        self.ledger.mark("before_step")
        self.forward()
        self.ledger.mark("after_forward")
        self.backward()
        self.ledger.mark("after_backward")
        self.strategy.finish()
        return self.ledger

    # Forward

    def forward(self) -> None:
        take, free, strategy = self.ledger.take, self.ledger.free, self.strategy
        strategy.enter(ROOT)
        self.enter(EMBEDDING)
        self.reading("embedding", "embedding output", self.residual_bytes)
        self.leave(EMBEDDING)
        for block in self.blocks:
            self.enter(block)
            self.forward_block()
            self.leave(block)
        if self.final_norm != ROOT:
            self.enter(self.final_norm)
        self.unit = self.final_norm
        self.norm(FINAL_NORM)
        if self.final_norm != ROOT:
            self.leave(self.final_norm)
        self.enter(self.output)
        half_logits = self.c * self.case.tokens * self.size.vocab
        self.linear("output", "logits", half_logits)
        self.leave(self.output)
        strategy.leave(ROOT)
        if self.copies:
            free("norm: output")
            take("logits in float32", self.logits_bytes)
            free("logits")
            self.ledger.rename("logits in float32", "logits", self.logits_bytes)
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

    # Backward: the gradient of the residual stream goes from block to block.

    def backward(self) -> None:
        take, free, strategy = self.ledger.take, self.ledger.free, self.strategy
        take("gradient of the loss", self.s)
        take("gradient of the log-probabilities", self.logits_bytes)
        free("number of targets")
        take("gradient of the logits", self.logits_bytes)
        free("gradient of the log-probabilities")
        free("log-probabilities")
        if self.copies:
            self.cast("gradient of the logits", self.logits_bytes, self.logits_bytes // 2)
        strategy.enter_backward(self.output)
        self.unit = self.output
        self.linear_backward("output", "gradient of the logits", "norm: output", "gradient of norm's output")
        strategy.leave_backward(self.output)
        self.unit = self.final_norm
        if self.final_norm != ROOT:
            strategy.enter_backward(self.final_norm)
        self.norm_backward(FINAL_NORM, residual=False)
        if self.final_norm != ROOT:
            strategy.leave_backward(self.final_norm)
        for block in reversed(self.blocks):
            self.unit = block
            strategy.enter_backward(block)
            self.backward_block()
            strategy.leave_backward(block)
        self.unit = EMBEDDING
        strategy.enter_backward(EMBEDDING)
        take(GRADIENTS, self.s * self.of[EMBEDDING]["embedding"].values)
        free("gradient of the residual stream")
        strategy.gradient(self.of[EMBEDDING]["embedding"])
        strategy.leave_backward(EMBEDDING)
        strategy.leave_backward(ROOT)
        free("gradient of the loss")

    def backward_block(self) -> None:
        self.feed_forward_backward()
        self.norm_backward("feed_forward_norm")
        self.attention_backward()
        self.norm_backward("attention_norm")

    def cast(self, name: str, before: int, after: int) -> None:
        """To another dtype: both exist for a moment."""
        self.ledger.take(f"{name}, cast", after)
        self.ledger.free(name, before)
        self.ledger.rename(f"{name}, cast", name, after)

    def linear_backward(
        self, name: str, of_output: str, inputs: str, of_input: str, *, casts_input: bool = True, added: bool = False
    ) -> None:
        """Gradients of the weight and, as `of_input`, of the `inputs`; frees what came, `of_output`, and the inputs.

        `added` where the inputs have a gradient from elsewhere already, to which this one is added.
        """
        take, free, parameter = self.ledger.take, self.ledger.free, self.of[self.unit][name]
        nbytes = self.ffn_bytes if name == "feed_forward.w2" else self.hidden_bytes
        weight = "half-precision gradient of a weight" if self.copies else GRADIENTS
        of_input_now = f"{of_input} by {name}" if added else of_input
        self.strategy.read(parameter)
        take(weight, self.c * parameter.values)
        take(of_input_now, nbytes)
        self.strategy.drop(parameter)
        if of_output:
            free(of_output)
        if self.copies:
            free(f"{name}: weight in half precision", self.c * parameter.values)
            if casts_input:
                free(f"{name}: input in half precision", self.hidden_bytes)
                self.cast(of_input_now, nbytes, self.residual_bytes)
        if inputs and not (self.copies and casts_input):
            free(inputs, nbytes)
        if added:
            in_place = self.copies or name == "attention.query"
            if not in_place:
                take(f"{of_input}, summed", nbytes)
                free(of_input)
                self.ledger.rename(f"{of_input}, summed", of_input, nbytes)
            free(of_input_now)
        if self.copies:
            take(GRADIENTS, FLOAT * parameter.values)
            free(weight)
        self.strategy.gradient(parameter)

    def norm_backward(self, name: str, residual: bool = True) -> None:
        """The gradient of its output becomes that of its input; with `residual` it is added to what flows past it."""
        take, free, parameter = self.ledger.take, self.ledger.free, self.of[self.unit][name]
        residual_bytes, column = self.residual_bytes, self.column_bytes
        self.strategy.read(parameter)
        take("gradient of norm's weight, before its sum", residual_bytes)
        take("gradient of x / rms(x)", residual_bytes)
        self.strategy.drop(parameter)
        take(GRADIENTS, self.s * parameter.values)
        free("gradient of norm's weight, before its sum")
        free("gradient of norm's output")
        free(f"{name}: x / rms(x)", residual_bytes)
        self.strategy.gradient(parameter)
        take("gradient of 1 / rms(x), before its sum", residual_bytes)
        take("gradient of norm's input" if residual else "gradient of the residual stream", residual_bytes)
        take("gradient of 1 / rms(x)", column)
        free("gradient of 1 / rms(x), before its sum")
        free("gradient of x / rms(x)")
        free("gradient of norm's input")
        self.ledger.borrow("gradients of rms(x)", 3 * column)
        free("gradient of 1 / rms(x)")
        take("gradient of mean(x^2)", residual_bytes)
        free(f"{name}: 1 / rms(x)", column)
        self.ledger.borrow("gradients of x^2", 3 * residual_bytes)
        free("gradient of mean(x^2)")
        first = self.unit == self.blocks.start and name == "attention_norm"
        free("embedding output" if first else "residual stream", residual_bytes)

    def feed_forward_backward(self) -> None:
        """What came flows past it; frees SwiGLU's activations, and leaves the gradient of the norm's output."""
        take, free, ffn = self.ledger.take, self.ledger.free, self.ffn_bytes
        came = self.half_gradient()
        self.linear_backward(
            "feed_forward.w2", came, "SwiGLU product", "gradient of SwiGLU's product", casts_input=False
        )
        take("gradient of SwiGLU's up-projection", ffn)
        take("gradient of silu", ffn)
        free("gradient of SwiGLU's product")
        free("SwiGLU up-projection", ffn)
        free("silu of the SwiGLU gate", ffn)
        self.linear_backward("feed_forward.w3", "gradient of SwiGLU's up-projection", "", "gradient of norm's output")
        take("gradient of SwiGLU's gate", ffn)
        free("gradient of silu")
        free("SwiGLU gate", ffn)
        self.linear_backward(
            "feed_forward.w1",
            "gradient of SwiGLU's gate",
            "feed_forward_norm: output",
            "gradient of norm's output",
            added=True,
        )

    def half_gradient(self) -> str:
        """Under autocast, the name of what came in half precision; else nothing is made that would have to be freed."""
        if not self.copies:
            return ""
        self.ledger.take("half-precision gradient of the block's output", self.hidden_bytes)
        return "half-precision gradient of the block's output"

    def attention_backward(self) -> None:
        """What came flows past it; frees attention's activations, and leaves the gradient of the norm's output."""
        free, hidden = self.ledger.free, self.hidden_bytes
        heads = "attention output, heads side by side"
        self.linear_backward(
            "attention.output", self.half_gradient(), heads, "gradient of attention's output", casts_input=False
        )
        self.kernel.backward()
        for _ in ("k", "q"):
            self.ledger.borrow("RoPE: gradients of halves of q or k", 2 * hidden)
            free("RoPE's tables in half precision", self.rope_bytes)
        self.kernel.backward_of_value()
        self.linear_backward("attention.value", "gradient of v", "", "gradient of norm's output")
        for name in ("attention.key", "attention.query"):
            last = name == "attention.query"
            self.ledger.borrow("gradient of q or k, heads side by side", hidden)
            of_output = "gradients of q and k"
            if not last:  # the one of k is freed, the one of q stays
                self.ledger.rename(of_output, "gradient of k", hidden)
                of_output = "gradient of k"
            inputs = "attention_norm: output" if last else ""
            self.linear_backward(name, of_output, inputs, "gradient of norm's output", added=True)
