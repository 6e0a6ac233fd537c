"""With `--impl`: each test ends by its deadline, and at the end a verdict on each target.

    attention=mine.py:MyFlash is WRONG: 212 of 230 contract checks passed, 15 failed, 3 not run
      query 3 depends on key 4
        of mine.py:7: def attention(q, k, v, *, is_causal=False):
      not run: 3 because its signature has no option 'dropout'

A contract check is a test that runs over implementations of a family and measures nothing. One with the mark
`should(what)` asks what good implementations do: if a user's own does not, that is a note.
"""

from __future__ import annotations

import shlex
import textwrap
import unittest
from collections import Counter
from collections.abc import Generator, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest

from shardmark.api.place import user_line, user_line_in_text
from shardmark.api.refusals import NotAsked, Unsupported, ledger
from shardmark.api.registry import Implementation, family
from shardmark.plugin import sizes
from shardmark.plugin.collection import asked
from shardmark.plugin.session import Session, implementation_of, measures
from shardmark.plugin.tampering import Guard
from shardmark.plugin.terminal import REPORTED
from shardmark.plugin.workers import takes_world
from shardmark.ranks.deadline import MOST_HANGS, Hung, within
from shardmark.ranks.world import RankError
from shardmark.report.causes import lines as lines_of_causes
from shardmark.report.judgement import NOT_JUDGED, RIGHT, WRONG, Notes, Verdict, from_report
from shardmark.report.outcomes import first_line, reason
from shardmark.text import cut, printable

TARGET, PLACE, NOTES, SHOULD = "target", "place", "calls", "should"
"""Properties of a test's report: the `--impl` target that it judges, its place in the order of the tests, its calls,
and the text of its mark `should`."""
CRASHED = "???"
"""The phase in pytest-xdist's report of a test that ended its worker's process."""
ENDS = "it ends the process that it runs in, as abort() or a segmentation fault does"
EXIT_NOT_JUDGED = 6
"""Exit status of a run that passes and leaves a target not judged; pytest's own are 0 to 5."""
WIDTH = 100
CAUSES = 3
"""Most causes of failures that are shown without -v."""


class Judge:
    """The plugin, registered where `--impl` names a target."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.targets = {_label(entry): entry for entries in session.selected.values() for entry in entries}
        self.verdicts = {label: Verdict(family(entry.family).may_refuse) for label, entry in self.targets.items()}
        self.places: dict[str, int] = {}
        self.deselected: Counter[str] = Counter()
        self.guard = Guard(session.config.pluginmanager)
        for each in self.targets.values():
            self.guard.watch(each.target)
        self.of_workers: set[str] = set()
        """Tests that pytest-xdist's workers have collected."""
        self.begun: dict[str, dict[str, Any]] = {}
        """Properties of the tests of which a report has come, by their ids."""
        self.on_ranks: set[str | None] = set()
        """Targets of which some checks run on ranks."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        """Count the checks that the user's options leave out; those of the sweep are asked in the sweep alone."""
        own = [item for item in items if item.get_closest_marker("sweep") is None and asked(self.session, item)]
        self.deselected.update(filter(None, map(self._judges, own)))

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        if changed := self.guard.put_back():
            raise pytest.UsageError(f"a target of --impl changes {', '.join(changed)}, and so its own judge")
        self.places = {item.nodeid: place for place, item in enumerate(session.items)}
        collected = Counter(filter(None, map(self._judges, session.items)))
        self.on_ranks = {self._judges(item) for item in session.items if takes_world(item)}
        for label, verdict in self.verdicts.items():
            verdict.collected, verdict.deselected = collected[label], self.deselected[label]
            verdict.left_out = list(self._left_out(session.config, label))

    def _judges(self, item: pytest.Item) -> str | None:
        """The target whose contract the test checks, if any."""
        implementation = implementation_of(item)
        label = None if implementation is None or measures(item) or _should(item) else _label(implementation)
        return label if label in self.targets else None

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Set the ranks' deadline and the report's target; skip a measured case whose target has hung, and any other
        test of one that has hung several times."""
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
            item.user_properties += [(TARGET, label), (PLACE, self.places[item.nodeid]), (SHOULD, _should(item))]
            if why := self._why_left(label, item):
                item.user_properties.append((NOTES, Notes(unasked=(why,)).saved()))
                item.add_marker(pytest.mark.skip(reason=why))

    def _why_left(self, label: str, item: pytest.Item) -> str | None:
        """Why the check is not run: its target has hung in another check of the claim, or in several claims."""
        hung = self.session.deadlines.hung_in(label)
        if _claim(item) in hung:
            return "it has hung in another check of the claim"
        return f"it has hung in {MOST_HANGS} claims" if len(hung) >= MOST_HANGS else None

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
        """End a test that hangs, from then on the target's other tests get little time; note its calls."""
        implementation = implementation_of(pyfuncitem)
        if implementation is None:
            return (yield)
        label, deadlines = _label(implementation), self.session.deadlines
        self.guard.look()
        if measures(pyfuncitem):
            ending: AbstractContextManager[None] = nullcontext()  # `measure` ends what it runs
        else:
            # Ranks have a deadline of their own, after which they still report where they were.
            seconds = deadlines.first if pyfuncitem.get_closest_marker("own_processes") else deadlines.of(label)
            ending = within(seconds * (2 if "worlds" in pyfuncitem.fixturenames else 1))
        where, hung = None, False
        with ledger() as notes:
            try:
                with ending:
                    result = yield
                if "monkeypatch" not in pyfuncitem.fixturenames and (changed := self.guard.put_back()):
                    pytest.fail(f"it changes {', '.join(changed)}, and so its own judge", pytrace=False)
                return result
            except BaseException as error:
                self.guard.put_back()
                if _is_skip(error) and (line := _users_line(error, str(pyfuncitem.path))):
                    raise pytest.fail.Exception(f"it skips its own check, {error!r} at {line}", False) from error
                if (what := _should(pyfuncitem)) and _is_failure(error):
                    pyfuncitem.user_properties.append(("note", f"should: {what}; {first_line(str(error))}"))
                    return True
                hung = isinstance(error, Hung) or (isinstance(error, RankError) and error.hung)
                if hung:
                    deadlines.note_hang(label, _claim(pyfuncitem))
                source = error.__cause__ or error
                test, on_ranks = str(pyfuncitem.path), isinstance(source, RankError)
                where = user_line_in_text(str(source), test) if on_ranks else user_line(source, test)
                raise
            finally:
                pyfuncitem.user_properties.append((NOTES, Notes.of(notes, where, hung).saved()))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count each check once: when it is called, or when its setup or teardown does not pass; or when it ends its
        worker's process, of which pytest-xdist makes a report."""
        properties: dict[str, Any] = dict(report.user_properties)
        if report.when == CRASHED:
            properties = self._of_crashed(report)
        self.begun.setdefault(report.nodeid, properties)
        if TARGET not in properties or (report.when != "call" and report.passed):
            return
        verdict = self.verdicts[properties[TARGET]]
        verdict.remarks |= {str(value): None for key, value in report.user_properties if key == "note"}
        if properties[SHOULD]:
            if report.when == CRASHED:
                verdict.remarks[f"should: {properties[SHOULD]}; {ENDS}"] = None
            return
        why = reason(report).removeprefix("Skipped: ") if not report.passed else ""
        if report.skipped:
            why = first_line(why)
        verdict.add(from_report(report.nodeid, report.outcome, why, properties, PLACE, NOTES))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self.of_workers.update(ids)

    def _of_crashed(self, report: pytest.TestReport) -> dict[str, Any]:
        """Properties of a test that ended its worker's process; its setup's report, if one has come, had them."""
        properties = dict(self.begun.get(report.nodeid, {}))
        if TARGET not in properties and (label := self._named_in(report.nodeid)):
            properties = {TARGET: label, SHOULD: None}
        if TARGET in properties:
            properties[PLACE] = -1  # first: it is nearest to the cause
            report.user_properties.append((TARGET, properties[TARGET]))
            report.longrepr = ENDS
        return properties

    def _named_in(self, test: str) -> str | None:
        """The target among a test's parameters, of which it is the first: for a test that no report has told of."""
        parameters = f"{test.partition('[')[2].rstrip(']')}-"
        return next((label for label, each in self.targets.items() if parameters.startswith(f"{each.name}-")), None)

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int) -> None:
        """A refused target makes a run that passes otherwise a usage error, one that is wrong a failed one; one that
        is not judged has a status of its own."""
        unreported = Counter(filter(None, map(self._named_in, self.of_workers - self.begun.keys())))
        for label, count in unreported.items():
            self.verdicts[label].left_out.append(f"{count} tests: the run ended before them")
        outcomes = {verdict.outcome for verdict in self._judged().values()}
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
            return
        if self.session.refused:
            session.exitstatus = pytest.ExitCode.USAGE_ERROR
        elif WRONG in outcomes:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
        elif NOT_JUDGED in outcomes:
            session.exitstatus = EXIT_NOT_JUDGED

    def _judged(self) -> dict[str, Verdict]:
        return {label: verdict for label, verdict in self.verdicts.items() if verdict.checks}

    def _left_out(self, config: pytest.Config, label: str) -> Iterator[str]:
        """Parts that the user's arguments and options leave out, of which the number is not known here."""
        owner = family(self.targets[label].family)
        paths = [Path(config.invocation_params.dir, arg) for arg in config.args]
        if not any(path.is_dir() and not _is_beside(path, owner.folder) for path in paths):
            yield "checks outside of " + ", ".join(config.args)
        if label in self.on_ranks and (missing := self._ranks_left_out()):
            yield f"checks on {', '.join(map(str, missing))} ranks, which --ranks leaves out"
        if not config.getoption("numprocesses", 0):
            return
        if config.option.keyword or config.getoption("deselect", None):
            yield "checks that -k or --deselect leaves out"

    def _ranks_left_out(self) -> list[int]:
        """World sizes of contract checks that run without --ranks and not in this run."""
        usual = sizes.contract_ranks(sizes.ranks(None, self.session.device), self.session.device)
        return sorted(set(usual) - set(self.session.contract_ranks))

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_terminal_summary(
        self, terminalreporter: pytest.TerminalReporter, config: pytest.Config
    ) -> Generator[None, None, None]:
        """Print the verdicts below all else, if any check ran; they stand for the tracebacks unless these are asked
        for."""
        judged = self._judged()
        verbose = config.option.verbose > 0
        failed = [each for key in ("failed", "error") for each in terminalreporter.stats.get(key, [])]
        if judged and not verbose and all(TARGET in dict(getattr(r, "user_properties", ())) for r in failed):
            terminalreporter.ensure_newline()
            config.option.tbstyle = "no" if config.option.tbstyle == "auto" else config.option.tbstyle
            if config.option.reportchars == REPORTED:
                terminalreporter.reportchars = ""
        yield
        if judged or self.session.refused:
            terminalreporter.section("Does it do what its contract says?", sep="-")
        for line in self.session.refused.values():
            terminalreporter.write_line(printable(line), red=True)
        for label, verdict in judged.items():
            colour = {RIGHT: "green", WRONG: "red", NOT_JUDGED: "yellow"}[verdict.outcome]
            terminalreporter.write_line(printable(f"{label} {verdict.line()}"), **{colour: True})
            for line in self._lines(label, verdict, verbose):
                terminalreporter.write_line(printable(line).rstrip())
        if judged:
            terminalreporter.write_line(f"--seed {self.session.seed} draws the same inputs again")

    def _lines(self, label: str, verdict: Verdict, verbose: bool) -> list[str]:
        """Causes of failures, what was not asked or not run, and remarks; those of a wrong target only with -v."""
        lines = [] if verdict.outcome == WRONG and not verbose else [f"note: {remark}" for remark in verdict.remarks]
        unasked = [*verdict.unrun(), *([] if verdict.outcome == WRONG else verdict.untouched())]
        not_run = verdict.not_run()
        if verdict.outcome == WRONG and not verbose:
            not_run = [cut(line, WIDTH - 2) for line in not_run]
        lines = [*(f"not asked: {part}" for part in unasked), *not_run, *lines]
        options = _that_select(self.session.config.invocation_params.args)
        causes = lines_of_causes(self.targets[label], verdict, None if verbose else CAUSES, options)
        return [each for line in [*causes, *lines] for each in _fitted(f"  {line}")]


def _that_select(arguments: Sequence[Any]) -> str:
    """Those of a run's options without which some of its tests are not there."""
    given, found = [str(argument) for argument in arguments], []
    for argument, value in zip(given, [*given[1:], ""], strict=True):
        name, joined, _ = argument.partition("=")
        if name in ("--mesh", "--ranks", "--model", "--device"):
            found += [argument] if joined else [name, value]
    return " ".join(["", *map(shlex.quote, found)])


def _fitted(line: str) -> list[str]:
    """At most WIDTH characters a line; code is whole."""
    indent = len(line) - len(line.lstrip())
    if indent > 4 or len(line) <= WIDTH:
        return [line]
    return textwrap.wrap(
        line, WIDTH, subsequent_indent=" " * (indent + 2), break_long_words=False, break_on_hyphens=False
    )


def not_refusable(implementation: Implementation, error: Unsupported) -> BaseException:
    """The failure of a check whose target refuses what its contract does not let it refuse."""
    allowed = Verdict(family(implementation.family).may_refuse).what_may_be()
    return pytest.fail.Exception(f"raised Unsupported for what every implementation takes: {error}. {allowed}", False)


def _is_beside(path: Path, folder: str) -> bool:
    """Whether the path is a folder of other families' checks."""
    return path.name != folder != "" and (path.parent / folder).is_dir() and not (path / folder).is_dir()


def _should(item: pytest.Item) -> str:
    """The text of the test's mark `should`; "" without one, and for an implementation of the suite, which must."""
    mark, implementation = item.get_closest_marker("should"), implementation_of(item)
    if mark is None or implementation is None:
        return ""
    own = implementation.spec in family(implementation.family).implementations
    return "" if own else str(mark.args[0])


def _is_skip(error: BaseException) -> bool:
    """Whether the error has its test skipped; the suite's own checks do that, and a target must not."""
    return isinstance(error, (pytest.skip.Exception, pytest.xfail.Exception, unittest.SkipTest, NotAsked))


def _users_line(error: BaseException | None, test: str) -> str | None:
    """The user's line that led to the error, or to the one that it stands for; None where that is a refusal."""
    line = None
    while error is not None and line is None:
        if isinstance(error, Unsupported) and not isinstance(error, NotAsked):
            return None
        line, error = user_line(error, test), error.__cause__ or error.__context__
    return line


def _is_failure(error: BaseException) -> bool:
    """Whether a test fails by the error: an exception, pytest.fail or a hang, but no refusal, skip or Ctrl-C."""
    return isinstance(error, (Exception, pytest.fail.Exception, Hung)) and not isinstance(error, Unsupported)


def _claim(item: pytest.Item) -> str:
    """The test without its parameters."""
    return item.nodeid.partition("[")[0]


def _label(implementation: Implementation) -> str:
    return f"{implementation.family}={implementation.name}"
