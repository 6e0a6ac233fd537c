"""Planted changes, and what the gate prints of each."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from studies.verdicts.project import NAME, Step, change, make
from studies.verdicts.runs import passes_in, pytest_run

MILLISECONDS = 10
"""Length of the step."""

KEPT = ("time:", "memory:", "counters:", "slowdowns", "slower or larger", "faster or smaller", "  test_")
"""Beginnings of the lines that are shown, below the last heading; lines below a test's say what grew."""


def changes(before: Step) -> Iterator[tuple[str, Step, str]]:
    """(name, the step after the change, ranks) of each change."""
    slow = round(1.4 * before.repeated)
    yield "equal", before, "1ranks"
    yield "all slower by 40%, the peer too", replace(before, repeated=slow, peer=slow), "1ranks"
    yield "one slower by 10%", replace(before, repeated=round(1.1 * before.repeated)), "1ranks"
    yield "every 20th step takes 3 times as long", replace(before, stall_every=20), "1ranks"
    yield "1% more Python", replace(before, python=1010), "1ranks"
    yield "one more copy", replace(before, copies=2), "1ranks"
    yield "one more collective", replace(before, collectives=5), "2ranks"
    yield "1% more memory", replace(before, held=round(1.01 * before.held)), "1ranks"
    yield "faster by 30%", replace(before, repeated=round(0.7 * before.repeated)), "1ranks"


def write(file: Path) -> None:
    """Run each change against the version before it and against its file, and write what is said."""
    passes = passes_in(MILLISECONDS)
    before = Step(repeated=passes, peer=passes)
    with tempfile.TemporaryDirectory() as name, file.open("w") as out:
        folder = Path(name)
        make(folder, before)
        _, said, _ = pytest_run(folder, "--against=old.json", "--update-baseline")
        out.write(f"a baseline\n{_shown(said)}\n")
        for what, step, ranks in changes(before):
            change(folder, step)
            for option in ("--against=old.json", f"--against-ref={NAME}"):
                status, said, seconds = pytest_run(folder, option, "-k", f"mine and {ranks}")
                out.write(f"{what}: {option}, exit status {status}, {seconds:.0f} s\n{_shown(said)}\n")
                out.flush()
        for i in range(10):
            change(folder, replace(before, held=round(before.held * 1.009**i)))
            pytest_run(folder, f"--benchmark-json={i}.run.json", "-k", "mine and 1ranks")
        (folder / "runs").mkdir()
        for path in folder.glob("*.run.json"):
            path.rename(folder / "runs" / path.name)
        change(folder, replace(before, held=round(before.held * 1.009**10)))
        status, said, seconds = pytest_run(folder, "--against=runs", "-k", "mine and 1ranks")
        out.write(
            f"ten times 0.9% more memory: --against=runs, exit status {status}, {seconds:.0f} s\n{_shown(said)}\n"
        )
    print(file.read_text())


def _shown(said: str) -> str:
    ended = said[max(said.rfind("- against "), 0) :].splitlines()
    return "".join(f"    {line[:300]}\n" for line in ended if line.startswith((*KEPT, "    ")))
