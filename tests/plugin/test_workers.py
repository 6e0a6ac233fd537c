"""Which runs of the tests are shared among processes; how a rank shares the cores and ends a call on its GPU."""

import os
import pickle
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from threading import Event
from typing import Any, cast

import pytest
import torch

from correctness.support import workers
from correctness.support.paths import ROOT
from correctness.support.workers import share_the_cores
from shardmark.ranks import gpus, rank
from shardmark.ranks.process_setup import let_segments_grow
from shardmark.ranks.rank import Answer, perform, pickled_call, threads_of_a_rank


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Any:
    """`shared(*arguments, cores=2, **options)` is how many workers a run with those has, and how they share it."""
    for name in ("PYTEST_XDIST_WORKER", "PYTEST_XDIST_WORKER_COUNT", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def run(*arguments: str, cores: int = 2, **options: Any) -> tuple[int | None, str]:
        monkeypatch.setattr(workers, "available_cores", lambda: cores)
        given = {"numprocesses": None, "tx": [], "dist": "no", "usepdb": False, "trace": False, "collectonly": False}
        option = Namespace(**(given | {"capture": "fd", "device": "auto"} | options))
        share_the_cores(Namespace(option=option, args=arguments, invocation_params=Namespace(dir=ROOT)))
        return option.numprocesses, option.dist

    return run


def test_a_whole_folder_has_a_worker_per_core(shared: Any) -> None:
    assert shared("correctness") == (2, "worksteal")
    assert shared("./correctness/", cores=64) == (workers.MOST_WORKERS, "worksteal")
    assert shared("correctness", dist="loadfile") == (2, "loadfile")


@pytest.mark.parametrize(
    "arguments", [("perf",), ("correctness", "perf"), (".",), ("correctness/test_x.py",), ("correctness/x.py::y",)]
)
def test_what_is_measured_and_single_files_run_in_this_process(arguments: tuple[str, ...], shared: Any) -> None:
    assert shared(*arguments) == (None, "no")


def test_beside_a_gpu_the_cores_are_shared_for_the_cpu_alone(shared: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert shared("correctness") == shared("correctness", device="cuda") == (None, "no")
    assert shared("correctness", device="cpu") == (2, "worksteal")


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


def answer_of(function: Callable[[], None]) -> Answer:
    return cast(Answer, pickle.loads(perform(pickled_call(function, ()))))


def do_nothing() -> None: ...


def raise_an_error() -> None:
    raise LookupError("no such shard")


def end(error: str = "") -> None:
    if error:
        raise RuntimeError(error)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A GPU that behaves as the test says when something waits for it."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", end)
    return monkeypatch


def test_a_call_lasts_until_its_gpu_is_done_whose_errors_are_the_calls_own(gpu: pytest.MonkeyPatch) -> None:
    waits: list[None] = []
    gpu.setattr(torch.cuda, "synchronize", lambda: waits.append(None))
    answer = answer_of(do_nothing)
    assert waits and answer.failure is None and answer.broken is None
    gpu.setattr(torch.cuda, "synchronize", partial(end, "CUDA error: device-side assert triggered\nCompile with"))
    answer = answer_of(do_nothing)
    assert answer.failure is not None and "raised RuntimeError: CUDA error: device-side assert" in answer.failure[0]
    assert answer.broken == "an error on its GPU (CUDA error: device-side assert triggered)"


def test_a_failed_call_is_told_of_though_its_gpu_waits_for_other_ranks(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(gpus, "AT_REST", 0.01)
    assert answer_of(raise_an_error).broken is None
    others = Event()
    gpu.setattr(torch.cuda, "synchronize", others.wait)
    answer = answer_of(raise_an_error)
    others.set()
    assert answer.failure is not None and "no such shard" in answer.failure[0]
    assert answer.broken == "work on its GPU that does not end"
