"""One strategy on so many devices of one kind: whether it fits, and how fast it trains."""

from __future__ import annotations

from dataclasses import dataclass

from shardmark.meter.hardware import Hardware
from shardmark.predict.simulation.communicator import room
from shardmark.predict.what_fits.prediction import ModelFacts, Prediction, Refused, StepTime, Strategy


@dataclass(frozen=True)
class Outcome:
    """One strategy on that many devices of one kind, with that batch."""

    strategy: Strategy
    ranks: int
    hardware: Hardware
    model: ModelFacts
    found: Prediction | Refused
    batch: int | None = None
    """Rows of the batch on each rank; None where the batch has no one length."""
    largest_batch: int | None = None
    """Rows of the largest batch that was found to fit, if it was searched for."""
    larger: Refused | None = None
    """Why a larger batch has no prediction, where the search met one."""
    context: int | str | None = None
    """Length of the longest context that fits, if asked for, or why none was found."""

    @property
    def room(self) -> int:
        """Bytes of the device for PyTorch's allocator."""
        return room(self.hardware, self.ranks)

    @property
    def free(self) -> int | None:
        """Bytes left on the device, negative where some are missing; None where that is not known."""
        if isinstance(self.found, Prediction):
            return self.room - self.found.reserved
        missing = self.room - self.found.nbytes
        return missing if missing < 0 else None

    @property
    def step(self) -> StepTime | None:
        """A step's time; None where it is not known."""
        return self.found.steps.get(self.hardware.name) if isinstance(self.found, Prediction) else None

    @property
    def fits(self) -> bool | None:
        return None if self.free is None else self.free >= 0

    @property
    def is_tight(self) -> bool:
        """True where it fits, and would not if the allocator could reuse no block before the host has waited."""
        return bool(self.fits) and isinstance(self.found, Prediction) and self.found.at_most > self.room

    @property
    def rows_per_second(self) -> float | None:
        """Rows over all ranks, of all micro-batches; None where the time or the batch is not known."""
        if not (self.step and self.batch):
            return None
        return self.batch * self.model.case.recipe.micro_batches * self.ranks / self.step.seconds

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens over all ranks; None where the batch has none."""
        rate, tokens = self.rows_per_second, self.model.tokens
        return rate * tokens if rate and tokens else None

    @property
    def mfu(self) -> float | None:
        """Model FLOPs over what the data sheet's peak allows in the step's time; recomputation does not count."""
        case, own = self.model.case, self.model.sizes[0]
        if not (self.step and self.step.peak and case.flops):
            return None
        times = (self.batch / own if self.batch and isinstance(own, int) else 1.0) * case.recipe.micro_batches
        return case.flops * times / (self.step.seconds * self.step.peak)
