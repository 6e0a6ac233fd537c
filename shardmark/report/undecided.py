"""Undecided: an outcome of its own, beside passed and failed, for a test whose rounds leave a verdict open."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

import pytest

from shardmark.verdict.betting import UNDECIDED

OUTCOME = UNDECIDED

WHY = pytest.StashKey[str]()
"""On a test's item: what its rounds leave open."""


class Undecided:
    """Tells pytest of them. It counts them in its last line, and its exit status is as if they had passed."""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Note it in the report."""
        report = yield
        if report.when == "call" and report.passed and WHY in item.stash:
            report.user_properties.append((OUTCOME, item.stash[WHY]))
        return report

    @pytest.hookimpl(tryfirst=True)
    def pytest_report_teststatus(self, report: Any) -> tuple[str, str, tuple[str, dict[str, bool]]] | None:
        """Its category, letter and word."""
        return (OUTCOME, "u", (OUTCOME.upper(), {"yellow": True})) if why(report) is not None else None


def why(report: Any) -> str | None:
    """What a report's test leaves open, if anything."""
    when, properties = getattr(report, "when", None), getattr(report, "user_properties", [])
    return dict(properties).get(OUTCOME) if when == "call" else None
