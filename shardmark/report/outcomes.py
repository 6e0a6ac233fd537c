"""How the tests of a run ended, and why: for the screen, the reports and the run's file.

Beside passed, failed and skipped a test may be undecided: its rounds leave a verdict open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

import pytest

from shardmark.verdict.betting import UNDECIDED

OWN = ("Failed: ", "shardmark.ranks.failures.RankError: ")
"""Exception names that are cut from the front of a reason, as the text after them says all."""

FAILED, SKIPPED, PASSED, COLLECTED = "failed", "skipped", "passed", "collected"

LEFT_OPEN = pytest.StashKey[str]()
"""In the stash of a test's item: the verdict that its rounds leave open, in words."""


class Undecided:
    """A pytest plugin that makes "undecided" an outcome of its own.

    pytest counts it in its last line. The exit status is the same as if the test had passed.
    """

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Copy what is left open from the item's stash into the report."""
        report = yield
        if report.when == "call" and report.passed and LEFT_OPEN in item.stash:
            report.user_properties.append((UNDECIDED, item.stash[LEFT_OPEN]))
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
        """The category, the letter beside the dots and the word of -v."""
        return (UNDECIDED, "u", (UNDECIDED.upper(), {"yellow": True})) if left_open(report) is not None else None


def left_open(report: Any) -> str | None:
    """The verdict that a report's test leaves open; None where it leaves none."""
    when, properties = getattr(report, "when", None), getattr(report, "user_properties", [])
    return dict(properties).get(UNDECIDED) if when == "call" else None


@dataclass(eq=False)  # pytest distinguishes plugins by identity
class Outcomes:
    """A pytest plugin that collects, by test: passed, why it failed, what it leaves undecided, why it was skipped."""

    passed: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    undecided: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    collected: int = 0
    """Number of tests that the run was to run; 0: unknown."""

    @classmethod
    def of(cls, saved: dict[str, Any]) -> Outcomes:
        """Read what `saved` wrote to a run's file."""
        failed, undecided, skipped = (saved[name] for name in (FAILED, UNDECIDED, SKIPPED))
        return cls(set(saved[PASSED]), failed, undecided, skipped, saved.get(COLLECTED, 0))

    def saved(self) -> dict[str, Any]:
        """For a run's file: the names of the tests that passed, and of all others the reason by name."""
        return {
            PASSED: sorted(self.passed),
            FAILED: self.failed,
            UNDECIDED: self.undecided,
            SKIPPED: self.skipped,
            COLLECTED: self.collected,
        }

    def has_ended(self) -> bool:
        """Whether every test was run, as far as is known."""
        return len({*self.passed, *self.failed, *self.undecided, *self.skipped}) >= self.collected

    def counted(self) -> str:
        """As in "7 passed, 2 failed"; an outcome that no test has is left out."""
        counts = {
            PASSED: len(self.passed),
            FAILED: len(self.failed),
            UNDECIDED: len(self.undecided),
            SKIPPED: len(self.skipped),
        }
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count)

    def why_skipped(self, tests: set[str]) -> str | None:
        """The most common reason among those of `tests` that were skipped."""
        reasons = Counter(why for test, why in self.skipped.items() if test in tests)
        return reasons.most_common(1)[0][0] if reasons else None

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Count the tests; where xdist's workers collect them, the number is not known here."""
        self.collected = len(session.items)

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test counts once; if several of its phases fail, the first one gives the reason."""
        if report.failed:
            self.failed.setdefault(report.nodeid, reason(report))
            self.passed.discard(report.nodeid)
            self.undecided.pop(report.nodeid, None)
        elif report.skipped and not hasattr(report, "wasxfail"):
            self.skipped[report.nodeid] = reason(report).removeprefix("Skipped: ")
        elif report.when == "call":
            if (open_verdict := left_open(report)) is not None:
                self.undecided[report.nodeid] = open_verdict
            else:
                self.passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be collected fails as a whole."""
        if report.failed:
            self.failed[report.nodeid] = reason(report)


def reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The full text of the exception that failed or skipped a test."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr or "")
    for own in OWN:
        text = text.removeprefix(own)
    return text.strip()


def first_line(text: str) -> str:
    """The first line that is not empty."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
