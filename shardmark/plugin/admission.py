"""Start a case only where it fits; a case that does not, or that runs out of memory, is a row that says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn, TypeVar, cast

import pytest

from shardmark.api.registry import Unsupported
from shardmark.meter.memory import available_bytes, is_out_of_memory
from shardmark.meter.plan import Identity
from shardmark.plugin.recorder import Recorder
from shardmark.ranks.world import RankError
from shardmark.rows.fill import budget_entry, new_row
from shardmark.rows.row import Memory as MemoryPart
from shardmark.verdict import budget
from shardmark.verdict.budget import MIB, MemoryBudget

T = TypeVar("T")


class Admission(Recorder):
    """Admits a case to the machine's memory, and saves the row of one that is not measured."""

    def attempt(self, identity: Identity, memory: MemoryBudget | None, run: Callable[[], list[T]]) -> list[T]:
        """Run it if the case fits, and return its result. Where memory runs out, save a row that says so and end the
        test."""
        __tracebackhide__ = True
        if self._session.simulated:
            raise Unsupported("it measures by its own means, and --simulate predicts steps alone")
        self._admit(identity, memory)
        return self._unless_out_of_memory(identity, memory, run)

    def _admit(self, identity: Identity, memory: MemoryBudget | None) -> int:
        """Bytes available for the case. A case that would not fit is skipped, with a row that says what it needs."""
        needed = 0 if memory is None else memory.needed * copies(identity)
        available = min(self._session.worlds.get(identity.world_size).run(available_bytes, identity.device))
        if needed > available:
            self._not_started(identity, memory, needed, available)
        return available

    def _not_started(self, identity: Identity, memory: MemoryBudget | None, needed: int, available: int) -> NoReturn:
        why = f"needs {needed / MIB:,.0f} MiB of {available / MIB:,.0f} MiB available"
        self._unmeasured(identity, memory, budget.NOT_STARTED, why, needed=needed, available=available)
        pytest.skip(f"{budget.NOT_STARTED}: {why}")

    def _unless_out_of_memory(self, identity: Identity, memory: MemoryBudget | None, run: Callable[[], T]) -> T:
        __tracebackhide__ = True
        try:
            return run()
        except Exception as error:
            cause = error.exception if isinstance(error, RankError) else error
            if not is_out_of_memory(cause):
                raise
            why = f"on rank {getattr(error, 'rank', 0)}: {str(cause) or 'MemoryError'}"
            self._unmeasured(identity, memory, budget.OUT_OF_MEMORY, why)
            pytest.fail(f"{budget.OUT_OF_MEMORY} {why}", pytrace=False)

    def _unmeasured(self, of: Identity, memory: MemoryBudget | None, verdict: str, why: str, **found: int) -> None:
        """Save a row without times."""
        self._benchmark.skipped = True  # or pytest-benchmark warns of a fixture that was not used
        row = new_row(of, self._session.scale, self._session.link_rate)
        row["memory"] = cast(MemoryPart, {**budget_entry(memory), **found})
        row["verdict"], row["why"] = verdict, why
        self._save(row, None)


def copies(identity: Identity) -> int:
    """How many ranks share the available memory: on CPU all of them."""
    return 1 if identity.device == "cuda" else identity.world_size
