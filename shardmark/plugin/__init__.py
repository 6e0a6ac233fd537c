"""The pytest plugin: options and fixtures, each a few lines over the modules beside it.

    @pytest.mark.family("naps")                            # `implementation` runs over the family's implementations
    @pytest.mark.cases(Grid(smoke=[...], ...))             # `case` runs over the grid at --scale
    @pytest.mark.question("What does a nap cost?", columns=["case", "time ms", "verdict"])  # of one table
    def test_nap(implementation, case, measure): ...

`world` runs a test on a warm world of each size in --ranks, `worlds(n)` returns a warm world of n ranks, and `link` is
the link that --link made between the ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Generator
from contextlib import closing, suppress
from functools import partial
from typing import Any

import pytest
import torch

from shardmark.api import registry
from shardmark.api.refusals import Unsupported, may_refuse, note_unasked
from shardmark.api.requirements import requires_compiler
from shardmark.plugin.broken_gpu import pytest_runtest_protocol as pytest_runtest_protocol
from shardmark.plugin.collection import pytest_collection_finish as pytest_collection_finish
from shardmark.plugin.collection import pytest_collection_modifyitems as pytest_collection_modifyitems
from shardmark.plugin.collection import pytest_generate_tests as pytest_generate_tests
from shardmark.plugin.collection import pytest_ignore_collect as pytest_ignore_collect
from shardmark.plugin.fresh import TimesAgain
from shardmark.plugin.judge import Judge, not_refusable
from shardmark.plugin.measure import Measure
from shardmark.plugin.once_more import OnceMore
from shardmark.plugin.options import pytest_addoption as pytest_addoption
from shardmark.plugin.progress import Progress
from shardmark.plugin.session import SESSION, implementation_of, measures, start_session
from shardmark.plugin.terminal import Interrupted, write_summary
from shardmark.plugin.workers import SHARED, Worker
from shardmark.ranks import torchrun
from shardmark.ranks.link import Link
from shardmark.ranks.process_setup import begin_with_own_device, keep_compiled_code_apart
from shardmark.ranks.rank import WorldError, WorldLostError
from shardmark.ranks.world import RankError, World
from shardmark.ranks.worlds import TorchrunWorlds, Worlds
from shardmark.report.outcomes import Undecided
from shardmark.rows.machine import describe_machine
from shardmark.text import printable

WorldsBySize = Callable[[int], World]
"""Type of the fixture `worlds`: from a number of ranks to a warm world."""


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> int | None:
    """Print the listing, or serve rank 0 when torchrun started us as another rank; then stop."""
    if config.getoption("implementations"):
        keep_compiled_code_apart()
        with closing(start_session(config)) as session:
            print(registry.listing(session.device))
            session.ending.leave()
        return 0
    if torchrun.launched() and torchrun.rank() > 0:
        session = start_session(config)
        session.ending.leave()
        torchrun.serve(session.device)
        return 0
    return None


def pytest_configure(config: pytest.Config) -> None:
    """Check the options, and have SIGTERM and SIGHUP end the run as Ctrl-C does: rows saved, tables printed."""
    for marker in (
        "family(name, option=None, only=None): run over the family's implementations; with `option`, those whose "
        "target has a parameter of that name (an --impl target without it is skipped); with `only`, those of these "
        "names, and every --impl target if the reference is among them",
        "meshes(text, ..., smoke=None): run over these meshes, such as 'dp=2,tp=2', at smoke scale over those of "
        "`smoke`, or over those of --mesh",
        "cases(grid): run over the grid's cases at --scale",
        "question(text, columns=None, short=None, answer=None, derivation=None, plots=()): the question that the rows "
        "of these tests answer; they share a table of these columns, a line at the end of the run (`short`, and what "
        "`answer` reads from the rows) and these plots in the page; `answer` may be a text, which holds if its tests "
        "pass, and `derivation` the lines that lead to it",
    ):
        config.addinivalue_line("markers", marker)
    keep_compiled_code_apart()
    begin_with_own_device()
    session = start_session(config)
    config.stash[SESSION] = session
    if torchrun.launched():  # at once, as the other ranks are waiting
        try:
            session.worlds = TorchrunWorlds(session.device, partial(_end_with, config))
        except WorldError as error:
            raise pytest.UsageError(str(error)) from None
    config.pluginmanager.register(Interrupted(session.ending), "shardmark interrupted")
    config.pluginmanager.register(LastToFinish(), "shardmark's end")
    config.pluginmanager.register(Progress(config), "shardmark progress")
    config.pluginmanager.register(Undecided(), "shardmark undecided")
    config.pluginmanager.register(session.outcomes, "shardmark outcomes")
    if isinstance(session.worlds, Worlds):
        config.pluginmanager.register(OnceMore(session, session.worlds), "shardmark once more")
    if session.selected:
        config.pluginmanager.register(Judge(session), "shardmark judge")
    for name, compares in (("against", session.against), ("against-ref", session.against_ref)):
        if compares is not None:
            config.pluginmanager.register(compares, f"shardmark {name}")
    if session.against is not None and session.against.new is not None and isinstance(session.worlds, Worlds):
        again = TimesAgain(session.baseline_rows, session.against, session.worlds)
        config.pluginmanager.register(again, "shardmark times again")
    if SHARED in getattr(config, "workerinput", {}):
        config.pluginmanager.register(Worker(session), "shardmark worker")


def _end_with(config: pytest.Config, line: str) -> None:
    """End the run after the current test; its failure is reported whatever signal torchrun sends by then."""
    config.stash[SESSION].ending.hold()
    config.pluginmanager.get_plugin("session").shouldstop = line  # type: ignore[union-attr]


def pytest_report_header(config: pytest.Config) -> list[str]:
    """The seed, and the link between the ranks, if there is one."""
    session = config.stash[SESSION]
    link = [f"link: the ranks live on two hosts, joined at {session.link_rate}"] if session.link_rate else []
    return [f"inputs: --seed {session.seed}", *link]


def pytest_unconfigure(config: pytest.Config) -> None:
    """End every rank and print where the report is. Print the tables first if pytest did not, as after an early exit
    (its first folder was removed, say)."""
    session = config.stash.get(SESSION, None)
    if session is None:
        return
    try:
        session.ending.hold()
        session.close()
        terminal = config.pluginmanager.get_plugin("terminalreporter")
        if session.rows.rows and not session.shown and terminal is not None:
            with suppress(OSError):  # nobody reads what is printed
                pytest_terminal_summary(terminal, config)
        if session.report is not None and terminal is not None:
            with suppress(OSError):
                terminal.write_line(printable(session.report.outcome), red=not session.report.written)
    finally:
        session.ending.leave()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed the test's inputs; skip it where its implementation does not run here.

    To find that out may take seconds, so it is not asked before.
    """
    session = item.config.stash[SESSION]
    session.rows.begin(item.nodeid)
    torch.manual_seed(session.seed + zlib.crc32(item.nodeid.encode()))
    implementation = implementation_of(item)
    if implementation is not None:
        device, to_measure = session.device, measures(item)
        if reason := implementation.unavailable_reason(device, to_measure):
            item.add_marker(pytest.mark.skip(reason=f"{implementation.name}: {reason}"))


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Skip a test whose implementation refuses what its contract lets it refuse, or whose world is lost; the error's
    text is the reason; so does `pytest.skip` on the ranks, where no implementation is judged. Any other refusal fails
    the test. A test that measures gives no verdict, and is skipped."""
    try:
        return (yield)
    except WorldLostError as error:  # no fault of this test
        note_unasked(str(error))
        pytest.skip(str(error))
    except (Unsupported, RankError) as error:
        if isinstance(error, RankError) and error.skipped and not pyfuncitem.config.stash[SESSION].selected:
            pytest.skip(error.skipped)
        cause = error.exception if isinstance(error, RankError) else error
        if not isinstance(cause, Unsupported):
            raise
        implementation = implementation_of(pyfuncitem)
        if implementation is not None and not measures(pyfuncitem) and not may_refuse(cause):
            raise not_refusable(implementation, cause) from error
        pytest.skip(str(cause))


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    """ "cpu" or "cuda", from --device."""
    return pytestconfig.stash[SESSION].device


@pytest.fixture
def compiler(device: str) -> None:
    """Skips the test where `torch.compile` does not work; for tests that call it themselves."""
    if reason := requires_compiler(device):
        pytest.skip(reason)


@pytest.fixture
def worlds(pytestconfig: pytest.Config) -> WorldsBySize:
    """`worlds(n)` is a warm world of n ranks; the test is skipped where the machine has no room for it."""

    def get(size: int) -> Any:
        try:
            return pytestconfig.stash[SESSION].worlds.get(size)
        except WorldError as error:
            note_unasked(str(error))
            pytest.skip(str(error))
        except OSError as error:  # no loopback interface: nothing that the machine lacks, but something to mend
            raise pytest.fail.Exception(str(error.strerror or error), pytrace=False) from None

    return get


@pytest.fixture
def world(request: pytest.FixtureRequest, worlds: WorldsBySize) -> World:
    """A warm world of each size in --ranks."""
    return worlds(request.param)


@pytest.fixture
def link(pytestconfig: pytest.Config) -> Link:
    """The link between the ranks, from --link; without one the test is skipped."""
    found = pytestconfig.stash[SESSION].link
    if found is None:
        pytest.skip("needs a link between the ranks: --link 1gbit, as root")
    return found


@pytest.fixture(name="measure")  # or the function would hide the module shardmark.plugin.measure
def measure_fixture(request: pytest.FixtureRequest, benchmark: Any) -> Measure:
    """Measure a case, hold it to its budgets, and save its row: see `shardmark.plugin.measure.Measure`."""
    return Measure(request.config.stash[SESSION], request.node, benchmark)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_machine_info(config: pytest.Config, machine_info: dict[str, Any]) -> None:
    """Name the GPUs, driver, torch and triton."""
    machine_info.update(describe_machine(config.stash[SESSION].device))


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Add the rows without times and what reports need of the questions; write our tests' parameters as their ids."""
    session = config.stash[SESSION]
    output_json["unmeasured"] = session.rows.unmeasured
    output_json["questions"] = session.questions.saved()
    for entry in output_json["benchmarks"]:
        if entry["fullname"] in session.rows.names:
            entry["cells"] = session.questions.own_cells(entry)
            entry["params"] = {name: str(value) for name, value in (entry["params"] or {}).items()} or entry["params"]


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> Generator[None, None, None]:
    """Save the rows before pytest-benchmark would, and before any test's fixture is torn down. A run whose rows are not
    all where they were asked for does not pass."""
    rows = session.config.stash[SESSION].rows
    try:
        rows.finish()
        if rows.lost:
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
    except KeyboardInterrupt:  # while they were written; the run ends in any case
        session.exitstatus = pytest.ExitCode.INTERRUPTED
    return (yield)


class LastToFinish:
    """Runs after every other hook of the session's end and before the tables, which are printed in any case."""

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> Generator[None, None, None]:
        try:
            return (yield)
        except KeyboardInterrupt:
            session.exitstatus = pytest.ExitCode.INTERRUPTED
        finally:
            session.config.stash[SESSION].ending.hold()
            _write_report(session)


def _write_report(session: pytest.Session) -> None:
    """Write the page of `--report`; a run whose page cannot be written does not pass."""
    own = session.config.stash[SESSION]
    against = own.against
    older = [] if against is None else [(run.name, run.output) for run in against.runs]
    if own.report is not None and own.rows.rows:
        compared = [one for each in (against, own.against_ref) if each is not None for one in each.compared()]
        if not own.report.write_run(own.rows.output(), older, compared):
            session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the screen of the run's end; with -v, its tables too."""
    session = config.stash[SESSION]
    session.shown = True
    write_summary(terminalreporter, session, verbose=config.option.verbose > 0)
    ran = [
        getattr(report, "nodeid", "")
        for kind, reports in terminalreporter.stats.items()
        for report in reports
        if kind != "deselected"
    ]
    if ran and session.meshes and not any(f"-{mesh}" in test for mesh in session.meshes for test in ran):
        terminalreporter.write_line("--mesh: no test of this run takes a mesh", yellow=True)
