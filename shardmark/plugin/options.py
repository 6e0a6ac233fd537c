"""Options: their help texts, and checks of their values. A bad value raises ValueError with one line."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from shardmark.api import registry
from shardmark.api.finding import RegistryError, family_and_target
from shardmark.api.recipe import RECIPE, Recipe, recipe_of
from shardmark.api.registry import Implementation
from shardmark.meter.hardware import THIS
from shardmark.plugin.tampering import keep_the_exit, untouched
from shardmark.predict import worlds
from shardmark.ranks import gpus, torchrun
from shardmark.ranks.deadline import MEASURED

DEVICES = ("auto", "cpu", "cuda")
LARGEST_SEED = 2**63 - 1
"""A test's own number, and a rank's, are added to it, and torch takes 64 bits."""
GROUPINGS = ("group", "name", "func", "fullfunc", "fullname", "param")
MOST_ROUNDS = 10**6
LONGEST_DEADLINE = 1e6
"""Seconds, eleven days: the kernel takes no more milliseconds."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add Shardmark's options to pytest's, in the order in which `--help` shows them."""
    group = parser.getgroup("shardmark")
    group.addoption("--device", default="auto", help="Device of tensors: auto (CUDA where it works), cpu or cuda.")
    group.addoption(
        "--scale",
        default="auto",
        help="Grid of cases: auto (paper on CUDA, laptop on CPU), smoke (seconds), laptop (minutes), paper (the "
        "telling published sizes) or full (all published sizes).",
    )
    group.addoption("--ranks", metavar="N,N", help="World sizes, such as 2,4.")
    group.addoption(
        "--mesh",
        action="append",
        default=[],
        metavar="AXIS=N,AXIS=N",
        help="A mesh of ranks, the outermost axis first, such as dp=2,tp=2: dp (copies), shard, cp (slices of the "
        "context), tp, pp; ep=N lies over others. Repeatable.",
    )
    group.addoption(
        "--link",
        metavar="RATE",
        help="Split the ranks over two hosts (network namespaces) joined by a link of this rate, such as 1gbit. Needs "
        "root and iproute2.",
    )
    group.addoption(
        "--impl",
        action="append",
        default=[],
        metavar="FAMILY=TARGET",
        help="Run one family alone, on this implementation: a registered name, module:attribute or "
        "file.py:attribute. Repeatable.",
    )
    group.addoption(
        "--model",
        metavar="FILE:ATTR",
        help="Run on your own model alone: a function that returns (model, batch, loss), as file.py:attribute or "
        "module:attribute.",
    )
    for name, (metavar, says) in RECIPE.items():
        group.addoption(f"--{name}", metavar=metavar, help=f"With --model: {says}")
    group.addoption(
        "--implementations",
        action="store_true",
        help="Print every family's implementations and whether each runs here, and stop.",
    )
    group.addoption(
        "--budgets",
        metavar="FILE",
        help="Your own limits: a TOML table per test-id pattern, with `seconds` (of a step) and `bytes` (peak).",
    )
    group.addoption(
        "--against",
        action="append",
        default=[],
        metavar="OLD.json",
        help="Fail on what is slower or larger, beyond noise, than in this file of an earlier run's --benchmark-json, "
        "or in any of a folder's. Repeatable.",
    )
    group.addoption(
        "--against-ref",
        metavar="REF",
        help="Run each case in this commit, branch or tag as well, in turns, and fail on what is slower or larger now.",
    )
    group.addoption(
        "--largest-slowdown",
        metavar="SHARE",
        help="Fail each compared row that is not shown to be slower by less than this, such as 5%%.",
    )
    group.addoption(
        "--undecided",
        default="pass",
        metavar="pass|fail",
        help="Whether tests fail whose time verdict stays undecided (default pass: they are counted).",
    )
    group.addoption(
        "--real-time",
        action="store_true",
        help="Run the ranks before all ordinary processes (SCHED_RR), where the system permits it.",
    )
    group.addoption(
        "--accept",
        metavar="FILE",
        help="Changes that are wanted: a TOML table per test-id pattern, with the factors `time`, `memory` and "
        "`counters` may grow by, and `why`.",
    )
    group.addoption(
        "--update-baseline",
        action="store_true",
        help="Write this run's rows to the file of --against, even if some are slower or larger.",
    )
    group.addoption(
        "--report",
        metavar="OUT.html",
        help="Write the page of this run: plots and tables in one file. OUT.md: Markdown for a pull request.",
    )
    group.addoption(
        "--simulate",
        metavar="HARDWARE[:RANKS]",
        help="Predict each case instead of running it, on this hardware and number of ranks: h100-80gb:8, this:2.",
    )
    group.addoption(
        "--trace-dir",  # --trace is pytest's own: it breaks into the debugger
        metavar="DIR",
        help="Profile one more step of each measured case. DIR gets a Chrome trace, and on CUDA a memory snapshot.",
    )
    group.addoption(
        "--seed",
        default="0",
        help="Seed of random test inputs (default 0).",
    )
    group.addoption(
        "--deadline",
        metavar="SECONDS",
        help="Seconds after which a test of an --impl target counts as hung: 60, and 3 once the target has hung. A "
        f"measured case has {MEASURED:g} times as long, and is skipped once its target has hung.",
    )


def check_measures(name: str, option: Callable[..., Any]) -> None:
    disabled = option("benchmark_disable", True) and not option("benchmark_enable", False)
    if disabled or option("benchmark_skip", False) or option("dist", "no") != "no":
        raise ValueError(f"{name} needs measurements: not --benchmark-disable, --benchmark-skip or pytest-xdist's -n")


def one_of(name: str, value: str, allowed: tuple[str, ...]) -> str:
    if value not in allowed:
        raise ValueError(f"{name} is one of {', '.join(allowed)}, not {value!r}")
    return value


def device(value: str, ranks: str | None) -> str:
    one_of("--device", value, DEVICES)
    if value == "auto":
        return gpus.device_at_hand()
    if value == "cuda" and not torch.cuda.is_available():
        needed = max([int(n) for n in (ranks or "").split(",") if n.strip().isdigit()], default=1)
        has = f"--device cuda needs {needed} CUDA device{'s'[: needed > 1]}, and this machine has 0"
        raise ValueError(f"{has}: {gpus.why_unusable()}")
    return value


def simulated(option: Callable[..., Any]) -> worlds.Simulated | None:
    """The hardware and ranks of `--simulate`; None without it."""
    if option("simulate") is None:
        return None
    on_this = option("simulate").partition(":")[0] == THIS  # which measures its rates, on a link too
    real = ("ranks", *(() if on_this else ("link",)), "against", "against_ref")
    asked = worlds.simulated(option("simulate"))
    if math.isnan(asked.hardware.bandwidth) and not on_this:  # whose times are not known
        real = (*real, "trace_dir")
    if taken := next((name for name in real if option(name) not in (None, [])), None):
        raise ValueError(f"--simulate runs nothing: not with --{taken.replace('_', '-')}")
    if option("device") == "cuda" or torchrun.launched():
        raise ValueError(f"--simulate runs nothing: not with {'torchrun' if torchrun.launched() else '--device cuda'}")
    return asked


def recipe(option: Callable[..., Any]) -> Recipe:
    """How the model of `--model` is trained; ValueError for an option of that without a model."""
    given = {name: option(name.replace("-", "_")) for name in RECIPE}
    if option("model") is None and (alone := next((name for name, text in given.items() if text is not None), None)):
        raise ValueError(f"--{alone} says how your own model is trained: it needs --model")
    if given["routing"] is not None and option("simulate") is None:
        raise ValueError("--routing says which experts a simulated router chooses: it needs --simulate")
    return recipe_of(*given.values())


def path(name: str, option: Callable[[str], str]) -> Path:
    return as_path(f"--{name.replace('_', '-')}", option(name))


def as_path(name: str, value: str) -> Path:
    if not value:
        raise ValueError(f"{name} takes a path, not ''")
    return Path(value)


def set_real_time(wanted: bool) -> None:
    """Have this process and those that it starts run before all ordinary ones. ValueError where that is forbidden."""
    if wanted:
        try:
            os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
        except (AttributeError, OSError) as error:
            raise ValueError(f"--real-time is not permitted here: {error}; it takes root, or the right to") from None


def check_benchmark(option: Callable[..., Any]) -> None:
    """Check early what pytest-benchmark checks after the measurements, or never."""
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


def seed(value: str) -> int:
    with suppress(ValueError):
        if 0 <= (seed := int(value)) <= LARGEST_SEED:
            return seed
    raise ValueError(f"--seed is a whole number from 0 to {LARGEST_SEED}, not {value!r}")


def deadline(value: str | None) -> float | None:
    if value is None:
        return None
    with suppress(ValueError):
        if 0 < (seconds := float(value)) <= LONGEST_DEADLINE:  # nan is neither
            return seconds
    raise ValueError(f"--deadline is seconds, more than 0 and at most {LONGEST_DEADLINE:g}, not {value!r}")


def selected(options: list[str], device: str, refused: dict[str, str]) -> dict[str, list[Implementation]]:
    """The targets of `--impl` by family. A target that fails its family's check goes to `refused`; the others still
    run. RegistryError where none is left."""
    selected: dict[str, list[Implementation]] = {}
    if options:
        keep_the_exit()
    for option in dict.fromkeys(options):
        family, spec = family_and_target(option)
        changed: list[str] = []
        with untouched(changed):
            implementation = registry.resolve(family, spec)
        chosen = selected.setdefault(family, [])
        if implementation.unavailable_reason(device) is None:
            try:
                with untouched(changed):
                    registry.check_contract(implementation, device)
                if changed:
                    raise RegistryError(f"{option} changes {', '.join(changed)}, and so its own judge")
            except RegistryError as error:
                refused[option] = str(error)
                continue
        chosen.append(_told_apart(implementation, chosen))
    if refused and not any(selected.values()):
        raise RegistryError("; ".join(refused.values()))
    return selected


def _told_apart(implementation: Implementation, others: list[Implementation]) -> Implementation:
    """With the file in its name, and if need be the folder, where another target has the same name."""
    taken = {other.name for other in others}
    parts = implementation.spec.replace(".py:", ":").replace(":", "/").split("/")
    names = [implementation.name, ".".join(parts[-2:]), ".".join(parts[-3:]), implementation.spec]
    return replace(implementation, name=next(name for name in names if name not in taken))
