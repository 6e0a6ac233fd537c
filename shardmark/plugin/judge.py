"""With `--impl`: each test ends by its deadline, and at the end a verdict on each target.

    attention=mine.py:MyFlash is WRONG: 212 of 230 contract checks passed, 15 failed, 3 not run
      first: test_a_query_does_not_see_later_keys[MyFlash]: query 3 depends on key 4
      not run: 3 because its signature has no option 'dropout'

A contract check is a test that runs over implementations of a family and measures nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest

from shardmark.api.registry import Implementation
from shardmark.plugin.session import Session, implementation_of, measures
from shardmark.ranks.deadline import Hung, within
from shardmark.ranks.world import RankError
from shardmark.report.outcomes import first_line, reason
from shardmark.text import printable

TARGET, PLACE = "target", "place"
"""Properties of a test's report: the `--impl` target that it judges, and its place in the order of the tests."""
LONGEST_LINE = 110


@dataclass
class Verdict:
    """Outcomes of one target's contract checks."""

    passed: int = 0
    failures: list[tuple[int, str, str]] = field(default_factory=list)
    """(place, name, first line of the reason) of each failed check; the most telling tests have the first places."""
    not_run: Counter[str] = field(default_factory=Counter)
    """How many checks were skipped, by reason."""
    notes: dict[str, None] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return self.passed + len(self.failures) + self.not_run.total()

    def line(self) -> str:
        checks = f"{self.passed} of {self.total} contract checks passed"
        checks += f", {len(self.failures)} failed" if self.failures else ""
        checks += f", {self.not_run.total()} not run" if self.not_run else ""
        word = "WRONG" if self.failures else "right" if self.passed else "not judged"
        return f"is {word}: {checks}"

    def lines(self, verbose: bool) -> list[str]:
        """The first failure, or with `verbose` every one; the checks that did not run, with reasons; notes."""
        shown = sorted(self.failures)[: None if verbose else 1]
        lines = [f"{'first' if i == 0 else 'then'}: {name}: {line}" for i, (_, name, line) in enumerate(shown)]
        lines += [f"not run: {count} because {reason}" for reason, count in self.not_run.most_common()]
        lines += [f"note: {note}" for note in self.notes]
        return [line if verbose or len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 3]}..." for line in lines]


class Judge:
    """The plugin, registered where `--impl` names a target."""

    def __init__(self, session: Session) -> None:
        self.session = session
        chosen = [entry for entries in session.selected.values() for entry in entries]
        self.verdicts = {_label(entry): Verdict() for entry in chosen}
        self.places: dict[str, int] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.places = {item.nodeid: place for place, item in enumerate(session.items)}

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Set the ranks' deadline and the report's target; skip a measured case whose target has hung."""
        implementation = implementation_of(item)
        if implementation is None:
            return
        label, deadlines = _label(implementation), self.session.deadlines
        if measures(item):
            self.session.worlds.deadline = deadlines.measured  # for the suite's own calls as well
            if deadlines.has_hung(label):
                item.add_marker(pytest.mark.skip(reason=f"{implementation.name}: it hung before"))
        else:
            self.session.worlds.deadline = deadlines.of(label)
            item.user_properties += [(TARGET, label), (PLACE, self.places[item.nodeid])]

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
        """End a test that hangs; from then on the target's other tests get little time."""
        implementation = implementation_of(pyfuncitem)
        if implementation is None:
            return (yield)
        label, deadlines = _label(implementation), self.session.deadlines
        if measures(pyfuncitem):
            ending: AbstractContextManager[None] = nullcontext()  # `measure` ends what it runs
        else:
            # Ranks have a deadline of their own, after which they still report where they were.
            ending = within(deadlines.of(label) * (2 if "worlds" in pyfuncitem.fixturenames else 1))
        try:
            with ending:
                return (yield)
        except Hung:
            deadlines.note_hang(label)
            raise
        except RankError as error:
            if error.hung:
                deadlines.note_hang(label)
            raise

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count each check once: when it is called, or when its setup or teardown does not pass."""
        properties: dict[str, Any] = dict(report.user_properties)
        if TARGET not in properties or (report.when != "call" and report.passed):
            return
        verdict = self.verdicts[properties[TARGET]]
        name = report.nodeid.rpartition("::")[2]
        if report.failed:
            verdict.failures.append((properties[PLACE], name, first_line(reason(report))))
        elif report.skipped:
            verdict.not_run[first_line(reason(report)).removeprefix("Skipped: ")] += 1
        else:
            verdict.passed += 1
        verdict.notes |= {str(value): None for key, value in report.user_properties if key == "note"}

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """A refused target makes a run that passes otherwise a usage error."""
        if self.session.refused and exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            session.exitstatus = pytest.ExitCode.USAGE_ERROR

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> Generator[None, None, None]:
        """Print the verdicts below all else, if any check ran."""
        yield
        judged = {label: verdict for label, verdict in self.verdicts.items() if verdict.total}
        if judged or self.session.refused:
            terminalreporter.section("Does it do what its contract says?", sep="-")
        for line in self.session.refused.values():
            terminalreporter.write_line(printable(line), red=True)
        for label, verdict in judged.items():
            colour = {"red": True} if verdict.failures else {"green": True} if verdict.passed else {"yellow": True}
            terminalreporter.write_line(printable(f"{label} {verdict.line()}"), **colour)
            for line in verdict.lines(config.option.verbose > 0):
                terminalreporter.write_line(printable(f"  {line}"))
        if judged:
            terminalreporter.write_line(f"--seed {self.session.seed} draws the same inputs again")


def _label(implementation: Implementation) -> str:
    return f"{implementation.family}={implementation.name}"
