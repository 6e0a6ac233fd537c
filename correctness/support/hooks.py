"""The hooks and fixtures that correctness/ and tests/ share: what is left to the sweep, workers, worlds."""

from __future__ import annotations

import gc
import os
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from correctness.support.compiling import compiler, unavailable_reason
from correctness.support.interpreting import interpret_without_detours
from correctness.support.paths import ROOT
from correctness.support.workers import share_the_cores
from impl.interpreting import requires_triton
from shardmark.api import requires_compiler
from shardmark.plugin.session import SESSION
from shardmark.ranks.rank import threads_of_a_rank
from shardmark.ranks.world import World, available_ranks
from shardmark.text import layout

pytest.register_assert_rewrite("tests.support.project")  # a plugin of some tests, which others import before them

FOLDERS = (ROOT / "correctness", ROOT / "tests")
MOST_RANKS_OF_PYTORCH = 2
"""On which PyTorch's own implementations are tested every time."""
SIMPLER = ("naive", "flat", "overlapped")
"""Ways of data parallelism that lead to `bucketed`, and are tested every time on as few."""


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Have two cores take half the time for whole folders, and the sweep draw inputs that no run has seen."""
    if "sweep" in config.option.markexpr and config.option.seed == "0":
        config.option.seed = random.randrange(1, 2**32)
    share_the_cores(config)


def pytest_configure() -> None:
    """Workers take their share of the cores, as their ranks do; kernels are interpreted without detours."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(threads_of_a_rank(1))
    interpret_without_detours()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """How many random examples: few of our own each time, more of what `--impl` names, and many in the sweep."""
    mark, family = (metafunc.definition.get_closest_marker(name) for name in ("examples", "family"))
    if mark is not None and family is not None:
        each_time, judged, many = mark.args
        chosen = family.args[0] in metafunc.config.stash[SESSION].selected
        numbers = [judged if chosen else each_time, pytest.param(many, marks=pytest.mark.sweep)]
        metafunc.parametrize("examples", numbers)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave most of what is slow to the sweep, and the sweep to those who ask for it.

    Slow are tests of an implementation that compiles, as each new shape takes seconds, large sizes in Triton's
    interpreter, and large sizes or many ranks of PyTorch's own. Cases marked `judged` are left to the sweep unless
    `--impl` names their family.
    """
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    for item in items:
        if not any(item.path.is_relative_to(folder) for folder in FOLDERS) or not hasattr(item, "callspec"):
            continue
        implementation = item.callspec.params.get("implementation")
        requires = getattr(implementation, "requires", ())
        every_time = item.get_closest_marker("compiled_every_time")
        compiles = requires_compiler in requires and not (
            every_time and item.callspec.id.endswith(every_time.args or "")
        )
        large = item.get_closest_marker("large") is not None
        interprets = interpreted and requires_triton in requires and large
        # PyTorch's own, each in a file `library.py`, have PyTorch's tests; what --impl names is tested in full.
        of_pytorch = getattr(getattr(implementation, "target", None), "__module__", "").endswith(".library")
        chosen = getattr(implementation, "family", None) in config.stash[SESSION].selected
        simpler = of_pytorch or getattr(implementation, "name", None) in SIMPLER
        many = simpler and item.callspec.params.get("world", 0) > MOST_RANKS_OF_PYTORCH
        judged = item.get_closest_marker("judged") is not None
        if compiles or interprets or ((many or judged or (large and of_pytorch)) and not chosen):
            item.add_marker(pytest.mark.sweep)
    if "sweep" not in config.option.markexpr:
        config.hook.pytest_deselected(items=[item for item in items if item.get_closest_marker("sweep")])
        items[:] = [item for item in items if not item.get_closest_marker("sweep")]


def pytest_collection_finish() -> None:
    """What is imported by now stays: looking through it takes each collection a quarter of a second, and tests that
    run pytest collect half a dozen times each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def compiling() -> Iterator[ProcessPoolExecutor]:
    """A process that compiles Triton's kernels; where it cannot its tests are skipped."""
    with compiler() as pool:
        if reason := pool.submit(unavailable_reason).result():
            pytest.skip(reason)
        yield pool


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Memory that torch hands out uninitialized is NaN, so that what is never written is noticed."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture
def pair(device: str) -> Iterator[World]:
    """A world of two that the test may break."""
    if available_ranks(device) < 2:
        pytest.skip("needs two ranks")
    with World(2, device) as world:
        yield world


def write_table(
    terminal: pytest.TerminalReporter, title: str, rows: list[dict[str, object]], left: tuple[str, ...]
) -> None:
    """A table of the run's end, if there is anything to show."""
    if rows:
        terminal.section(title, sep="-")
        cells = [{name: str(value) for name, value in row.items()} for row in rows]
        for line in layout(cells, left=left):
            terminal.write_line(line)


def recorded(terminal: pytest.TerminalReporter, name: str) -> list[dict[str, object]]:
    """What tests have recorded under that name with `record_property`."""
    reports = [report for outcome in ("passed", "failed") for report in terminal.stats.get(outcome, [])]
    said = [each for report in reports for each in getattr(report, "user_properties", ())]
    return [value for key, value in said if key == name]
