"""Every fault, in every part of a test: its own test is blamed in one clear line, and nobody else."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmark.ranks.world import available_ranks
from tests.faults.project import PHASES, Outcome, Run, run_faults
from tests.faults.rank_faults import FAULTS
from tests.faults.table import FAILS, PASSES, WARNS

LONGEST = 90.0
"""Seconds of any fault: its deadline, the grace of the others, the start of new ranks or of a server."""
FAILED_IN = {"setup": "setup", "step": "call", "teardown": "teardown", "measured": "call"}
TYPICAL = ("raises", "is_killed", "sleeps", "leaves_another_dtype", "leaves_no_group", "starts_a_daemon")
"""Kinds that run in every part of a test; any other one runs in a step and in one further part."""

MEASURED = [name for name in FAULTS if FAULTS[name].outcome == FAILS and not name.startswith("returns_")]
"""A step returns nothing."""


def cases() -> list[tuple[str, str]]:
    """Each kind of fault with the part of a test that it happens in."""
    found = []
    for number, name in enumerate(FAULTS):
        parts = [phase for phase in PHASES if phase != "measured" or name in MEASURED]
        other = [phase for phase in parts if phase != "step"]
        found += [(name, phase) for phase in (parts if name in TYPICAL else ["step", other[number % len(other)]])]
    return sorted(found, key=lambda case: PHASES.index(case[1]))


EVERY = cases()
FEW = [(name, phase) for name, phase in EVERY if name in TYPICAL]
SOME = EVERY[::20]


def complaints(run: Run, size: int, cases: list[tuple[str, str]]) -> Iterator[str]:
    """Differences between the run and the table."""
    outcomes = dict(run.outcomes)
    for name, phase in cases:
        test = f"test_row[short-{name}]" if phase == "measured" else f"test_ranks[{name}-{phase}-fault]"
        if test not in outcomes:
            yield f"{test} did not run"
            continue
        outcome, fault = outcomes.pop(test), FAULTS[name]
        if outcome.seconds > LONGEST:
            yield f"{test} took {outcome.seconds:.1f} s"
        wanted = {FAILED_IN[phase]} if fault.outcome == FAILS else set()
        if outcome.failed.keys() != wanted:
            yield f"{test} failed in {outcome.failed}, not in {wanted}"
        for text in outcome.failed.values():
            line = text.partition("\n")[0]
            if not re.search(rf"(RankError: |out of memory: |^)({fault.pattern(size)}|.*memory)", line):
                yield f"{test} says {line!r}"
        warned = [each for each in outcome.warnings if re.search(fault.pattern(size), each)]
        if bool(warned) != (fault.outcome == WARNS) or (fault.outcome == PASSES and outcome.warnings):
            yield f"{test} warns {outcome.warnings}"
    for test, outcome in outcomes.items():
        if outcome != Outcome(seconds=outcome.seconds):
            yield f"{test}, another test: {outcome}"
    yield from run.left


def check_rows(run: Run) -> None:
    assert run.rows is not None
    assert [entry["name"] for entry in run.rows["benchmarks"]] == ["test_row[short-first]", "test_row[short-last]"]


@pytest.mark.parametrize(
    ("size", "cases", "options"),
    [
        pytest.param(2, SOME, (), id="2ranks-some"),
        pytest.param(2, EVERY, (), id="2ranks-every", marks=pytest.mark.sweep),
        pytest.param(4, FEW, ("-n2",), id="4ranks-two_workers", marks=pytest.mark.sweep),
    ],
)
def test_a_fault_is_its_own_tests_and_nobody_elses(
    size: int, cases: list[tuple[str, str]], options: tuple[str, ...], tmp_path: Path
) -> None:
    if available_ranks("cpu") < size:
        pytest.skip(f"needs {size} ranks")
    run = run_faults(tmp_path, size, cases, *options)
    found = list(complaints(run, size, cases))
    assert not found, "\n".join(found)
    if not options:  # pytest-benchmark measures nothing in pytest-xdist's workers
        check_rows(run)
