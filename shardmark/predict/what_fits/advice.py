"""Decide which strategies fit; for the others, find the cheapest change or the largest batch with which they do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from shardmark.api.registry import FAMILIES, resolve
from shardmark.meter.hardware import Hardware
from shardmark.predict.simulation.communicator import room
from shardmark.predict.what_fits.prediction import Prediction, Refused, StepTime, Strategy
from shardmark.predict.what_fits.processes import Predictions

MOST_LENGTH = 2**20
"""The largest batch or context that is tried."""


@dataclass(frozen=True)
class Outcome:
    """One strategy on that many devices of one kind."""

    strategy: Strategy
    ranks: int
    hardware: Hardware
    found: Prediction | Refused
    change: str | None = None
    """The cheapest change that makes it fit; None where it fits, or no change helps."""
    rows: int | str | None = None
    """Rows of the largest batch that fits, if asked for, or why none was found."""
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


def outcomes(
    predictions: Predictions,
    strategies: Sequence[Strategy],
    ranks: Sequence[int],
    devices: Sequence[Hardware],
    batch: bool,
    context: bool,
) -> list[Outcome]:
    """One outcome for each device, strategy and number of ranks, with the largest `batch` and the longest `context` if
    asked for. For each device, outcomes that fit come first, the most rows per second at the top.
    """
    sizes = sorted(ranks)
    wanted = [
        (strategy, size, on)
        for on in devices
        for strategy in strategies
        for size in ([1] if not strategy.on_ranks else sizes)
    ]
    for each in wanted:
        predictions.ask(*each)

    def outcome(strategy: Strategy, size: int, on: Hardware) -> Outcome:
        found = _predicted(predictions, strategy, size, on)
        change = rows = length = None
        if found.fits is False:
            change = next(_changes(predictions, found, sizes), None)
        if (batch and found.fits) or (found.fits is False and change is None and _could_fit(found)):
            rows = _largest_size(predictions, found, 0)
        if context and found.fits:
            length = _largest_size(predictions, found, 1)
        return replace(found, change=change, rows=rows, context=length)

    with ThreadPoolExecutor(len(wanted)) as threads:  # they wait for the processes
        found = list(threads.map(outcome, *zip(*wanted, strict=True)))
    return [each for on in devices for each in sorted((o for o in found if o.hardware == on), key=place)]


def place(outcome: Outcome) -> tuple[bool, float]:
    """Sort key of the table's lines: strategies that fit first, by seconds for each rank's batch, fastest first."""
    if not outcome.fits or outcome.step is None:
        return not outcome.fits, math.inf
    return False, outcome.step.seconds / outcome.ranks


def _predicted(
    predictions: Predictions, strategy: Strategy, ranks: int, on: Hardware, dim: int = 0, size: int | None = None
) -> Outcome:
    """Wait for the prediction; `size` is the batch's size in dimension `dim`, None for the user's own."""
    return Outcome(strategy, ranks, on, predictions.ask(strategy, ranks, on, dim, size)())


def _could_fit(found: Outcome) -> bool:
    """True where fewer activations could make it fit."""
    return isinstance(found.found, Prediction) and found.found.before_step <= found.room


def _changes(predictions: Predictions, found: Outcome, sizes: Sequence[int]) -> Iterator[str]:
    """Yield changes that make it fit, the cheapest first: checkpointing, autocast to bfloat16, more of ZeRO."""
    mine = found.strategy
    family = FAMILIES[mine.family]
    checkpoints = mine.checkpointed or family.checkpoints
    if _could_fit(found):
        for checkpointed, autocast in ((True, False), (False, True), (True, True)):
            if (checkpoints and checkpointed) or (autocast and predictions.case.dtype != "float32"):
                continue
            more = Strategy(mine.implementation, mine.checkpointed or checkpointed, autocast)
            if _predicted(predictions, more, found.ranks, found.hardware).fits:
                yield " + ".join(["checkpointing"] * checkpointed + ["autocast"] * autocast)
    sharding = [each for each in FAMILIES.values() if each.strategies and each.zero_stage > family.zero_stage]
    for each in sorted(sharding, key=lambda each: each.zero_stage):
        name, _ = each.strategies[0]
        for size in sizes if not mine.on_ranks else [found.ranks]:
            for checkpointed in (False, True):
                other = Strategy(resolve(each.name, name), checkpointed)
                there = _predicted(predictions, other, size, found.hardware)
                if there.fits:
                    yield f"{other}" + f" on {size} ranks" * (size != found.ranks)
                if not _could_fit(there):
                    break


def _largest_size(predictions: Predictions, found: Outcome, dim: int) -> int | str:
    """The largest size of the batch in that dimension with which it fits; or why none was found.

    A size that the model refuses counts as too large, if the model takes any size beside the user's.
    """
    start = predictions.sizes[dim]
    if isinstance(start, str):
        return start
    taken: set[int] = set()
    refused: list[str] = []

    def needed(size: int) -> int:
        there = _predicted(predictions, found.strategy, found.ranks, found.hardware, dim, size)
        if there.free is not None:
            taken.add(size)
            return -there.free
        assert isinstance(there.found, Refused)
        refused.append(there.found.reason)
        return 1

    most = largest(needed, start)
    return refused[0] if refused and not taken - {start} else most


def largest(excess: Callable[[int], int], start: int) -> int:
    """The largest number from 1 to MOST_LENGTH whose excess is at most 0, or 0; `start` is where the search begins.

    The excess is almost linear, so the search alternates between linear interpolation and bisection.
    """
    known = {start: excess(start)}
    low, high = (start, None) if known[start] <= 0 else (0, start)
    by_line = True
    while high is None or high - low > 1:
        if high is None:
            probe = min(2 * low, MOST_LENGTH)
        elif low and by_line:
            probe = low + int((high - low) * -known[low] / max(1, known[high] - known[low]))
        else:
            probe = (low + high) // 2
        probe = probe if high is None else min(max(probe, low + 1), high - 1)
        by_line = not by_line
        known[probe] = excess(probe)
        if known[probe] > 0:
            high = probe
        elif probe == MOST_LENGTH:
            return probe
        else:
            low = probe
    return low
