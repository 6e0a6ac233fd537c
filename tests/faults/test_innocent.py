"""An innocent test is not blamed for what others have left on its ranks, and a guilty one still is."""

import re
from pathlib import Path

import pytest

from tests.support.runs import CONFTEST, forked, project

PAIRS = """
import os, subprocess, sys, time
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from shardmark.api.registry import Family, add_family, register

left = []  # what a rank's own modules hold, nobody can compare


class Contract: ...


add_family(Family("naps", Contract, reference="short", check=lambda target, device: None))
for name in ("short", "long"):
    register("naps", name, None)


def leave():
    left.append(1)


def work():
    assert not left, "left there"


def wait():
    if left and dist.get_rank() == 1:
        time.sleep(1000)
    dist.barrier()


def use_freed_memory():
    if left and dist.get_rank() == 1:
        os.write(2, b"malloc(): unaligned tcache chunk detected\\n")
        os.abort()


def spin():
    subprocess.Popen([sys.executable, "-c", "while True: pass"])


def always_fail():
    raise LookupError("its own fault")


def test_leaves(worlds):
    worlds(2).run(leave)

def test_works(worlds):
    worlds(2).run(work)

def test_waits(worlds):
    worlds(2).run(wait, deadline=1)

def test_fails(worlds):
    worlds(2).run(always_fail)

def test_spins(worlds):
    worlds(2).run(spin)
    time.sleep(0.1)

def test_after_it(worlds):
    worlds(2).run(os.getpid)

@pytest.fixture
def set_up(worlds):
    worlds(2).run(work)

def test_in_its_setup(set_up): ...

@pytest.mark.family("naps")
def test_leaves_by_implementation(implementation, worlds):
    worlds(2).run(leave)

@pytest.mark.family("naps")
def test_works_by_implementation(implementation, worlds):
    worlds(2).run(work)

@pytest.mark.family("naps")
def test_uses_freed_memory_by_implementation(implementation, worlds):
    worlds(2).run(use_freed_memory)
"""


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    return project(tmp_path, test_pairs=PAIRS)


def ids(*names: str) -> list[str]:
    return [f"test_pairs.py::test_{name}" for name in names]


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("works", r"rank \d of 2 raised AssertionError: left there"),
        pytest.param("waits", r"rank 1 of 2 had not answered .* it was in wait ", marks=pytest.mark.sweep),
        pytest.param("in_its_setup", r"rank \d of 2 raised AssertionError: left there", marks=pytest.mark.sweep),
    ],
)
def test_what_nobody_can_compare_is_told_and_costs_the_next_test_nothing(name: str, line: str, pairs: Path) -> None:
    ended = forked(pairs, *ids("leaves", name))
    assert ended.status == 0 and "2 passed" in ended.output
    (told,) = ended.lines("passes on new ranks, and had failed on those that 1 test had used")
    assert f"LeftBehind: test_pairs.py::test_{name} passes" in told
    assert re.search(f"the last of them test_pairs.py::test_leaves: {line}", told)


def test_a_failure_of_its_own_stays_and_is_told_once(pairs: Path) -> None:
    ended = forked(pairs, *ids("leaves", "fails", "works"))
    assert ended.status == 1 and "1 failed, 2 passed" in ended.output  # and the third has new ranks
    assert len(ended.lines("FAILED test_pairs.py::test_fails")) == 1 and "LeftBehind" not in ended.output


def test_tests_of_one_implementation_may_trip_over_what_it_has_left_itself(pairs: Path) -> None:
    """The implementation may fail then: with a second wrapper, or in a second step."""
    own = ids("leaves_by_implementation[short]", "works_by_implementation[short]")
    assert "1 failed, 1 passed" in forked(pairs, *own).output
    others = ids("leaves_by_implementation[long]", "works_by_implementation[short]")
    ended = forked(pairs, *others)
    assert ended.status == 0 and ended.lines("test_works_by_implementation[short] passes on new ranks")


def test_a_corrupted_heap_may_be_the_doing_of_any_call_before(pairs: Path) -> None:
    ended = forked(pairs, *ids("leaves_by_implementation[short]", "uses_freed_memory_by_implementation[short]"))
    assert ended.status == 0 and "2 passed" in ended.output
    (told,) = ended.lines("passes on new ranks")
    assert "rank 1 of 2 was killed by SIGABRT: malloc(): unaligned tcache chunk detected" in told


def test_processes_left_spinning_end_before_the_next_test(pairs: Path) -> None:
    ended = forked(pairs, *ids("spins", "after_it"))
    assert ended.status == 0 and "2 passed" in ended.output
    (told,) = ended.lines("a process or a thread at work")
    assert "spin left on rank 0, 1: " in told and "of test_pairs.py::test_spins or of a test before it" in told


TWICE = """
from _pytest.runner import runtestprotocol


def pytest_runtest_protocol(item, nextitem):
    for _ in range(2):  # as pytest-rerunfailures does
        for report in runtestprotocol(item, nextitem=nextitem, log=False):
            item.ihook.pytest_runtest_logreport(report=report)
    return True
"""


def test_a_test_that_another_plugin_runs_twice_has_one_row(tmp_path: Path) -> None:
    project(tmp_path, conftest=CONFTEST + TWICE)
    ended = forked(tmp_path, "-k", "row", "--benchmark-json=out.json")
    assert ended.status == 0 and "6 passed" in ended.output and ended.rows() == [0, 1, 2]


SKIPS = """
import pytest
import torch.distributed as dist

def skip():
    pytest.skip("no such thing here")

def skip_on_rank_1():
    if dist.get_rank() == 1:
        skip()

def skip_and_fail():
    if dist.get_rank() == 1:
        skip()
    raise LookupError("no such shard")

@pytest.mark.parametrize("function", [skip, skip_on_rank_1, skip_and_fail])
def test_skips(function, worlds):
    worlds(2).run(function)
"""


def test_a_rank_may_skip_its_test_unless_another_one_fails(tmp_path: Path) -> None:
    ended = forked(project(tmp_path, test_skips=SKIPS), "test_skips.py", "-rs")
    assert "1 failed, 2 skipped" in ended.output and ended.lines("no such thing here")
