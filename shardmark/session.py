"""One pytest session: its options, checked, and what its tests share. A bad value is one line and exit status 4."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardmark import registry, torchrun
from shardmark.budget import AbsoluteBudget, confidence, read_budgets
from shardmark.checkout import check_out
from shardmark.clock import DeviceClock
from shardmark.deadline import TRIED, Deadlines
from shardmark.gate import Gate
from shardmark.grid import SCALES
from shardmark.hardware import Roofline, measure_roofline
from shardmark.link import Link, LinkError
from shardmark.rank import WorldError, available_cores
from shardmark.ref import Ref
from shardmark.registry import Implementation
from shardmark.report.layout import printable
from shardmark.report.questions import Questions
from shardmark.rowfile import RowFile
from shardmark.signals import Ending
from shardmark.simulation.worlds import SimulatedWorlds, simulated_ranks
from shardmark.trace import TraceFolder
from shardmark.world import DEADLINE, Worlds, available_ranks, check_size

DEVICES = ("auto", "cpu", "cuda")
LARGEST_SEED = 2**63 - 1
"""A test's own number, and a rank's, are added to it, and torch takes 64 bits."""
GROUPINGS = ("group", "name", "func", "fullfunc", "fullname", "param")
MOST_ROUNDS = 10**6
LONGEST_DEADLINE = 1e6
"""Seconds, eleven days: the kernel takes no more milliseconds."""


class Session:
    """What the options say, checked, and what the tests share: worlds and the link between them, clock, rows.

    Raises ValueError (of which RegistryError, WorldError, LinkError and BudgetFileError are kinds), in one line, for a
    bad value.
    """

    def __init__(self, config: pytest.Config, ending: Ending) -> None:
        option = config.getoption
        self.config = config
        self.simulated = _simulated(option)
        """The ranks to predict for, of `--simulate`."""
        self.device = "cpu" if self.simulated else _device(option("device"), option("ranks"))
        self.scale = _one_of("--scale", option("scale"), ("auto", *SCALES))
        if self.scale == "auto":
            self.scale = "paper" if self.device == "cuda" else "laptop"
        self.ranks = [self.simulated] if self.simulated else _ranks(option("ranks"), self.device)
        self.contract_ranks = self.ranks if option("ranks") else _contract_ranks(self.ranks, self.device)
        """World sizes of tests that measure nothing: what is right on two ranks alone is wrong."""
        self.seed = _seed(str(option("seed")))
        self.refused: dict[str, str] = {}
        """The `--impl` targets that do not meet their contract, and in one line why, where others do."""
        self.selected = _selected(option("impl"), self.device, self.refused)
        self.deadlines = Deadlines(_deadline(option("deadline")) or (TRIED if self.selected else DEADLINE))
        self.budgets: list[AbsoluteBudget] = [] if option("budgets") is None else read_budgets(_path("budgets", option))
        self.matched_budgets: set[str] = set()
        self.judgements = 1
        self.trace: TraceFolder | None = None
        self.gate: Gate | None = None
        self.ref: Ref | None = None
        self.ending = ending
        self.questions = Questions()
        self.shown = False
        """Whether the tables have been printed."""
        self.clock = DeviceClock()
        self.link = _link(option("link"), self.device)
        self.worlds: Worlds | torchrun.TorchrunWorlds | SimulatedWorlds = Worlds(self.device, self.link)
        if self.simulated:
            self.worlds = SimulatedWorlds()
        # Last, as what it opens has to be closed again.
        self.rows = RowFile(config, self.ending, writes=not _is_helping())
        try:
            _check_benchmark(option)
            self.gate = _gate(option, self.rows)
            self.ref = _ref(option, self.device, config.rootpath)
            if option("trace_dir") is not None:
                self.trace = TraceFolder(_path("trace_dir", option), others=_is_helping())
        except BaseException:
            self._close_files()
            raise
        self._rooflines: dict[str, Roofline] = {}

    @property
    def link_rate(self) -> str | None:
        """The rate of the link between the ranks, if there is one."""
        return None if self.link is None else self.link.rate

    def implementations(self, family: str) -> list[Implementation]:
        """The family's implementations that this run is about: those of `--impl`, else all registered."""
        registered = registry.family(family).implementations
        return self.selected[family] if family in self.selected else list(registered.values())

    def roofline(self, dtype: str) -> Roofline:
        """This machine's rates for that dtype, measured once a session."""
        if dtype not in self._rooflines:
            self._rooflines[dtype] = self._measured_roofline(dtype)
        return self._rooflines[dtype]

    def most_flops_per_second(self, dtype: str) -> float:
        """What this machine computes at most for an implementation in that dtype, which may convert to float32.

        Measured now, as noise may have slowed what the roofline was measured by; never less than that.
        """
        rooflines = [self.roofline(dtype), *(self._measured_roofline(each) for each in {dtype, "float32"})]
        return max(max(each.flops_per_second, each.peak_flops_per_second) for each in rooflines)

    def _measured_roofline(self, dtype: str) -> Roofline:
        return self.worlds.get(1).run(measure_roofline, self.device, getattr(torch, dtype))[0]

    @property
    def confidence(self) -> float:
        """Of each interval that a verdict of this run is taken from."""
        return confidence(self.judgements)

    def count_judgements(self, items: list[pytest.Item]) -> None:
        """Count what they may ask a time verdict of: each test's ratio to its peer, then and now, and `--budgets` in
        seconds."""
        measured = [item for item in items if "measure" in getattr(item, "fixturenames", ())]
        absolute = [budget for budget in self.budgets if budget.seconds is not None]
        self.judgements = len(measured) + sum(budget.matches(item.nodeid) for item in measured for budget in absolute)
        if self.ref is not None:
            self.judgements += len(measured)
        if self.gate is not None:
            self.judgements += self.gate.count_judgements([item.nodeid for item in measured])

    def budgets_for(self, test_id: str) -> list[AbsoluteBudget]:
        """The `--budgets` that speak of that test; from now on they count as matched."""
        found = [budget for budget in self.budgets if budget.matches(test_id)]
        self.matched_budgets.update(budget.pattern for budget in found)
        return found

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
        if self.ref is not None:
            self.ref.close()
        if self.gate is not None:
            self.gate.close()


SESSION = pytest.StashKey[Session]()


def _is_helping() -> bool:
    """Whether another process writes the rows: one of torchrun's other ranks, a worker of pytest-xdist."""
    return "PYTEST_XDIST_WORKER" in os.environ or (torchrun.launched() and torchrun.rank() > 0)


def _one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{name} is one of {', '.join(allowed)}, not {value!r}")
    return value


def _device(value: str, ranks: str | None) -> str:
    _one_of("--device", value, DEVICES)
    if value == "cuda" and not torch.cuda.is_available():
        needed = max([int(n) for n in (ranks or "").split(",") if n.strip().isdigit()], default=1)
        raise ValueError(f"--device cuda needs {needed} CUDA device{'s'[: needed > 1]}, and this machine has 0")
    return ("cuda" if torch.cuda.is_available() else "cpu") if value == "auto" else value


def _simulated(option: Callable[..., Any]) -> int | None:
    """The ranks of `--simulate`; None without it."""
    if option("simulate") is None:
        return None
    real = ("ranks", "link", "against", "against_ref", "trace_dir")
    if taken := next((name for name in real if option(name) is not None), None):
        raise ValueError(f"--simulate runs nothing: not with --{taken.replace('_', '-')}")
    if option("device") == "cuda" or torchrun.launched():
        raise ValueError(f"--simulate runs nothing: not with {'torchrun' if torchrun.launched() else '--device cuda'}")
    return simulated_ranks(option("simulate"))


def _path(name: str, option: Callable[[str], str]) -> Path:
    if not option(name):
        raise ValueError(f"--{name.replace('_', '-')} takes a path, not ''")
    return Path(option(name))


def _check_benchmark(option: Callable[..., Any]) -> None:
    """What pytest-benchmark would find out when all is measured, or not at all."""
    for name, most in (("min_rounds", MOST_ROUNDS), ("max_time", LONGEST_DEADLINE), ("warmup_iterations", MOST_ROUNDS)):
        value = option(f"benchmark_{name}", 0)
        if not 0 <= float(value) <= most:
            raise ValueError(f"--benchmark-{name.replace('_', '-')} is a number from 0 to {most:g}, not {value}")
    for each in (option("benchmark_group_by", None) or "group").split(","):
        if each not in GROUPINGS and not each.startswith("param:"):
            raise ValueError(f"--benchmark-group-by is of {', '.join(GROUPINGS)}, param:NAME, not {each!r}")
    if option("benchmark_compare_fail", None) and not option("benchmark_compare", None):
        raise ValueError("--benchmark-compare-fail needs --benchmark-compare, which names what to compare with")
    storage = str(option("benchmark_storage", None) or "")
    if "://" in storage and not re.match(r"file://|elasticsearch\+https?://", storage):
        raise ValueError(f"--benchmark-storage is file://PATH or elasticsearch+http://HOST, not {storage!r}")


def _gate(option: Callable[..., Any], rows: RowFile) -> Gate | None:
    """What `--against` names, opened."""
    if option("against") is None:
        if option("update_baseline"):
            raise ValueError("--update-baseline needs --against, which names the file")
        return None
    _check_measures("--against", option)
    return None if _is_helping() else Gate(_path("against", option), option("update_baseline"), rows)


def _ref(option: Callable[..., Any], device: str, folder: Path) -> Ref | None:
    """The version that `--against-ref` names, checked out."""
    ref = option("against_ref")
    if ref is None:
        return None
    if torchrun.launched() or option("link") is not None:
        raise ValueError(f"--against-ref {ref} has ranks of its own on this machine: not with torchrun or --link")
    _check_measures("--against-ref", option)
    return None if _is_helping() else Ref(check_out(ref, folder), device)


def _check_measures(name: str, option: Callable[..., Any]) -> None:
    disabled = option("benchmark_disable", True) and not option("benchmark_enable", False)
    if disabled or option("benchmark_skip", False) or option("dist", "no") != "no":
        raise ValueError(f"{name} needs measurements: not --benchmark-disable, --benchmark-skip or pytest-xdist's -n")


def _seed(value: str) -> int:
    with suppress(ValueError):
        if 0 <= (seed := int(value)) <= LARGEST_SEED:
            return seed
    raise ValueError(f"--seed is a whole number from 0 to {LARGEST_SEED}, not {value!r}")


def _deadline(value: str | None) -> float | None:
    if value is None:
        return None
    with suppress(ValueError):
        if 0 < (seconds := float(value)) <= LONGEST_DEADLINE:  # nan is neither
            return seconds
    raise ValueError(f"--deadline is seconds, more than 0 and at most {LONGEST_DEADLINE:g}, not {value!r}")


def _ranks(value: str | None, device: str) -> list[int]:
    """`--ranks` as numbers; by default torchrun's ranks, else every GPU, else 2 (1 on a single core)."""
    if value is None:
        if torchrun.launched():
            return [torchrun.world_size()]
        return [torch.cuda.device_count() if device == "cuda" else min(2, available_cores())]
    try:
        sizes = [int(part) for part in value.split(",")]
    except ValueError:
        raise ValueError(f"--ranks takes world sizes such as 2,4, not {value!r}") from None
    for size in [] if torchrun.launched() else sizes:  # torchrun's own may be on many machines
        try:
            check_size(size, device)
        except WorldError as error:
            raise ValueError(f"--ranks {value}: {error}") from None
    return list(dict.fromkeys(sizes))


def _contract_ranks(ranks: list[int], device: str) -> list[int]:
    """With three more: an odd number, that shards rarely divide by."""
    if torchrun.launched():
        return ranks
    sizes = {2, 3} if device == "cpu" else {*ranks, 3}
    return sorted(size for size in sizes if size <= available_ranks(device))


def _link(rate: str | None, device: str) -> Link | None:
    """The link of `--link`, made."""
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


def _selected(options: list[str], device: str, refused: dict[str, str]) -> dict[str, list[Implementation]]:
    """What `--impl` names, by family. What its family's check refuses goes to `refused`, and does not end the others.

    Raises RegistryError where nothing is left.
    """
    selected: dict[str, list[Implementation]] = {}
    for option in dict.fromkeys(options):
        family, equals, spec = option.partition("=")
        if not (family and equals and spec):
            raise ValueError(f"--impl takes FAMILY=TARGET, not {option!r}")
        implementation = registry.resolve(family, spec)
        chosen = selected.setdefault(family, [])
        if implementation.unavailable_reason(device) is None:
            try:
                registry.check_contract(implementation, device)
            except registry.RegistryError as error:
                refused[option] = str(error)
                continue
        chosen.append(_told_apart(implementation, chosen))
    if refused and not any(selected.values()):
        raise registry.RegistryError("; ".join(refused.values()))
    return selected


def _told_apart(implementation: Implementation, others: list[Implementation]) -> Implementation:
    """With its file in its name, and if need be its folder, where another one has the same name."""
    taken = {other.name for other in others}
    parts = implementation.spec.replace(".py:", ":").replace(":", "/").split("/")
    names = [implementation.name, ".".join(parts[-2:]), ".".join(parts[-3:]), implementation.spec]
    return replace(implementation, name=next(name for name in names if name not in taken))


def start_session(config: pytest.Config) -> Session:
    """The session's state, which a signal now ends; what a user got wrong becomes pytest's one-line usage error, exit
    status 4.
    """
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
