"""Activation checkpointing: bytes at the peak of a training step, and FLOPs that are computed again.

In float32 alone, ValueError for another dtype. T tokens, d = d_model, f = d_ff.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from impl.accounting.ledger import Bytes, Ledger
from impl.accounting.programs.transformer import TransformerStep
from impl.accounting.strategies import Strategy
from impl.accounting.strategies.checkpointing import EveryNth, Recursive, Selective
from impl.checkpointing.segments import segment_length
from impl.model.sizes import SIZES

if TYPE_CHECKING:
    from impl.training_step.cases import TrainingStepCase


@dataclass(frozen=True)
class Checkpointed:
    """The bytes and FLOPs of one policy."""

    strategy: Callable[[TrainingStepCase], Strategy]
    again: Callable[[TrainingStepCase], tuple[int, int]] = lambda case: (0, 0)
    """How many blocks are computed again but for their last product, which backward has no use for, and whole."""

    def kept(self, case: TrainingStepCase) -> int:
        """Bytes that forward leaves for backward, the loss included."""
        marks = self._run(case).marks
        return marks["after_forward"] - marks["before_step"]

    def peak(self, case: TrainingStepCase, device: str = "cpu") -> Bytes:
        return self._run(case, device).peak

    def recomputed(self, case: TrainingStepCase) -> int:
        """FLOPs that are computed again; causal attention counts half, as in `training_work`."""
        block, last = _block_flops(case)
        but_for_last, whole = self.again(case)
        return but_for_last * (block - last) + whole * block

    def _run(self, case: TrainingStepCase, device: str = "cpu") -> Ledger:
        if case.dtype != "float32":
            raise ValueError(f"checkpointing's bytes have a closed form in float32, not in {case.dtype}")
        return TransformerStep(case, self.strategy(case), autocast=True, device=device).run()


def every(n: int) -> Checkpointed:
    """Each n-th block keeps its input, and the others everything."""
    return Checkpointed(lambda case: EveryNth(n), again=lambda case: (_layers(case) // n, 0))


def _layers(case: TrainingStepCase) -> int:
    return SIZES[case.model].layers


def _segments(case: TrainingStepCase) -> int:
    return -(-_layers(case) // segment_length(_layers(case)))


NONE = Checkpointed(lambda case: Strategy())

FULL = every(1)

RECURSIVE = Checkpointed(
    lambda case: Recursive(segment_length(_layers(case))),
    again=lambda case: (_layers(case), _layers(case) - _segments(case)),
)

SELECTIVE = Checkpointed(lambda case: Selective())

POLICIES = {"none": NONE, "full": FULL, "every_2": every(2), "recursive": RECURSIVE, "selective": SELECTIVE}
"""By the policies' names in the registry."""


def _block_flops(case: TrainingStepCase) -> tuple[int, int]:
    """FLOPs of a block's forward, and those of its last product: the feed-forward's projection back."""
    size, tokens = SIZES[case.model], case.batch * case.context
    last = 2 * tokens * size.d_model * size.d_ff
    attention = 2 * tokens * case.context * size.d_model  # two products, half of them where causal
    return 8 * tokens * size.d_model**2 + 3 * last + attention, last
