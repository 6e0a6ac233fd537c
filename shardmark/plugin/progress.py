"""How long measuring will take, before it starts and while it runs: on a terminal only.

    202 cases to measure, about 9 min

    perf/test_attention.py ......................                            about 7 min left

pytest's cache remembers each test's seconds in the last run here; a test without a record counts as the mean of the
others; this run's pace so far corrects both.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from statistics import fmean
from typing import Any

import pytest

from shardmark.plugin.session import SESSION, measures

SECONDS = {"smoke": 0.5, "laptop": 2.0, "paper": 8.0, "full": 8.0}
"""Per test, where no earlier run is remembered: on two cores for smoke and laptop, on an H100 for paper and full."""
TRUST = 10.0
"""Seconds that must have been measured before this run counts as much as the last one."""

_SAVE, _RESTORE, _ERASE = "\x1b7", "\x1b8", "\x1b[K"
"""Terminal codes: save the cursor's place, return to it, erase from it to the end of the line."""


class Estimate:
    """Seconds left. `remembered`: seconds of each test in an earlier run; `usual`: seconds of a test without one."""

    def __init__(self, tests: Collection[str], remembered: Mapping[str, float], usual: float) -> None:
        known = [remembered[test] for test in tests if test in remembered]
        usual = fmean(known) if known else usual
        self._expected = {test: remembered.get(test, usual) for test in tests}
        self._planned = self._taken = 0.0

    def done(self, test: str, seconds: float) -> None:
        """The test has taken that long."""
        self._planned += self._expected.pop(test, 0.0)
        self._taken += seconds

    @property
    def left(self) -> float:
        """Estimated seconds until the last test ends, at this run's pace."""
        return sum(self._expected.values()) * (self._taken + TRUST) / (self._planned + TRUST)


def in_words(seconds: float) -> str:
    """A duration for people: about 40 s, 9 min, 2.5 h."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {seconds / 60:.0f} min" if seconds < 90 * 60 else f"about {seconds / 3600:.1f} h"


class Progress:
    """Shows how many tests measure and how long they take, and remembers each test's seconds."""

    def __init__(self, config: pytest.Config) -> None:
        session = config.stash[SESSION]
        self._config = config
        self._key = f"shardmark/seconds_on_{session.device}"
        self._usual = SECONDS[session.scale]
        self._took: dict[str, float] = {}
        self._estimate = Estimate([], {}, 0.0)
        self._reporter: Any = None  # none unless there is a terminal, and something to measure

    @pytest.hookimpl(trylast=True)  # below pytest's own line
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Print how many cases will be measured, and how long that takes."""
        measured = [item for item in session.items if measures(item)]
        self._took = {item.nodeid: 0.0 for item in measured if item.get_closest_marker("skip") is None}
        self._estimate = Estimate(self._took, self._remembered(), self._usual)
        reporter: Any = self._config.pluginmanager.get_plugin("terminalreporter")
        shown = self._config.option.capture != "no" and not self._config.option.collectonly
        if self._took and shown and reporter is not None and reporter.isatty and os.environ.get("TERM") != "dumb":
            self._reporter = reporter
            count = f"{len(self._took)} case{'s' * (len(self._took) > 1)}"
            reporter.write_line(f"{count} to measure, {in_words(self._estimate.left)}")

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logstart(self) -> None:
        """Show what is left, on the line that the test is on."""
        self._show()

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add up the test's setup, call and teardown; after the teardown, correct the estimate."""
        if report.nodeid in self._took:
            self._took[report.nodeid] += report.duration
            if report.when == "teardown":
                self._estimate.done(report.nodeid, self._took[report.nodeid])
        self._show()

    def pytest_sessionfinish(self) -> None:
        """Remember what each test took."""
        cache = getattr(self._config, "cache", None)
        if cache is not None and not self._config.option.collectonly:
            took = {test: round(seconds, 3) for test, seconds in self._took.items() if seconds}
            if took:
                cache.set(self._key, self._remembered() | took)

    def _remembered(self) -> dict[str, float]:
        cache = getattr(self._config, "cache", None)
        return (cache.get(self._key, None) or {}) if cache is not None else {}

    def _show(self) -> None:
        """Write what is left at the right edge of the line, if there is room."""
        if self._reporter is None:
            return
        terminal, left = self._reporter._tw, self._estimate.left
        text = f"{in_words(left)} left" if left else ""
        column = terminal.fullwidth - len(text)
        shown = f"\x1b[{column}G{text}" if text and terminal.width_of_current_line + 2 < column else ""
        terminal._file.write(_SAVE + _ERASE + shown + _RESTORE)  # past `write`, which would count it to the line
        terminal._file.flush()
