"""Ranks of torchrun that die: the run ends with its rows, and one line names the rank."""

import re
import uuid
from pathlib import Path

import pytest

from correctness.support.waiting import wait_until
from tests.support.processes import running
from tests.support.runs import Fresh, project, torchrun

DIES = """
import os, signal
import torch.distributed as dist
from test_costs import test_row  # its rows first

def die(rank, name):
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.Signals[name])
    dist.barrier()

def test_world(worlds):
    worlds(2).run(die, int(os.environ["DYING"]), os.environ["SIGNAL"])

def test_that_would_have_met_it(worlds):
    worlds(2).run(print)
"""


@pytest.mark.sweep
@pytest.mark.parametrize(("rank", "name"), [(0, "SIGABRT"), (1, "SIGABRT"), (1, "SIGKILL")])
def test_a_rank_of_torchrun_that_dies_costs_no_row_and_one_line_names_it(rank: int, name: str, tmp_path: Path) -> None:
    project(tmp_path, test_dies=DIES)
    tag = uuid.uuid4().hex
    arguments = ["-vv", "--benchmark-json=out.json", "test_dies.py"]
    environment = {"DYING": str(rank), "SIGNAL": name, "RUN_TAG": tag}
    ended = Fresh(tmp_path, arguments, environment, below=torchrun("--standalone")).run()
    assert ended.status == 1 and ended.rows() == [0, 1, 2]
    assert f"({name})" in ended.output  # torchrun's own line; the only one where rank 0 is dead
    if rank:
        assert "case 0 " in ended.output and "1 failed, 3 passed" in ended.output
        line = "^!+ .*rank 1 of 2 has ended; torchrun's own output says how !+$"
        assert len(re.findall(line, ended.output, re.M)) == 1
    assert wait_until(lambda: not running(tag), 20)


HANGS = """
import os, time
import torch.distributed as dist

def hang_here():
    if dist.get_rank() == int(os.environ["HANGING"]):
        time.sleep(600)
    dist.barrier()

def test_world(worlds):
    worlds(2).run(hang_here, deadline=1)
"""


@pytest.mark.sweep
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_of_torchrun_that_hangs_shows_where(rank: int, tmp_path: Path) -> None:
    project(tmp_path, test_hangs=HANGS)
    ended = Fresh(tmp_path, ["test_hangs.py"], {"HANGING": str(rank)}, below=torchrun("--standalone")).run()
    assert ended.status == 1 and re.search(r"rank \d of 2 had not answered after 1\.\d s", ended.output)
    (line,) = (number for number, text in enumerate(HANGS.splitlines(), start=1) if "sleep" in text)
    assert re.search(rf'test_hangs\.py", line {line},? in hang_here', ended.output)  # by pytest or by that rank
    waiting = HANGS.splitlines().index("    dist.barrier()") + 1
    assert re.search(rf'test_hangs\.py", line {waiting},? in hang_here', ended.output)
