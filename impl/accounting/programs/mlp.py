"""The MLP language model's training step in closed form: FLOPs, and bytes live at each phase and at its peaks.

One AdamW step (fused, so without temporaries), eager, in float32 or under autocast, with or without checkpointing. T
tokens, d = dim, h = hidden = 4 d, V = vocab; c bytes a value that products are made in, 4 or under autocast 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from impl.accounting.ledger import Bytes, Ledger
from impl.accounting.programs.parameters import BYTES, FLOAT
from impl.accounting.strategies import COUNTS, GRADIENTS, STATE, peak_of_part
from impl.model.mlp import MLP_SIZES

if TYPE_CHECKING:
    from impl.training_step.cases import TrainingStepCase


@dataclass(frozen=True)
class StepBytes:
    """Bytes live through a training step, at the end of each phase and at the peaks of its parts."""

    after_init: int
    before_step: int
    """Of a step that is not the first: AdamW's moments are there."""
    after_forward: int
    after_backward: int
    peak_of_forward: int
    peak_of_backward: int
    peak_of_first_step: int
    """Moments are made in the first update, when activations are gone, so the first step's peak is the lower one."""


def activation_bytes(case: TrainingStepCase) -> int:
    """Bytes that eager forward leaves for backward, the loss included.

    A block keeps its input, the hidden layer before gelu and after: c (T d + 2 T h). The head keeps the last block's
    output, its norm's result, means and deviations, log-probabilities, the loss and the number of targets in it.
    Autocast keeps a copy of each matrix beside them.
    """
    size, tokens, c = MLP_SIZES[case.model], case.tokens, BYTES[case.dtype]
    blocks = size.layers * c * tokens * (size.dim + 2 * size.hidden)
    head = tokens * (FLOAT * size.dim + c * size.dim + 2 * FLOAT + FLOAT * size.vocab) + 2 * FLOAT
    return blocks + head + (c * _matrices(case) if c != FLOAT else 0)


def step_bytes(case: TrainingStepCase, checkpointed: bool = False) -> StepBytes:
    """Bytes live through one training step of that case.

    Exact to the byte in float32 on CPU. Under autocast the library takes scratch space there in half-precision
    products, which shows where there are so few tokens that a matrix is larger than the logits.
    """
    ledger = MLPStep(case, checkpointed).run()
    marks, peak = ledger.marks, ledger.peak
    after_init = marks["before_step"].without(STATE, COUNTS)
    first_step = max(peak.without(STATE, COUNTS), marks["after_backward"])  # where the first update makes the state
    return StepBytes(
        after_init=after_init,
        before_step=marks["before_step"],
        after_forward=marks["after_forward"],
        after_backward=marks["after_backward"],
        peak_of_forward=ledger.peaks["after_forward"],
        peak_of_backward=peak,
        peak_of_first_step=first_step,
    )


def eager_peak(case: TrainingStepCase, checkpointed: bool = False) -> Bytes:
    """Bytes at the peak of the part of the step that the case names, of everything live; moments in a whole step."""
    return peak_of_part(MLPStep(case, checkpointed).run(), case.mode)


def _matrices(case: TrainingStepCase) -> int:
    """Values of all matrices that multiply: not the embedding's."""
    size = MLP_SIZES[case.model]
    return size.layers * 2 * size.dim * size.hidden + size.vocab * size.dim


class MLPStep:
    """One step, operator by operator as eager PyTorch does it; the gradient of the residual stream is float32."""

    def __init__(self, case: TrainingStepCase, checkpointed: bool) -> None:
        size, c, tokens = MLP_SIZES[case.model], BYTES[case.dtype], case.tokens
        self.case, self.size, self.checkpointed, self.ledger = case, size, checkpointed, Ledger()
        self.c, self.copies = c, c != FLOAT
        self.stream_bytes, self.dim_bytes, self.hidden_bytes = (
            FLOAT * tokens * size.dim,  # of the residual stream
            c * tokens * size.dim,  # of as much in the dtype of products
            c * tokens * size.hidden,
        )
        self.logits_bytes, self.statistics_bytes = FLOAT * tokens * size.vocab, 2 * FLOAT * tokens
        self.matrix, self.table = size.hidden * size.dim, size.vocab * size.dim  # values

    def run(self) -> Ledger:
        """Marks "before_step", "after_forward" and "after_backward"; AdamW's state is there from the start."""
        take = self.ledger.take
        take("parameters", FLOAT * self.size.parameters)
        take("tokens and targets", 16 * self.case.tokens)  # int64
        take(STATE, 2 * FLOAT * self.size.parameters)
        take(COUNTS, FLOAT * (4 + 4 * self.size.layers))
        self.ledger.mark("before_step")
        self.forward()
        self.ledger.mark("after_forward")
        self.backward()
        self.ledger.mark("after_backward")
        return self.ledger

    def forward(self) -> None:
        take, free = self.ledger.take, self.ledger.free
        take("residual stream", self.stream_bytes)  # the embedding's output
        for _ in range(self.size.layers):
            self.forward_block()
        take("norm output", self.stream_bytes)
        take("norm: means and deviations", self.statistics_bytes)
        if self.copies:
            take("output projection in half precision", self.c * self.table)
            take("norm output in half precision", self.dim_bytes)
        take("half-precision logits" if self.copies else "logits", self.c * self.case.tokens * self.size.vocab)
        if self.copies:
            free("norm output")
            take("logits", self.logits_bytes)
            free("half-precision logits")
        take("log-probabilities", self.logits_bytes)
        take("loss", FLOAT)
        take("number of targets", FLOAT)
        free("logits")
        if self.copies:  # of weights, the context of autocast holds the copies to its end
            free("biases in half precision")
            if self.checkpointed:
                free("W1 and W2 in half precision")

    def forward_block(self) -> None:
        take, free = self.ledger.take, self.ledger.free
        if self.copies:
            take("biases in half precision", self.c * self.size.hidden)
            take("W1 and W2 in half precision", self.c * self.matrix)
            take("block input in half precision", self.dim_bytes)
        take("hidden layer", self.hidden_bytes)
        if self.copies and self.checkpointed:
            free("block input in half precision", self.dim_bytes)
        take("gelu of the hidden layer", self.hidden_bytes)
        if self.checkpointed:
            free("hidden layer", self.hidden_bytes)
        if self.copies:
            take("biases in half precision", self.c * self.size.dim)
            take("W1 and W2 in half precision", self.c * self.matrix)
        take("block output", self.dim_bytes)
        if self.checkpointed:
            free("gelu of the hidden layer", self.hidden_bytes)
        if self.copies:
            take("block output in float32", self.stream_bytes)
        take("residual stream", self.stream_bytes)
        free("block output")
        if self.copies:
            free("block output in float32")
        if self.copies and not self.checkpointed:
            free("residual stream", self.stream_bytes)  # the block's input: its copy is what the graph keeps

    def backward(self) -> None:
        take, free = self.ledger.take, self.ledger.free
        take("gradient of the loss", FLOAT)
        take("gradient of the log-probabilities", self.logits_bytes)
        free("number of targets")
        take("gradient of the logits", self.logits_bytes)  # the peak, where there are tokens enough
        free("gradient of the log-probabilities")
        free("log-probabilities")
        if self.copies:
            take("half-precision gradient of the logits", self.logits_bytes // 2)
            free("gradient of the logits")
        weight = self.gradient_of_product(self.table)
        take("gradient of the norm's output", self.dim_bytes)
        free("half-precision gradient of the logits" if self.copies else "gradient of the logits")
        if self.copies:
            free("output projection in half precision")
        free("norm output in half precision" if self.copies else "norm output")
        self.in_float32("gradient of the norm's output", self.dim_bytes)
        self.parameter_in_float32(weight, self.table)
        take("gradient of the residual stream", self.stream_bytes)
        take(GRADIENTS, 2 * FLOAT * self.size.dim)  # the norm's weight and bias
        free("gradient of the norm's output")
        free("residual stream", self.stream_bytes)
        free("norm: means and deviations")
        for _ in range(self.size.layers):
            self.backward_block()
        take(GRADIENTS, FLOAT * self.table)  # the embedding's
        free("gradient of the residual stream")
        free("gradient of the loss")

    def backward_block(self) -> None:
        take, free, size, copies = self.ledger.take, self.ledger.free, self.size, self.copies
        take("half-precision gradient of the block's output", self.dim_bytes if copies else 0)
        if self.checkpointed:
            self.forward_again()
        take("gradient of gelu", self.hidden_bytes)
        weight = self.gradient_of_product(self.matrix)
        if self.checkpointed:  # what is computed again is freed as soon as it is read, else when its node is done
            self.free_gelu()
        bias = self.gradient_of_product(size.dim)
        if not self.checkpointed:
            self.free_gelu()
        free("half-precision gradient of the block's output")
        self.parameter_in_float32(weight, self.matrix)
        self.parameter_in_float32(bias, size.dim)
        take("gradient of the hidden layer", self.hidden_bytes)
        free("gradient of gelu")
        free("hidden layer", self.hidden_bytes)
        take("gradient of the block's input", self.dim_bytes)
        weight = self.gradient_of_product(self.matrix)
        if self.checkpointed:
            self.free_input_copies()
        bias = self.gradient_of_product(size.hidden)
        free("gradient of the hidden layer")
        if not self.checkpointed:
            self.free_input_copies()
        if self.checkpointed or not copies:
            free("residual stream", self.stream_bytes)
        self.in_float32("gradient of the block's input", self.dim_bytes)
        free("gradient of the block's input")  # added to the residual stream's
        self.parameter_in_float32(weight, self.matrix)
        self.parameter_in_float32(bias, size.hidden)

    def free_gelu(self) -> None:
        self.ledger.free("gelu of the hidden layer", self.hidden_bytes)
        if self.copies:
            self.ledger.free("W1 and W2 in half precision", self.c * self.matrix)

    def free_input_copies(self) -> None:
        if self.copies:
            self.ledger.free("W1 and W2 in half precision", self.c * self.matrix)
            self.ledger.free("block input in half precision", self.dim_bytes)

    def forward_again(self) -> None:
        """What the block would have kept, without its last product."""
        take, free, c, copies = self.ledger.take, self.ledger.free, self.c, self.copies
        if copies:
            take("biases in half precision", c * self.size.hidden)
            take("W1 and W2 in half precision", c * self.matrix)
            take("block input in half precision", self.dim_bytes)
        take("hidden layer", self.hidden_bytes)
        take("gelu of the hidden layer", self.hidden_bytes)
        if copies:
            take("biases in half precision", c * self.size.dim)
            take("W1 and W2 in half precision", c * self.matrix)
            free("biases in half precision")

    def gradient_of_product(self, count: int) -> str:
        """A parameter's gradient in the dtype of products; returns its name."""
        name = f"half-precision gradient of {count:,} values" if self.copies else GRADIENTS
        self.ledger.take(name, self.c * count)
        return name

    def parameter_in_float32(self, name: str, count: int) -> None:
        """Under autocast, its gradient becomes float32."""
        if self.copies:
            self.ledger.take(GRADIENTS, FLOAT * count)
            self.ledger.free(name)

    def in_float32(self, name: str, nbytes: int) -> None:
        """Under autocast, a gradient becomes float32; both exist for a moment."""
        if self.copies:
            self.ledger.take(f"{name} in float32", 2 * nbytes)
            self.ledger.free(name)
            self.ledger.rename(f"{name} in float32", name, 2 * nbytes)
