"""A test that leaves its GPU with an error ends its process; pytest-xdist goes on in another one."""

import os

import pytest

from correctness.support.paths import ROOT

pytest_plugins = ["pytester"]

SOURCE = """
import torch

def fail():
    raise RuntimeError("CUDA error: misaligned address\\nSearch for it in the guide")

def test_first():
    pass

def test_that_breaks_it():  # every call of CUDA fails from here on, until the process ends
    torch.cuda.is_initialized = lambda: True
    torch.cuda.synchronize = fail

def test_next():
    torch.cuda.is_initialized() and torch.cuda.synchronize()
"""


@pytest.fixture(autouse=True)
def _source(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT"):  # where these tests run in a worker themselves
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setenv("PYTEST_ADDOPTS", "-p no:cacheprovider -p shardmark.plugin.broken_gpu")
    pytester.makepyfile(SOURCE)


def test_the_tests_that_follow_are_not_run(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("-p", "no:xdist")
    result.assert_outcomes(passed=2)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert "test_that_breaks_it left its GPU with an error (CUDA error: misaligned address)" in result.stdout.str()


def test_a_worker_is_replaced_by_one_that_runs_them(pytester: pytest.Pytester) -> None:
    result = pytester.runpytest_subprocess("-n", "1")
    result.assert_outcomes(passed=3, failed=1)  # the one that broke it has passed before its worker ended
    result.stdout.fnmatch_lines(["*worker 'gw0' crashed while running '*::test_that_breaks_it'*"])
