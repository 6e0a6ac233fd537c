"""How the tests of a run ended, and why, for what is written when it ends and for its file."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest

from shardmark.report import undecided

OWN = ("Failed: ", "shardmark.ranks.failures.RankError: ")
"""Names of exceptions that say no more than what follows them."""

FAILED, SKIPPED, PASSED = "failed", "skipped", "passed"


@dataclass(eq=False)  # a plugin is known by its identity
class Outcomes:
    """The plugin: by test, why it failed, what it leaves undecided, or why it did not run."""

    passed: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    undecided: dict[str, str] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, saved: dict[str, Any]) -> Outcomes:
        """Read back from a run's file what `saved` has written there."""
        return cls(set(saved[PASSED]), *(saved[name] for name in (FAILED, undecided.OUTCOME, SKIPPED)))

    def saved(self) -> dict[str, Any]:
        """For a run's file: the names of the tests that passed, and of the others by name why they did not."""
        return {
            PASSED: sorted(self.passed),
            FAILED: self.failed,
            undecided.OUTCOME: self.undecided,
            SKIPPED: self.skipped,
        }

    def counted(self) -> str:
        """How many of each."""
        counts = {name: len(tests) for name, tests in self.saved().items()}
        return ", ".join(f"{count} {name}" for name, count in counts.items() if count)

    def why_skipped(self, tests: set[str]) -> str | None:
        """The reason that most of those tests were skipped for."""
        reasons = Counter(why for test, why in self.skipped.items() if test in tests)
        return reasons.most_common(1)[0][0] if reasons else None

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test fails once, in whichever of its phases is the first to."""
        if report.failed:
            self.failed.setdefault(report.nodeid, reason(report))
            self.passed.discard(report.nodeid)
        elif report.skipped and not hasattr(report, "wasxfail"):
            self.skipped[report.nodeid] = reason(report).removeprefix("Skipped: ")
        elif report.when == "call":
            if (open_verdict := undecided.why(report)) is not None:
                self.undecided[report.nodeid] = open_verdict
            else:
                self.passed.add(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A file that cannot be collected fails as a whole."""
        if report.failed:
            self.failed[report.nodeid] = reason(report)


def reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """Why a test failed, or why it was skipped: all that its exception says."""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2])
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(crash.message if crash is not None else report.longrepr or "")
    for own in OWN:
        text = text.removeprefix(own)
    return text.strip()


def first_line(text: str) -> str:
    """The first that says something."""
    return next((line.strip() for line in text.splitlines() if line.strip()), "")
