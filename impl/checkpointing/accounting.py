"""Activation checkpointing in closed form: bytes at the peak of a training step, and FLOPs that it spends once more.

The step is that of `impl.accounting.model`, and so is the list of what a block keeps; in float32 alone, ValueError for
another dtype. T tokens, d = d_model, f = d_ff.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from impl.accounting.model import activation_bytes, training_bytes
from impl.checkpointing.segments import segment_length
from impl.model.sizes import SIZES

if TYPE_CHECKING:
    from impl.training_step.cases import TrainingStepCase


_FLOAT = 4  # bytes of a float32


@dataclass(frozen=True)
class Checkpointed:
    """The closed forms of one policy."""

    before: Callable[[TrainingStepCase, int], int]
    """Bytes kept of blocks 0 to i - 1 while block i goes backward."""
    again: Callable[[TrainingStepCase], tuple[int, int]] = lambda case: (0, 0)
    """How many blocks are computed once more but for their last product, which backward has no use for, and whole."""
    after_forward: Callable[[TrainingStepCase], int] | None = None
    """Bytes that forward keeps of all blocks, where that is not `before` the one that follows the last."""
    idle: Callable[[TrainingStepCase], int] = lambda case: 0
    """Bytes there beside what the backward of a block needs."""

    def kept(self, case: TrainingStepCase) -> int:
        """Bytes that forward leaves for backward, the loss included."""
        return activation_bytes(SIZES[case.model], case.batch, case.context) - self._dropped(case)

    def peak(self, case: TrainingStepCase) -> int:
        """Bytes at the largest of the step's moments: the loss, what comes before the blocks, each block, embedding."""
        step, dropped = training_bytes(case), self._dropped(case)
        blocks = [_block_peak(case, i) + self.before(case, i) + self.idle(case) for i in range(_layers(case))]
        return max(step.peak_at_loss - dropped, step.peak_at_output - dropped, *blocks, step.peak_at_embedding)

    def recomputed(self, case: TrainingStepCase) -> int:
        """FLOPs that are computed once more; causal attention counts half, as in `training_work`."""
        block, last = _block_flops(case)
        but_for_last, whole = self.again(case)
        return but_for_last * (block - last) + whole * block

    def _dropped(self, case: TrainingStepCase) -> int:
        if case.dtype != "float32":
            raise ValueError(f"checkpointing's bytes have a closed form in float32, not in {case.dtype}")
        kept = self.before(case, _layers(case)) if self.after_forward is None else self.after_forward(case)
        return _layers(case) * _block(case) - kept


def every(n: int) -> Checkpointed:
    """Each n-th block keeps its input, and the others everything."""
    return Checkpointed(
        before=lambda case, i: i // n * _residual(case) + (i - i // n) * _block(case),
        again=lambda case: (_layers(case) // n, 0),
    )


def _segments(case: TrainingStepCase) -> int:
    return -(-_layers(case) // segment_length(_layers(case)))


def _inputs_in_segments(case: TrainingStepCase, i: int) -> int:
    """One for each segment that ends before block i, and for each block before it in its own."""
    length = segment_length(_layers(case))
    return (i // length + i % length) * _residual(case)


def _products(case: TrainingStepCase) -> int:
    """Bytes that a block's input, matrix products and attention take.

    7 T d: the input, q and k before their rotation, v, attention's output before and after its projection, and the
    feed-forward's; 2 T f: its two projections; and each head's log-sum-exp.
    """
    size, tokens = SIZES[case.model], case.batch * case.context
    return 7 * _residual(case) + _FLOAT * tokens * (2 * size.d_ff + size.heads)


NONE = Checkpointed(before=lambda case, i: i * _block(case))

FULL = every(1)

RECURSIVE = Checkpointed(
    before=_inputs_in_segments,
    again=lambda case: (_layers(case), _layers(case) - _segments(case)),
    after_forward=lambda case: _segments(case) * _residual(case),
)

SELECTIVE = Checkpointed(
    before=lambda case, i: i * _products(case),
    idle=lambda case: _residual(case),  # the feed-forward's output is kept too, and nothing in backward asks for it
)

POLICIES = {"none": NONE, "full": FULL, "every_2": every(2), "recursive": RECURSIVE, "selective": SELECTIVE}
"""The closed forms of each policy, by its name in the registry."""


def _block_peak(case: TrainingStepCase, i: int) -> int:
    """Bytes at the peak of block i's backward, where it has all its activations, and of the blocks before it nothing.

    Going back through the block frees activations and adds gradients of weights; which of its moments is the largest
    is for d, f and T to decide.
    """
    size, tokens, u = SIZES[case.model], case.batch * case.context, _residual(case)
    v, column = _FLOAT * tokens * size.d_ff, _FLOAT * tokens
    square, wide, norm = (_FLOAT * n for n in (size.d_model**2, size.d_model * size.d_ff, size.d_model))
    later = _FLOAT * size.vocab * size.d_model + norm  # gradients of the output projection and the final norm
    later += (size.layers - 1 - i) * (4 * square + 3 * wide + 2 * norm)
    loss = 2 * _FLOAT  # and its gradient
    nothing = training_bytes(case).before_step + later + loss
    everything = nothing + _block(case) + u  # the gradient that flows from block to block
    feed_forward = 4 * v + 3 * u + column  # its activations, with the norm before it, and its input
    return max(
        # The gradient of SwiGLU's product, which took its place, becomes those of both factors; W2's is there.
        everything + wide + 2 * v,
        # W1 goes backward: of the four T f one is left, a gradient; the inputs' gradients of W1 and W3 are there.
        everything - 3 * v + 3 * wide + 2 * u,
        # Attention goes backward: dq, dk, dv.
        everything - feed_forward + 3 * wide + square + norm + 3 * u,
        # The last of query, key and value goes backward: the block's input, normed before and after its weight, and
        # gradients of the input, of what is normed twice, and of that projection's output: 7 T d with the sum.
        nothing + 3 * wide + 4 * square + norm + 7 * u + column,
    )


def _layers(case: TrainingStepCase) -> int:
    return SIZES[case.model].layers


def _block(case: TrainingStepCase) -> int:
    """Bytes that a block keeps without checkpointing."""
    one, nothing = (
        activation_bytes(replace(SIZES[case.model], layers=layers), case.batch, case.context) for layers in (1, 0)
    )
    return one - nothing


def _residual(case: TrainingStepCase) -> int:
    """Bytes of a block's input."""
    return _FLOAT * case.batch * case.context * SIZES[case.model].d_model


def _block_flops(case: TrainingStepCase) -> tuple[int, int]:
    """FLOPs of a block's forward, and those of its last product: the feed-forward's projection back."""
    size, tokens = SIZES[case.model], case.batch * case.context
    last = 2 * tokens * size.d_model * size.d_ff
    attention = 2 * tokens * case.context * size.d_model  # two products, half of them where causal
    return 8 * tokens * size.d_model**2 + 3 * last + attention, last
