"""The MLP language model's training step in closed form: FLOPs, and bytes live at each phase and at its peaks.

One AdamW step (fused, so without temporaries), eager, in float32 or under autocast, with or without checkpointing. T
tokens, d = dim, h = hidden = 4 d, V = vocab; c bytes a value that products are made in, 4 or under autocast 2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from impl.model.mlp import MLP_SIZES
from shardmark.grid import Work

if TYPE_CHECKING:
    from impl.training_step.cases import TrainingStepCase


_FLOAT = 4  # bytes of a float32, which parameters, gradients and moments are
_COMPUTE = {"float32": 4, "bfloat16": 2, "float16": 2}


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


@dataclass
class Ledger:
    """Bytes live, and the most there were."""

    live: int = 0
    peak: int = field(default=0, init=False)

    def take(self, *sizes: int) -> None:
        """Allocate so many bytes."""
        self.live += sum(sizes)
        self.peak = max(self.peak, self.live)

    def give(self, *sizes: int) -> None:
        """Let go of so many bytes."""
        self.live -= sum(sizes)


def activation_bytes(case: TrainingStepCase) -> int:
    """Bytes that eager forward leaves for backward, the loss included.

    A block keeps its input, the hidden layer before gelu and after: c (T d + 2 T h). The head keeps the last block's
    output, its norm's result, means and deviations, log-probabilities, the loss and the number of targets in it.
    Autocast keeps a copy of each matrix beside them.
    """
    size, tokens, c = MLP_SIZES[case.model], case.tokens, _COMPUTE[case.dtype]
    blocks = size.layers * c * tokens * (size.dim + 2 * size.hidden)
    head = tokens * (_FLOAT * size.dim + c * size.dim + 2 * _FLOAT + _FLOAT * size.vocab) + 2 * _FLOAT
    return blocks + head + (c * _matrices(case) if c != _FLOAT else 0)


def step_bytes(case: TrainingStepCase, checkpointed: bool = False) -> StepBytes:
    """Bytes live through one training step of that case.

    Exact to the byte in float32 on CPU. Under autocast the library takes scratch space there in half-precision
    products, which shows where there are so few tokens that a matrix is larger than the logits.
    """
    size = MLP_SIZES[case.model]
    parameters = _FLOAT * size.parameters
    tensors = 4 + 4 * size.layers  # parameters, each with a step counter in AdamW
    moments = 2 * parameters + _FLOAT * tensors
    after_init = parameters + 16 * case.tokens  # int64 tokens and targets
    ledger = Ledger()
    _forward(ledger, case, checkpointed)
    after_forward, peak_of_forward = ledger.live, ledger.peak
    _backward(ledger, case, checkpointed)
    before_step = after_init + moments
    return StepBytes(
        after_init=after_init,
        before_step=before_step,
        after_forward=before_step + after_forward,
        after_backward=before_step + ledger.live,
        peak_of_forward=before_step + peak_of_forward,
        peak_of_backward=before_step + ledger.peak,
        peak_of_first_step=after_init + max(ledger.peak, ledger.live + moments),
    )


def eager_peak(case: TrainingStepCase, checkpointed: bool = False) -> int:
    """Bytes at the peak of the part of the step that the case names, of everything live; moments in a whole step."""
    step = step_bytes(case, checkpointed)
    if case.mode == "step":
        return step.peak_of_backward
    peak = step.peak_of_forward if case.mode == "forward" else step.peak_of_backward
    return peak - (step.before_step - step.after_init)


def work(case: TrainingStepCase) -> Work:
    """FLOPs and least bytes of the part of a step that the case names.

    6 FLOPs a token for each value of a matrix that multiplies, a third of them in forward; bytes: weights read in
    forward and in backward, gradients written, and AdamW's 28 a parameter.
    """
    forward = 2 * case.tokens * _matrices(case)
    parameters = MLP_SIZES[case.model].parameters
    if case.mode == "forward":
        return Work(forward, _FLOAT * parameters, model_flops=forward)
    moved = (12 if case.mode == "forward_backward" else 40) * parameters
    return Work(3 * forward, moved, model_flops=3 * forward)


def _matrices(case: TrainingStepCase) -> int:
    """Values of all matrices that multiply: not the embedding's."""
    size = MLP_SIZES[case.model]
    return size.layers * 2 * size.dim * size.hidden + size.vocab * size.dim


def _forward(ledger: Ledger, case: TrainingStepCase, checkpointed: bool) -> None:
    """Operator by operator, as eager PyTorch does it."""
    size, tokens, c = MLP_SIZES[case.model], case.tokens, _COMPUTE[case.dtype]
    take, give, autocast = ledger.take, ledger.give, c != _FLOAT
    d, h, v = size.dim, size.hidden, size.vocab
    stream, logits = _FLOAT * tokens * d, _FLOAT * tokens * v
    take(stream)  # the embedding's
    for _ in range(size.layers):
        if autocast:
            take(c * h, c * h * d, c * tokens * d)  # copies of b1, W1 and the input; those of weights last to the end
        take(c * tokens * h)
        if checkpointed and autocast:
            give(c * tokens * d)
        take(c * tokens * h)  # gelu
        if checkpointed:
            give(c * tokens * h)
        if autocast:
            take(c * d, c * h * d)
        take(c * tokens * d)
        if checkpointed:
            give(c * tokens * h)
        if autocast:
            take(stream)  # float32 again
        take(stream)  # the sum
        give(c * tokens * d, stream if autocast else 0)
        if autocast and not checkpointed:
            give(stream)  # the input: its copy is what is kept
    take(stream, 2 * _FLOAT * tokens)  # norm, means and deviations
    if autocast:
        take(c * v * d, c * tokens * d)
    take(c * tokens * v)
    if autocast:
        give(stream)
        take(logits)  # in float32, and those in half precision go
        give(c * tokens * v)
    take(logits, 2 * _FLOAT)  # log-probabilities, loss and number of targets
    give(logits)
    if autocast:
        give(c * size.layers * (h + d))
        give(2 * c * size.layers * h * d if checkpointed else 0)


def _backward(ledger: Ledger, case: TrainingStepCase, checkpointed: bool) -> None:
    """Node by node, as autograd does it; the gradient that flows from block to block is float32."""
    size, tokens, c = MLP_SIZES[case.model], case.tokens, _COMPUTE[case.dtype]
    take, give, autocast = ledger.take, ledger.give, c != _FLOAT
    d, h, v = size.dim, size.hidden, size.vocab
    stream, logits, matrix = _FLOAT * tokens * d, _FLOAT * tokens * v, _FLOAT * h * d

    take(_FLOAT)  # the loss's own gradient
    take(logits)
    give(_FLOAT)
    take(logits)  # with the log-probabilities the third of that size: the peak, where there are tokens enough
    give(2 * logits)
    if autocast:
        take(c * tokens * v)
        give(logits)
    take(c * v * d, c * tokens * d)  # gradients of the output projection and of the norm's result
    give(c * tokens * v, c * v * d if autocast else 0, c * tokens * d)
    if autocast:
        take(stream)
        give(c * tokens * d)
        take(_FLOAT * v * d)
        give(c * v * d)
    take(stream, 2 * _FLOAT * d)
    give(2 * stream, 2 * _FLOAT * tokens)

    for _ in range(size.layers):
        if autocast:
            take(c * tokens * d)
        if checkpointed:
            if autocast:
                take(c * h, c * h * d, c * tokens * d)
            take(2 * c * tokens * h)  # what the block kept, once more
            if autocast:
                take(c * d, c * h * d)
                give(c * h, c * d)
        take(c * tokens * h, c * h * d)  # gradients of gelu's result and of W2
        if checkpointed:  # what is recomputed goes as soon as it is read, else when its node is done
            give(c * tokens * h, c * h * d if autocast else 0)
        take(c * d)
        if not checkpointed:
            give(c * tokens * h, c * h * d if autocast else 0)
        if autocast:
            give(c * tokens * d)
            take(matrix)
            give(c * h * d)
            take(_FLOAT * d)
            give(c * d)
        take(c * tokens * h)  # gradient of gelu's input
        give(2 * c * tokens * h)
        take(c * tokens * d, c * h * d)  # gradients of the block's input and of W1
        if checkpointed and autocast:
            give(c * h * d, c * tokens * d)
        take(c * h)
        give(c * tokens * h)
        if checkpointed:
            give(stream)
        else:
            give(c * tokens * d, c * h * d if autocast else 0)
        if autocast:
            take(stream)
            give(c * tokens * d)
        give(stream)  # added to the one that flows past the block
        if autocast:
            take(matrix)
            give(c * h * d)
            take(_FLOAT * h)
            give(c * h)
    take(_FLOAT * v * d)  # the embedding's
    give(stream, _FLOAT)
