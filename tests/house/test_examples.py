"""The files of examples/ do what they say."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from correctness.support.paths import ROOT
from tests.support.runs import environment_of_a_run, torchrun

EXAMPLES = ROOT / "examples"
RIGHT = (
    "attention=examples/flash_attention.py:FlashAttention",
    "data_parallel=examples/ddp.py:DDP",
    "sharded_optimizer=examples/sharded_optimizer.py:ShardedOptimizer",
    "fsdp=examples/fsdp.py:FSDP",
)
WRONG = "attention=examples/flash_attention_wrong.py:attention"
_OF_A_FAMILY = (
    "keys_up_to_its_own and three",
    "none_is_lost_of_any_number and keys",
    "are_the_average_over",
    "any_history",
    "one_step_applies_the_mean",
)
TELLING = ["-k", " or ".join(f"({each})" for each in _OF_A_FAMILY)]
"""Selects a test or two of each family, for a run of seconds."""

extent = pytest.mark.parametrize("selection", [[], TELLING], ids=["in_full", "in_brief"])


def pytest_says(folder: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output of a run in a process of its own; in this one our conftest is loaded already."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n0", "-q", "--device=cpu", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment_of_a_run(), capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.sweep
@extent
def test_each_technique_in_one_file_is_right(selection: list[str]) -> None:
    status, output = pytest_says(ROOT, "correctness", *selection, *(f"--impl={target}" for target in RIGHT))
    verdict = r"is not judged: \d+ of \d+ contract checks were run, all" if selection else "is right:"
    verdicts = re.findall(rf"^(\w+)=\w+ {verdict} \d+", output, re.M)
    assert (status, verdicts) == (6 if selection else 0, [target.partition("=")[0] for target in RIGHT]), output


@pytest.mark.sweep
def test_a_model_that_is_cut_and_sharded_is_right() -> None:
    own = "examples/parallelize.py"
    status, output = pytest_says(ROOT, "correctness", f"--model={own}:make", f"--impl=mesh={own}:parallelize")
    assert status == 0 and "mesh=parallelize is right: 3 of 3 contract checks passed" in output, output


@pytest.mark.sweep
@extent
def test_the_wrong_one_is_wrong_only_where_keys_take_several_tiles(selection: list[str]) -> None:
    status, output = pytest_says(ROOT, "correctness/attention", "-vv", *selection, f"--impl={WRONG}")
    assert status == 1 and "\nattention=attention is WRONG: " in output, output
    short = re.findall(r"keys_up_to_its_own\[attention-three-\S+ (\w+)", output)
    long = re.findall(r"none_is_lost_of_any_number\[100-attention-keys\] (PASSED|FAILED)", output)
    assert {*short} == {"PASSED"} and long == ["FAILED"], output


@pytest.mark.sweep
def test_a_teams_own_repository_passes(tmp_path: Path) -> None:
    arguments = ["--scale=smoke", "--budgets=budgets.toml", "--benchmark-max-time=0.02"]
    out = tmp_path / "out.json"
    status, output = pytest_says(
        EXAMPLES / "team", "-p", "shardmark.plugin", "tests", "perf", *arguments, f"--benchmark-json={out}"
    )
    said = " ".join(output.split())  # lines are wrapped
    assert status == 0 and re.search(r"- (What \S.*\? )?In_micro_batches takes \d", said), output
    assert "2 rows at smoke scale" in said, output


@pytest.mark.parametrize("name", ["shardmark.sbatch", "pytorchjob.yaml"])
def test_a_clusters_command_is_the_one_that_two_hosts_are_tried_with(name: str) -> None:
    text = (EXAMPLES / "cluster" / name).read_text()
    hosts = (ROOT / "tests" / "support" / "hosts.py").read_text()
    called = re.search(r"= torchrun\((.*)\)", hosts)
    assert called is not None
    tried = set(re.findall(r"--[a-z-]+", f"{called[1]} {torchrun()}")) - {"--no-python"}
    options = re.search(r"torchrun (--nnodes.*?)-m pytest perf", text, re.DOTALL)
    assert options is not None
    assert set(re.findall(r"--[a-z-]+", options[1])) == tried
    assert all(word in text for word in ("SHARDMARK_KEY", "GLOO_SOCKET_IFNAME"))
