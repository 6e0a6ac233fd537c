"""A test that fails on ranks that other tests have used runs once more, on new ones.

A test may leave something on its ranks that `shardmark.ranks.rank_state` cannot compare, and the next test would be
blamed for it. If that one passes on new ranks, a warning says so and names the test before.

A failure stays where the tests before were of the same implementation, which may itself have left what it stumbles
over; where a row has been measured, whose verdict has its own error; in a run that judges implementations; and where
ranks cannot be replaced. An abort by a corrupted heap is asked again in any case but the last three: any call before
may have written there, as PyTorch's profiler does (docs/pytorch-defects.md).
"""

from __future__ import annotations

import re
import warnings

import pytest
from _pytest import runner

from shardmark.plugin.session import Session, implementation_of
from shardmark.ranks.left_behind import LeftBehind
from shardmark.ranks.worlds import Worlds
from shardmark.report.outcomes import first_line, reason
from shardmark.text import number_of, printable

_CORRUPTED_HEAP = re.compile(r"was killed by SIGABRT: (\w+\(\): |double free|corrupted )")
"""The line of a rank that glibc aborted, as "malloc(): unaligned tcache chunk detected": a call before has written into
freed memory, maybe in another test."""


class OnceMore:
    """A pytest plugin that runs each test, and some a second time."""

    def __init__(self, session: Session, worlds: Worlds) -> None:
        self._session = session
        self._worlds = worlds
        self._implementations: dict[str, str] = {}
        """The implementation that each test is about, by the test's id."""

    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> object:
        """Run the test and report it once: by its second run, if there is one, whose ranks nobody has used."""
        self._worlds.begin(item.nodeid)
        if done := self._run_by_another_plugin(item, nextitem):
            return done
        if (implementation := implementation_of(item)) is not None:
            self._implementations[item.nodeid] = f"{implementation.family}/{implementation.name}"
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        properties = list(item.user_properties)
        reports = runner.runtestprotocol(item, nextitem=nextitem, log=False)
        failed = next((report for report in reports if report.failed), None)
        if failed is not None and self._may_be_anothers_doing(item, reason(failed)):
            before = self._worlds.before
            self._worlds.renew()
            item.user_properties[:] = properties
            self._worlds.begin(item.nodeid)
            reports = runner.runtestprotocol(item, nextitem=nextitem, log=False)
            if not any(report.failed for report in reports):
                users, said = number_of(len(before), "test"), first_line(reason(failed))
                told = (
                    f"{item.nodeid} passes on new ranks, and had failed on those that {users} had used, "
                    f"the last of them {next(reversed(before))}: {said}"
                )
                warnings.warn(printable(told), LeftBehind, stacklevel=1)
        for report in reports:
            item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def _run_by_another_plugin(self, item: pytest.Item, nextitem: pytest.Item | None) -> object:
        """Have a plugin run the test that does so in its own way, such as pytest-rerunfailures; None without one."""
        for each in reversed(item.ihook.pytest_runtest_protocol.get_hookimpls()):
            if not each.wrapper and not each.hookwrapper and each.plugin not in (self, runner):
                values = {"item": item, "nextitem": nextitem}
                if done := each.function(*(values[name] for name in each.argnames)):
                    return done
        return None

    def _may_be_anothers_doing(self, item: pytest.Item, why: str) -> bool:
        before, own = self._worlds.before, self._implementations.get(item.nodeid)
        blamed = own and own in map(self._implementations.get, before) and not _CORRUPTED_HEAP.search(why)
        return bool(
            before
            and not blamed
            and item.nodeid not in self._session.rows.names
            and not self._session.selected
            and not item.config.getoption("usepdb")
            and not item.session.shouldstop
        )
