"""Judge planted implementations in one run of pytest for a family, as `--impl` judges a user's own.

A defect runs only the tests that must see it, and only until the first one does.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from correctness.support import planting
from correctness.support.paths import ROOT
from correctness.support.planting import CHECK, Planted
from shardmark.api.finding import RegistryError
from shardmark.api.registry import FAMILIES, check_contract, resolve
from shardmark.plugin.judge import EXIT_NOT_JUDGED
from shardmark.plugin.session import implementation_of
from shardmark.report.outcomes import first_line, reason

OUTCOMES = "SHARDMARK_OUTCOMES"
"""Names the file to which the tests' outcomes go, a line of JSON each."""

OPTIONS = ("-p", __name__, "-n0", "-q", "-p", "no:cacheprovider", "--tb=short", "--device=cpu")

OF_DEFECTS = ("--deadline=5",)
"""Some defects hang. Right ones get the deadline that users have: slow on a busy machine is not wrong."""


@dataclass(frozen=True)
class Outcome:
    """One test's outcome on one planted implementation, "noted" where it is not as a good one should be; `line` is the
    first line of its failure, the reason of its skip, or the note."""

    name: str
    test: str
    outcome: str
    line: str
    seconds: float


def judge(family: str, planted: Sequence[Planted], module: str, folder: Path) -> dict[str, list[Outcome]]:
    """Outcomes of the family's tests, by implementation; a refusal by the contract's check counts as a failed test."""
    found: dict[str, list[Outcome]] = {each.name: [] for each in planted}
    accepted = []
    for each in planted:
        try:
            check_contract(resolve(family, f"{module}:{each.name}"), "cpu")
        except RegistryError as error:
            found[each.name].append(Outcome(each.name, CHECK, "failed", str(error), 0.0))
        else:
            accepted.append(f"--impl={family}={module}:{each.name}")
    if not accepted:
        return found
    outcomes = folder / "outcomes.jsonl"
    outcomes.touch()
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            f"correctness/{FAMILIES[family].folder}",
            *OPTIONS,
            *(() if any(each.is_right for each in planted) else OF_DEFECTS),
            *accepted,
        ],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
        | {OUTCOMES: str(outcomes), "OMP_NUM_THREADS": "1"},  # threads that share a core wait for one another
        capture_output=True,
        text=True,
    )
    if run.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, EXIT_NOT_JUDGED):
        raise RuntimeError(f"pytest ended with {run.returncode}:\n{run.stdout[-4000:]}{run.stderr[-2000:]}")
    for line in outcomes.read_text().splitlines():
        outcome = Outcome(**json.loads(line))
        found[outcome.name].append(outcome)
    return found


def by_family(judged: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each family: its defects and right implementations, and how many were seen or rejected; and their
    sum."""
    names = ("defects", "seen", "right ones", "rejected")
    families = sorted({each["family"] for each in judged})
    rows = [
        {"family": name, **{key: sum(each.get(key, 0) for each in judged if each["family"] == name) for key in names}}
        for name in families
    ]
    total = {key: sum(row[key] for row in rows) for key in names}
    return [*rows, {"family": "all", **total}] if rows else []


# The rest is a pytest plugin, for the run inside.

CAUGHT = pytest.StashKey[set[str]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep, for a defect, the tests that must see it."""
    if OUTCOMES not in os.environ:
        return
    config.stash[CAUGHT] = set()
    kept = [item for item in items if (each := _planted(item)) is None or each.is_right or each.caught_by in item.name]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept


def pytest_runtest_setup(item: pytest.Item) -> None:
    each = _planted(item)
    if each is not None and not each.is_right and each.name in item.config.stash.get(CAUGHT, set()):
        pytest.skip("caught already")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]):  # type: ignore[no-untyped-def]
    report = yield
    each = _planted(item)
    if each is not None and OUTCOMES in os.environ and (report.when == "call" or not report.passed):
        if report.failed or any(name == "note" for name, _ in report.user_properties):
            item.config.stash[CAUGHT].add(each.name)
        notes = [str(value) for name, value in report.user_properties if str(value).startswith("should: ")]
        what, line = ("noted", notes[0]) if notes and report.passed else (report.outcome, first_line(reason(report)))
        outcome = Outcome(each.name, item.name, what, line, report.duration)
        with Path(os.environ[OUTCOMES]).open("a") as file:
            file.write(json.dumps(outcome.__dict__) + "\n")
    return report


def _planted(item: pytest.Item) -> Planted | None:
    return planting.of(getattr(implementation_of(item), "target", None))
