"""The fake GPUs of `tox -e fake_gpu`: every process sees them, and none can use one."""

import subprocess
import sys
from pathlib import Path

import pytest

from correctness.support.paths import ROOT
from tests.support.runs import Fresh, environment_of_a_run, project

FAKE = str(ROOT / "tests" / "support" / "fake_gpu")
LOOK = """
import torch
print(torch.cuda.is_available(), torch.cuda.device_count(), torch.cuda.get_device_name(), torch.cuda.is_initialized())
try:
    torch.zeros(2, device="cuda")
except (AssertionError, RuntimeError) as error:
    print(error)
"""
IN_A_RUN = """
import torch

def devices():
    return torch.cuda.device_count()

def test_here(): assert devices() == 2

def test_on_ranks(worlds): assert worlds(1).run(devices) == [2]
"""


def looked(**environment: str) -> list[str]:
    command = [sys.executable, "-c", LOOK]
    given = {"PYTHONPATH": FAKE, "FAKE_GPUS": None, "CUDA_VISIBLE_DEVICES": None, **environment}
    done = subprocess.run(command, env=environment_of_a_run(**given), capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


def test_there_are_devices_and_work_on_one_is_an_error() -> None:
    error = "this GPU is a fake one, and runs nothing"
    assert looked(FAKE_GPUS="3") == ["True 3 Fake H100 False", error]
    assert looked(FAKE_GPUS="3", CUDA_VISIBLE_DEVICES="2,0") == ["True 2 Fake H100 False", error]
    assert looked(CUDA_VISIBLE_DEVICES="")[0] == "False 0 Fake H100 False"


def test_runs_that_tests_start_and_their_ranks_see_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", FAKE)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    run = Fresh(project(tmp_path, test_costs=IN_A_RUN)).run()
    assert run.status == 0 and run.lines("2 passed"), run.output
