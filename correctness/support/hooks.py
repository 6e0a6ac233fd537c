"""Hooks of pytest for correctness/conftest.py and tests/conftest.py, and the tables that they print at the end."""

import gc
import os
import random
from collections.abc import Iterator

import pytest
import torch

from correctness.support.interpreting import interpret_without_detours
from correctness.support.workers import share_the_cores
from shardmark.ranks.rank import threads_of_a_rank
from shardmark.ranks.world import World, available_ranks
from shardmark.text import layout


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Share whole folders among the cores; give the sweep a new random seed in each run."""
    if "sweep" in config.option.markexpr and config.option.seed == "0":
        config.option.seed = random.randrange(1, 2**32)
    share_the_cores(config)


def pytest_configure() -> None:
    """Give each worker of pytest-xdist its share of the cores; speed up Triton's interpreter."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(threads_of_a_rank(1))
    interpret_without_detours()


def pytest_collection_finish() -> None:
    """Exempt imported objects from garbage collection: each collection would spend 0.25 s on them."""
    gc.collect()
    gc.freeze()


def write_table(
    terminal: pytest.TerminalReporter, title: str, rows: list[dict[str, object]], left: tuple[str, ...]
) -> None:
    """Print `rows` under a title at the end of the run, the columns in `left` flush left; nothing without rows."""
    if rows:
        terminal.section(title, sep="-")
        cells = [{name: str(value) for name, value in row.items()} for row in rows]
        for line in layout(cells, left=left):
            terminal.write_line(line)


def recorded(terminal: pytest.TerminalReporter, name: str) -> list[dict[str, object]]:
    """Values that passed and failed tests gave `record_property` under that name."""
    reports = [report for outcome in ("passed", "failed") for report in terminal.stats.get(outcome, [])]
    properties = [each for report in reports for each in getattr(report, "user_properties", ())]
    return [value for key, value in properties if key == name]


@pytest.fixture
def pair(device: str) -> Iterator[World]:
    """A world of two ranks that the test may break."""
    if available_ranks(device) < 2:
        pytest.skip("needs two ranks")
    with World(2, device) as world:
        yield world
