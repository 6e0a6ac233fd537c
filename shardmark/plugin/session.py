"""One pytest session: its checked options, and what its tests share. A bad value is one line and exit status 4."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from shardmark.api import registry
from shardmark.api.grid import SCALES, Grid
from shardmark.api.mesh import Mesh
from shardmark.api.registry import Implementation, Race
from shardmark.meter.clock import DeviceClock
from shardmark.meter.hardware import Hardware, of_this_machine
from shardmark.meter.roofline import Roofline, attainable_flops, measure_roofline
from shardmark.meter.trace import TraceFolder
from shardmark.plugin import comparing, options, sizes
from shardmark.plugin.fresh import BaselineRows
from shardmark.predict.own_model import check
from shardmark.predict.worlds import SimulatedWorlds
from shardmark.ranks import torchrun
from shardmark.ranks.deadline import MEASURED, TRIED, Deadlines
from shardmark.ranks.link import Link, LinkError
from shardmark.ranks.signals import Ending
from shardmark.ranks.world import DEADLINE
from shardmark.ranks.worlds import TorchrunWorlds, Worlds
from shardmark.report.outcomes import Outcomes
from shardmark.report.output import Report
from shardmark.report.questions import Questions
from shardmark.rows.against import Against
from shardmark.rows.against_ref import AgainstRef
from shardmark.rows.atomic_json import Entry
from shardmark.rows.case_times import CaseTimes
from shardmark.rows.writer import RowFile
from shardmark.text import printable
from shardmark.verdict.budget import AbsoluteBudget, confidence, read_budgets


class Session:
    """The checked options, and what tests share: worlds, the link between ranks, the clock, the rows.

    Raises ValueError, in one line, for a bad value; RegistryError, WorldError, LinkError and BudgetFileError are kinds
    of it.
    """

    def __init__(self, config: pytest.Config, ending: Ending) -> None:
        option = config.getoption
        options.set_real_time(option("real_time"))
        self.config = config
        self.simulated = options.simulated(option)
        """The hardware and ranks of `--simulate`; None in a real run."""
        self.device = "cpu" if self.simulated else options.device(option("device"), option("ranks"))
        self.scale = options.one_of("--scale", option("scale"), ("auto", *SCALES))
        if self.scale == "auto":
            self.scale = "paper" if self.device == "cuda" else "laptop"
        self.ranks = [self.simulated.ranks] if self.simulated else sizes.ranks(option("ranks"), self.device)
        self.contract_ranks = self.ranks if option("ranks") else sizes.contract_ranks(self.ranks, self.device)
        """World sizes of tests that measure nothing: what is right on two ranks alone is wrong."""
        self.meshes = sizes.meshes(option("mesh"))
        """The meshes of `--mesh`; empty: those of each test."""
        self.undecided_fails = comparing.undecided_fails(option)
        """Whether a test that is undecided fails: by `--undecided fail`, or as `--largest-slowdown` is given."""
        self.seed = options.seed(str(option("seed")))
        self.refused: dict[str, str] = {}
        """One line on each `--impl` target that does not meet its contract, where another target does."""
        self.selected = options.selected(option("impl"), self.device, self.refused)
        recipe = options.recipe(option)
        self.model = None if option("model") is None else check(option("model"), bool(self.simulated), recipe)
        """The user's own model, of `--model`, which this run is about."""
        deadline = options.deadline(option("deadline"))
        self.deadlines = Deadlines(
            deadline or (TRIED if self.selected else DEADLINE), measured=MEASURED * (deadline or TRIED)
        )
        self.budgets: list[AbsoluteBudget] = (
            [] if option("budgets") is None else read_budgets(options.path("budgets", option))
        )
        self.matched_budgets: set[str] = set()
        self.judgements = 1
        self._judged: set[str] = set()
        self._others = 0
        self.trace: TraceFolder | None = None
        self.against: Against | None = None
        self.against_ref: AgainstRef | None = None
        self.report: Report | None = None
        self.ending = ending
        self.questions = Questions()
        self.outcomes = Outcomes()
        self.shown = False
        """Whether the tables have been printed."""
        self.clock = DeviceClock()
        self.times = CaseTimes()
        self.link = _link(option("link"), self.device)
        self.worlds: Worlds | TorchrunWorlds | SimulatedWorlds = Worlds(self.device, self.link)
        if self.simulated:
            self.worlds = SimulatedWorlds(self.simulated.hardware, self.link)
        self.baseline_rows = BaselineRows(self.times)
        """The cases that --update-baseline times again at the end."""
        # Opened last: what is open must be closed where a later option is bad.
        self.rows = RowFile(config, self.ending, self._said, writes=not comparing.is_helping())
        try:
            options.check_benchmark(option)
            accepted = comparing.read_accept_file(option)
            self.against = comparing.open_against(option, self.rows, accepted)
            self.against_ref = comparing.open_against_ref(option, self.device, config.rootpath, accepted)
            if option("report") is not None and not comparing.is_helping():
                self.report = Report(options.path("report", option))
            if option("trace_dir") is not None:
                self.trace = TraceFolder(options.path("trace_dir", option), others=comparing.is_helping())
        except BaseException:
            self._close_files()
            raise
        self._rooflines: dict[str, Roofline] = {}

    @property
    def link_rate(self) -> str | None:
        """The rate of the link between the ranks; None without a link."""
        return None if self.link is None else self.link.rate

    @property
    def hardware(self) -> Hardware:
        """The hardware whose rules formulas and predictions follow: the simulated one, else this machine."""
        return self.simulated.hardware if self.simulated else of_this_machine(self.device)

    @property
    def ranks_are_chosen(self) -> bool:
        """Whether the user has chosen the numbers of ranks: by `--ranks`, by `--mesh`, or by torchrun."""
        return bool(self.config.getoption("ranks") or self.meshes) or torchrun.launched()

    def implementations(self, family: str) -> list[Implementation]:
        """The family's implementations in this run: those of `--impl`, else all registered."""
        registered = registry.family(family).implementations
        return self.selected[family] if family in self.selected else list(registered.values())

    def cases(self, grid: Grid) -> Sequence[Any]:
        """The grid's cases in this run: that of `--model`, else those at `--scale`."""
        if self.model is None:
            return grid.at(self.scale)
        return [] if grid.own is None else [grid.own(self.model)]

    def meshes_of(self, own: Sequence[str], smoke: Sequence[str] | None = None) -> list[Mesh]:
        """The meshes in this run of a test whose own are given as texts: those of `--mesh`; else its own, with
        `--ranks` those of such a size, or those for a short run at `smoke` scale."""
        if self.meshes:
            return self.meshes
        if smoke is not None and self.scale == "smoke" and not self.ranks_are_chosen:
            own = smoke
        return [mesh for mesh in map(Mesh.parse, own) if not self.ranks_are_chosen or mesh.size in self.ranks]

    def asks(self, grid: Grid | None) -> bool:
        """Whether tests over that grid run; with None, whether tests without a grid run."""
        if self.model is None:
            return grid is None or grid.own is None or any(grid.at(scale) for scale in SCALES)
        return grid is not None and grid.own is not None

    def roofline(self, dtype: str) -> Roofline:
        """This machine's rates for that dtype, measured once a session."""
        if dtype not in self._rooflines:
            self._rooflines[dtype] = self.worlds.get(1).run(measure_roofline, self.device, getattr(torch, dtype))[0]
        return self._rooflines[dtype]

    def most_flops_per_second(self, dtype: str) -> float:
        """The FLOP/s that no implementation in that dtype can exceed here; at least the roofline's rates."""
        roofline = self.roofline(dtype)
        again = self.worlds.get(1).run(attainable_flops, self.device, getattr(torch, dtype))[0]
        return max(roofline.flops_per_second, roofline.peak_flops_per_second, again)

    def confidence(self, test_id: str, race: Race | None = None) -> float:
        """The confidence of each interval that decides a verdict of that test: each has an equal share of the error.

        A test may have a time budget that its implementation is not registered with, which comes to light when it
        measures. All such tests together have one share.
        """
        unforeseen = race is not None and race.budget is not None and test_id not in self._judged
        return confidence(self.judgements * (max(1, self._others) if unforeseen else 1))

    def count_judgements(self, items: list[pytest.Item]) -> None:
        """Count the intervals that may decide a verdict in time: of each test's ratio to its peer, and to its own time
        in `--against-ref`; and of its seconds, by `--budgets`."""
        measured = [item for item in items if measures(item)]
        if self.against is not None:
            self.against.collected([item.nodeid for item in measured])
        run = [item for item in measured if item.get_closest_marker("skip") is None]
        counts = {item.nodeid: self._count_judgements(item) for item in run}
        self._judged = {test_id for test_id, count in counts.items() if count}
        self._others = len(counts) - len(self._judged)
        self.judgements = sum(counts.values()) + (self._others > 0)

    def _count_judgements(self, item: pytest.Item) -> int:
        """How many intervals are known, before the test measures, to decide a verdict of it."""
        implementation = implementation_of(item)
        race = implementation.time if implementation is not None else None
        budget = self.model is None and (implementation is None or (race is not None and race.budget is not None))
        older = self.against is not None and self.against.compares_time(item.nodeid)
        beside = (
            (self.against_ref is not None)
            + 2 * older * len(self.against.runs if self.against else ())
            + sum(  # an older row: beside its peer and the load
                each.seconds is not None and each.matches(item.nodeid) for each in self.budgets
            )
        )
        return beside + (budget or beside > 0)  # as the test may have a budget of its own

    def budgets_for(self, test_id: str) -> list[AbsoluteBudget]:
        """The budgets of `--budgets` whose pattern matches that test. They count as matched from now on."""
        found = [budget for budget in self.budgets if budget.matches(test_id)]
        self.matched_budgets.update(budget.pattern for budget in found)
        return found

    def _said(self, entries: list[Entry]) -> Entry:
        """The parts of the run's file beside rows: how the tests ended, and the answers to the questions."""
        return {"outcomes": self.outcomes.saved(), "questions": self.questions.answered(entries, self.outcomes)}

    def close(self) -> None:
        """Save the rows, and end the worlds and the link between their ranks."""
        self._close_files()
        self.worlds.close()
        if self.trace is not None:
            self.trace.close()
        if self.link is not None:
            self.link.close()

    def _close_files(self) -> None:
        self.rows.finish()
        if self.against_ref is not None:
            self.against_ref.close()
        if self.against is not None:
            self.against.close()
        if self.report is not None:
            self.report.close()


SESSION = pytest.StashKey[Session]()


def _link(rate: str | None, device: str) -> Link | None:
    """Make the link of `--link`."""
    if rate is None:
        return None
    if device == "cuda":
        raise LinkError(f"--link {rate} is for --device cpu: GPUs of one machine talk past the network")
    if torchrun.launched():
        raise LinkError(f"--link {rate} does not go with torchrun, whose ranks are where it started them")
    try:
        return Link(rate)
    except LinkError as error:
        raise LinkError(f"--link {rate}: {error}") from None


def start_session(config: pytest.Config) -> Session:
    """Make the session, which signals end from now on. A bad option becomes pytest's usage error: one line, exit
    status 4."""
    ending = Ending()
    ending.handle()
    try:
        return Session(config, ending)
    except BaseException as error:
        ending.leave()
        if isinstance(error, ValueError):
            line = printable(str(error))
            raise pytest.UsageError(line if len(line) <= 600 else f"{line[:400]} ... {line[-100:]}") from None
        if isinstance(error, KeyboardInterrupt):
            raise pytest.UsageError("interrupted while the options were checked") from None
        raise


def measures(item: pytest.Item) -> bool:
    """Whether the test measures a case's time and memory; other tests check that an implementation is right."""
    return "measure" in getattr(item, "fixturenames", ())


def implementation_of(item: pytest.Item) -> Implementation | None:
    """The implementation that a test is parametrized with, if any."""
    parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
    found = parameters.get("implementation")
    return found if isinstance(found, Implementation) else None
