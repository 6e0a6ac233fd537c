"""Which runs of the tests are shared among processes."""

from __future__ import annotations

import os
from argparse import Namespace
from typing import Any

import pytest
import torch

from correctness.support import workers
from correctness.support.workers import FOLDER, share_the_cores
from shardmark import rank
from shardmark.rank import let_segments_grow, threads_of_a_rank


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`shared(*arguments, cores=2, **options)` is how many workers a run with those has, and how they share it."""
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*arguments: str, cores: int = 2, **options: Any) -> tuple[int | None, str]:
        monkeypatch.setattr(workers, "available_cores", lambda: cores)
        given = {"numprocesses": None, "tx": [], "dist": "no", "usepdb": False, "trace": False, "collectonly": False}
        option = Namespace(**(given | {"capture": "fd"} | options))
        share_the_cores(Namespace(option=option, args=arguments, invocation_params=Namespace(dir=FOLDER.parent)))
        return option.numprocesses, option.dist

    return run


def test_a_whole_folder_has_a_worker_per_core(shared: Any) -> None:
    assert shared("correctness") == (2, "worksteal")
    assert shared("./correctness/", cores=64) == (workers.MOST_WORKERS, "worksteal")
    assert shared("correctness", dist="loadfile") == (2, "loadfile")


@pytest.mark.parametrize(
    "arguments",
    [("perf",), ("correctness", "perf"), (".",), ("correctness/test_x.py",), ("correctness/x.py::y",)],
)
def test_what_is_measured_and_single_files_run_in_this_process(arguments: tuple[str, ...], shared: Any) -> None:
    assert shared(*arguments) == (None, "no")


def test_one_core_and_whoever_wants_to_look_on_have_one_process(shared: Any) -> None:
    for options in ({"cores": 1}, {"usepdb": True}, {"trace": True}, {"capture": "no"}, {"collectonly": True}):
        assert shared("correctness", **options) == (None, "no")


@pytest.mark.parametrize("number", [0, 3])
def test_a_number_of_processes_that_is_given_counts(number: int, shared: Any) -> None:
    assert shared("correctness", numprocesses=number) == (number, "no")


def test_workers_and_torchruns_ranks_are_not_shared_again(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw0")
    assert shared("correctness") == (None, "no")
    monkeypatch.delenv("PYTEST_XDIST_WORKER")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    monkeypatch.setenv("RANK", "0")
    assert shared("correctness") == (None, "no")


@pytest.mark.parametrize(("workers", "ranks", "threads"), [(1, 1, 8), (1, 2, 4), (2, 2, 2), (2, 3, 1), (4, 8, 1)])
def test_ranks_of_all_workers_share_the_cores(
    workers: int, ranks: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "available_cores", lambda: 8)
    monkeypatch.setenv("PYTEST_XDIST_WORKER_COUNT", str(workers))
    assert threads_of_a_rank(ranks) == threads


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_segments_of_the_cuda_allocator_grow_unless_the_user_has_set_it_up(
    variable: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    let_segments_grow()
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == "expandable_segments:True"
    del os.environ["PYTORCH_CUDA_ALLOC_CONF"]
    os.environ[variable] = "max_split_size_mb:512"
    let_segments_grow()
    assert {name: os.environ[name] for name in os.environ if name.endswith("ALLOC_CONF")} == {
        variable: "max_split_size_mb:512"
    }
