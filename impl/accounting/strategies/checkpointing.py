"""Activation checkpointing: what forward keeps of each block, and what backward computes again.

A checkpointed block runs forward as ever, then frees all activations but those its policy keeps. Before its backward it
computes the others again, up to its last product, which backward has no use for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from impl.accounting.strategies import Strategy

if TYPE_CHECKING:
    from impl.accounting.programs.transformer import TransformerStep


class EveryNth(Strategy):
    """Each n-th block keeps its input, and the others everything."""

    step: TransformerStep

    def __init__(self, n: int) -> None:
        self.n = n
        self.dropped: dict[int, dict[str, int]] = {}

    def checkpointed(self, unit: int) -> bool:
        return unit in self.step.blocks and (unit - self.step.blocks.start + 1) % self.n == 0

    def enter(self, unit: int) -> None:
        self.before = dict(self.ledger.live.entries)

    def leave(self, unit: int) -> None:
        if self.checkpointed(unit):
            self.dropped[unit] = self.left_by_block()
            for name, nbytes in self.dropped[unit].items():
                self.ledger.free(name, nbytes)

    def left_by_block(self) -> dict[str, int]:
        """What the block took and left, but for its output."""
        left = {name: nbytes - self.before.get(name, 0) for name, nbytes in self.ledger.live.entries.items()}
        left["residual stream"] -= self.step.residual_bytes
        return {name: nbytes for name, nbytes in left.items() if nbytes}

    def enter_backward(self, unit: int) -> None:
        for name, nbytes in self.dropped.pop(unit, {}).items():
            self.ledger.take(name, nbytes)


class Recursive(EveryNth):
    """Each segment of `length` blocks keeps its input. Before its backward the inputs of all its blocks are there, and
    then one block's activations at a time."""

    def __init__(self, length: int) -> None:
        super().__init__(1)
        self.length = length

    def place(self, unit: int) -> int:
        """Which block of its segment the unit is, from 0 on."""
        return (unit - self.step.blocks.start) % self.length

    def leave(self, unit: int) -> None:
        super().leave(unit)
        if self.checkpointed(unit) and self.place(unit) > 0:
            self.ledger.free("residual stream", self.step.residual_bytes)  # its input

    def enter_backward(self, unit: int) -> None:
        if self.checkpointed(unit) and (unit == self.step.blocks[-1] or self.place(unit) == self.length - 1):
            self.ledger.take("residual stream", self.place(unit) * self.step.residual_bytes)
        super().enter_backward(unit)


class Selective(EveryNth):
    """Each block keeps its input and what its matrix products and attention gave."""

    KEPT = "v", "attention output", "log-sum-exp", "SwiGLU gate", "SwiGLU up-projection"

    def __init__(self) -> None:
        super().__init__(1)

    def left_by_block(self) -> dict[str, int]:
        return {name: nbytes for name, nbytes in super().left_by_block().items() if name not in self.KEPT}

    def products(self) -> dict[str, int]:
        """What forward frees where nothing is checkpointed."""
        hidden = self.step.hidden_bytes
        return {"q and k before RoPE": 2 * hidden, "attention projection": hidden, "feed-forward output": hidden}

    def leave(self, unit: int) -> None:
        super().leave(unit)
        if self.checkpointed(unit):
            for name, nbytes in self.products().items():
                self.ledger.take(name, nbytes)

    def enter_backward(self, unit: int) -> None:
        if self.checkpointed(unit):
            for name in ("q and k before RoPE", "attention projection"):  # read by what is computed again
                self.ledger.free(name, self.products()[name])
        super().enter_backward(unit)

    def leave_backward(self, unit: int) -> None:
        if self.checkpointed(unit):
            self.ledger.free("feed-forward output", self.step.hidden_bytes)  # nothing in backward asks for it
