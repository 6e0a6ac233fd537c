"""A worker of pytest-xdist for each GPU, so that the cases that take one device run on all of them at once.

    share_the_devices(config, 4)  # in a conftest's `pytest_cmdline_main`, before pytest-xdist reads its options

The process that the user started, the controller, collects all tests and writes the row file and the tables: each
worker sends its rows with the reports of their tests. When the workers have ended, the controller runs the tests on
worlds, which then have every device to themselves.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Generator
from contextlib import suppress
from copy import copy
from dataclasses import dataclass
from itertools import zip_longest
from types import SimpleNamespace
from typing import Any

import pytest

from shardmark.plugin.session import SESSION, Session
from shardmark.ranks import torchrun
from shardmark.rows.atomic_json import Entry
from shardmark.rows.observers import Observer

SHARED = "shardmark_shared"
"""Key of a worker's input: it measures the cases that take one device."""
ROWS = "shardmark rows"
"""Name of the report's property that holds its test's rows, pickled."""


def may_have_workers(config: pytest.Config) -> bool:
    """False where the user gives a number of processes or debugs (--pdb, -s), in a worker, and under torchrun, which
    starts ranks of its own."""
    option = config.option
    if getattr(option, "numprocesses", 0) is not None or option.tx:  # given, or there is no pytest-xdist
        return False
    if option.usepdb or option.trace or option.capture == "no" or option.collectonly:
        return False
    return "PYTEST_XDIST_WORKER" not in os.environ and not torchrun.launched()


def share_the_devices(config: pytest.Config, devices: int) -> None:
    """Start a worker for each device, if there are several and anything is measured; not where rows are compared with
    older ones, which one process does."""
    option = config.option
    compares = bool(option.against) or option.against_ref is not None
    if devices > 1 and may_have_workers(config) and not (option.benchmark_disable or option.benchmark_skip or compares):
        option.numprocesses, option.dist = devices, "load"
        config.pluginmanager.register(Controller(config), "shardmark controller")


def takes_world(item: pytest.Item) -> bool:
    """Whether the test runs on a world, and so on more than its worker's device."""
    return not {"world", "worlds"}.isdisjoint(getattr(item, "fixturenames", ()))


@dataclass(frozen=True)
class Rows:
    """The rows of one test of a worker."""

    entries: list[Entry]
    benchmarks: list[Any]
    """pytest-benchmark's objects of the same test."""
    observers: list[tuple[str | None, list[Observer]]]
    """Each row's question, and its observers that can be pickled; lines of the others are not shown."""


class Controller:
    """The plugin of the process that the user started."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self._cases: dict[str, str] = {}
        """Each test's function and case, by the test's id."""

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell the worker that it measures."""
        node.workerinput[SHARED] = True

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Any) -> Any:
        """Give all implementations of a case to one worker, as their times are stated at the speed of one device."""
        from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]  # only where it is installed

        cases = self._cases

        class ByCase(LoadScopeScheduling):
            def _split_scope(self, nodeid: str) -> str:
                return cases[nodeid]

        return ByCase(config, log)

    def pytest_sessionstart(self) -> None:
        """Turn pytest-benchmark on."""
        _enable_benchmarks(self._config)

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        """Collect, which pytest-xdist leaves to the workers: for the questions, and for the tests on worlds."""
        session.perform_collect()
        self._cases = {item.nodeid: _case_of(item) for item in session.items}

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        """Wait for the workers' tests; then run the tests on worlds here."""
        result = yield
        _plugin(self._config, "dsession").nodemanager.teardown_nodes()  # and wait
        session.testscollected = len(session.items)
        items = [item for item in session.items if takes_world(item)]
        for item, following in zip_longest(items, items[1:]):
            self._config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
        return result

    @pytest.hookimpl(tryfirst=True)  # before other plugins print the properties
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Save the rows that came with the report."""
        session, benchmarks = self._config.stash[SESSION], _benchmarks(self._config)
        for name, value in report.user_properties:
            if name == ROWS:
                rows: Rows = pickle.loads(value)  # type: ignore[arg-type]
                benchmarks.benchmarks += rows.benchmarks
                for question, observers in rows.observers:
                    session.questions.observe(question, observers)
                session.rows.begin(report.nodeid)
                for entry in rows.entries:
                    session.budgets_for(entry["fullname"])  # note here what matched in the worker
                    session.rows.add(entry)
        report.user_properties = [(name, value) for name, value in report.user_properties if name != ROWS]


class Worker:
    """The plugin of a worker."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._sent = 0, 0

    def pytest_sessionstart(self, session: pytest.Session) -> None:
        """Turn pytest-benchmark on, and leave its files to the controller."""
        _enable_benchmarks(session.config)
        benchmarks = _benchmarks(session.config)
        benchmarks.json = benchmarks.save = benchmarks.autosave = None

    @pytest.hookimpl(wrapper=True)
    def pytest_collection_finish(self, session: pytest.Session) -> Generator[None, None, None]:
        """Leave tests on worlds to the controller; the error that verdicts share is still one of all tests."""
        everything = list(session.items)
        session.items[:] = [item for item in everything if not takes_world(item)]
        yield
        self._session.count_judgements(everything)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        """Send the rows that are new since the last report."""
        report = yield
        entries, benchmarks = self._session.rows.rows, _benchmarks(item.config).benchmarks
        new = entries[self._sent[0] :]
        questions = [entry["group"] for entry in new]
        observed = [(name, [*filter(_pickles, self._session.questions[name].observers.values())]) for name in questions]
        rows = Rows(new, [_portable(each) for each in benchmarks[self._sent[1] :]], observed)
        if rows.entries or rows.benchmarks:
            report.user_properties.append((ROWS, pickle.dumps(rows)))
            self._sent = len(entries), len(benchmarks)
        return report


def _case_of(item: pytest.Item) -> str:
    """The test's function, and its parameters beside the implementation."""
    parameters = dict(item.callspec.params) if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    parameters.pop("implementation", None)
    return f"{item.nodeid.partition('[')[0]} {parameters}"


def _pickles(observer: Observer) -> bool:
    with suppress(Exception):  # pickle raises as many kinds as there are things it cannot pickle
        return bool(pickle.dumps(observer))
    return False


def _plugin(config: pytest.Config, name: str) -> Any:
    return config.pluginmanager.get_plugin(name)


def _benchmarks(config: pytest.Config) -> Any:
    return _plugin(config, "pytest-benchmark")


def _enable_benchmarks(config: pytest.Config) -> None:
    """Let pytest-benchmark measure under pytest-xdist: it refuses because processes may share a device; ours do not."""
    benchmarks = _benchmarks(config)
    benchmarks.disabled = benchmarks.xdist_warning = False


def _portable(benchmark: Any) -> Any:
    """A copy that can be pickled: without its test's fixture, with parameters as the JSON has them."""
    result = copy(benchmark)
    result.fixture = SimpleNamespace(has_error=benchmark.has_error)
    result.params = benchmark.params and {name: str(value) for name, value in benchmark.params.items()}
    result.cprofile_stats = None  # a profile of advancing a clock
    return result
