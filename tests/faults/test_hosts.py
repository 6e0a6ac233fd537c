"""torchrun on two hosts: rank 0 reports for both; where one is gone, the run ends soon, says so, and keeps its rows."""

import json
import re
import time
from pathlib import Path

import pytest

from correctness.support.paths import ROOT
from correctness.support.waiting import wait_until
from tests.support.hosts import Launch, two_hosts
from tests.support.links import makes_links
from tests.support.runs import numbers, project

pytestmark = [pytest.mark.sweep, makes_links]

SOON = 40.0
"""Seconds: 20 of silence, and what torchrun itself takes to end."""

WAITS = """
import time
import torch
import torch.distributed as dist
from test_costs import test_row  # its rows first

def wait_for_ever(meets):
    while True:
        time.sleep(0.1)
        if meets:
            dist.all_reduce(torch.ones(1))

def test_world(worlds):
    print("\\nall there", flush=True)
    worlds(4).run(wait_for_ever, True)

def test_that_would_have_met_it(worlds):
    worlds(4).run(print)
"""


def kill_in_the_middle(launches: list[Launch], which: int, cut: bool, folder: Path) -> tuple[str, float]:
    """End that host once all rows are there; what the other one printed, and how long it took to end."""
    assert wait_until(lambda: (folder / "out.json").exists() and numbers(folder / "out.json") == [0, 1, 2], 100)
    time.sleep(2)  # by now they are in the call that never ends
    launches[which].kill(cut)
    began = time.monotonic()
    return launches[1 - which].ends(), time.monotonic() - began


def test_rank_0_reports_what_four_ranks_on_two_hosts_measure(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    arguments = [
        "perf/test_data_parallel.py",
        "-k",
        "bucketed and not sweep",
        "--scale=smoke",
        f"--benchmark-json={file}",
    ]
    with two_hosts(ROOT, *arguments) as launches:
        first, second = (launch.ends() for launch in launches)
    rows = json.loads(file.read_text())["benchmarks"]
    assert rows and {row["extra_info"]["world_size"] for row in rows} == {4}
    assert {row["extra_info"]["verdict"] for row in rows} <= {"pass", "undecided"}
    assert f" {len(rows)} passed" in first and f"{len(rows)} rows at smoke scale on 4 ranks: " in first
    assert "passed" not in second and launches[0].process.returncode == launches[1].process.returncode == 0


@pytest.mark.parametrize("cut", [True, False], ids=["without_power", "killed"])
def test_a_host_that_is_gone_costs_no_row_and_one_line_names_it(cut: bool, tmp_path: Path) -> None:
    project(tmp_path, test_waits=WAITS)
    with two_hosts(tmp_path, "-vv", "--benchmark-json=out.json", "test_waits.py") as launches:
        output, seconds = kill_in_the_middle(launches, 1, cut, tmp_path)
    assert seconds < SOON, output
    assert numbers(tmp_path / "out.json") == [0, 1, 2] and "case 0 " in output and "1 failed, 3 passed" in output
    line = r"^!+ Interrupted: rank [23] of 4 on \S+ has not been heard of for 20 s: has its host stopped, .* down\? !+$"
    assert len(re.findall(line, output, re.M)) == 1 and "SIGABRT" not in output, output


@pytest.mark.parametrize("cut", [True, False], ids=["without_power", "killed"])
def test_without_the_first_host_the_other_ends_and_says_why(cut: bool, tmp_path: Path) -> None:
    project(tmp_path, test_waits=WAITS)
    with two_hosts(tmp_path, "-vv", "--benchmark-json=out.json", "test_waits.py") as launches:
        output, seconds = kill_in_the_middle(launches, 0, cut, tmp_path)
    assert seconds < SOON, output
    assert numbers(tmp_path / "out.json") == [0, 1, 2]
    assert re.search(r"^shardmark: rank [23] ends, as torchrun's store at 10\.64\.0\.1:29500 has ", output, re.M), (
        output
    )


def test_without_a_key_each_host_says_what_to_set(tmp_path: Path) -> None:
    project(tmp_path)
    with two_hosts(tmp_path, SHARDMARK_KEY=None) as launches:
        for launch in launches:
            assert "set SHARDMARK_KEY to the same on each" in launch.ends()
