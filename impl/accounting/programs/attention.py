"""What attention between RoPE and the output projection allocates and frees, in forward and in backward."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from impl.accounting.programs.forward import TransformerForward


class Sdpa:
    """A fused kernel: leaves the output and log-sum-exp."""

    input_of_projection = "attention output, heads side by side"

    def __init__(self, step: TransformerForward) -> None:
        self.step, self.ledger, self.hidden = step, step.ledger, step.hidden_bytes

    def forward(self) -> None:
        self.ledger.take("attention output", self.hidden)
        self.ledger.take("log-sum-exp", self.step.log_sum_exp_bytes)
        self.ledger.take("attention output, heads side by side", self.hidden)

    def end_of_forward(self) -> None:
        """Called after the output projection: frees what only local variables held."""

    def backward(self) -> None:
        take, free = self.ledger.take, self.ledger.free
        take("gradients of q and k", 2 * self.hidden)
        take("gradient of v", self.hidden)
        free("gradient of attention's output")
        free("q and k", 2 * self.hidden)
        free("v", self.hidden)
        free("attention output", self.hidden)
        free("log-sum-exp", self.step.log_sum_exp_bytes)

    def backward_of_value(self) -> None:
        """Called before the backward of the value projection."""


class Efficient(Sdpa):
    """What SDPA chooses on CUDA in float32: a token's heads lie side by side in its output, so that no copy puts them
    there. See `impl.attention.accounting.sdpa_efficient_peak`."""

    input_of_projection = ""

    def forward(self) -> None:
        self.ledger.take("attention output", self.hidden)
        self.ledger.take("log-sum-exp", self.step.log_sum_exp_bytes)


class Eager(Sdpa):
    """softmax(q kᵀ / sqrt(head_dim)) v as it reads: leaves the probabilities and the mask. In float32.

    PyTorch's batched product wants batch and heads as one dimension, which for v takes a copy where the batch has more
    than one sequence.
    """

    def __init__(self, step: TransformerForward) -> None:
        super().__init__(step)
        case = step.case
        self.scores = step.c * case.batch * step.size.heads * case.context**2
        self.mask = case.context**2  # booleans
        self.root = 8  # sqrt(head_dim), a float64 that the division keeps
        self.copy = self.hidden if case.batch > 1 else 0

    def forward(self) -> None:
        take, free = self.ledger.take, self.ledger.free
        take("attention scores before scaling", self.scores)
        take("sqrt(head_dim)", self.root)
        take("attention scores", self.scores)
        free("attention scores before scaling")
        take("mask before its upper triangle is taken", self.mask)
        take("causal mask", self.mask)
        free("mask before its upper triangle is taken")
        take("masked scores", self.scores)
        free("attention scores")
        take("attention probabilities", self.scores)
        take("v", self.copy)
        take("attention output", self.hidden)
        free("masked scores")
        take("attention output, heads side by side", self.hidden)

    def end_of_forward(self) -> None:
        self.ledger.free("v", self.copy)
        self.ledger.free("attention output", self.hidden)

    def backward(self) -> None:
        take, free = self.ledger.take, self.ledger.free
        if self.copy:
            take("gradient of attention's output, by head", self.copy)
            self.ledger.free("gradient of attention's output", self.copy)
            self.ledger.rename("gradient of attention's output, by head", "gradient of attention's output", self.copy)
        take("gradient of v", self.hidden)
        take("gradient of the probabilities", self.scores)
        free("gradient of attention's output")
        free("v", self.hidden)
        take("gradient of the masked scores", self.scores)
        free("gradient of the probabilities")
        free("attention probabilities", self.scores)
        take("gradient of the scores", self.scores)
        free("gradient of the masked scores")
        free("causal mask", self.mask)
        take("gradient of the scores before scaling", self.scores)
        free("gradient of the scores")
        free("sqrt(head_dim)", self.root)
        take("gradients of q and k", 2 * self.hidden)
        free("gradient of the scores before scaling")
        free("q and k", 2 * self.hidden)

    def backward_of_value(self) -> None:
        self.ledger.borrow("gradient of v, heads side by side", self.hidden)
