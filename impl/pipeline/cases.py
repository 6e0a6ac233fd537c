"""Cases of pipeline parallelism: what varies, and the id."""

from __future__ import annotations

from dataclasses import dataclass

from shardmark.api import Grid


@dataclass(frozen=True)
class SleepingCase:
    """A step of `micro_batches` micro-batches on ranks that sleep in place of computing: `unit_ms` for each of a rank's
    forward passes, input gradients and weights' gradients, whatever the number of stages that share them. So schedules
    show that are wider than the machine. The test sets `ranks`."""

    of_each: int
    """Micro-batches for each rank."""
    unit_ms: float
    ranks: int = 0
    dtype: str = "float32"

    @property
    def micro_batches(self) -> int:
        return self.of_each * self.ranks

    def __str__(self) -> str:
        return f"{self.of_each}_of_each" + (f"-{self.ranks}ranks" if self.ranks else "")

    @property
    def words(self) -> str:
        """The case as sentences have it."""
        return f"with {self.of_each} micro-batches for each of {self.ranks} ranks"


@dataclass(frozen=True)
class DecoderCase:
    """A step of AdamW of a decoder of that size (`impl.mesh.cases`), cut into stages: `micro_batches` of `rows`
    sequences of `context` tokens. The test sets `ranks`."""

    model: str
    micro_batches: int
    rows: int
    context: int
    ranks: int = 0
    dtype: str = "float32"

    def __str__(self) -> str:
        ranks = f"-{self.ranks}ranks" if self.ranks else ""
        return f"{self.model}-{self.micro_batches}x{self.rows}-s{self.context}-{self.dtype}{ranks}"

    @property
    def words(self) -> str:
        """The case as sentences have it."""
        return f"with the {self.model} decoder and {self.micro_batches} micro-batches"


DECODERS = Grid(
    smoke=[DecoderCase("tiny-deep", micro_batches=4, rows=1, context=32)],
    laptop=[DecoderCase("mini-deep", micro_batches=8, rows=2, context=64)],
    paper=[DecoderCase("medium", micro_batches=8, rows=2, context=1024)],
)

CASES = Grid(
    smoke=[SleepingCase(2, 2.0)],
    laptop=[SleepingCase(2, 10.0)],
    paper=[SleepingCase(of_each, 40.0) for of_each in (1, 2, 4)],
)
