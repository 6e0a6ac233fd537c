"""CUDA ranks run on the cores of their GPU's NUMA node."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from shardmark.ranks import nvml, process_setup, rank
from tests.support.fake_nvml import HEALTHY, FakeGpu, install

ADDRESS = "0000:1b:00.0"


@pytest.mark.parametrize(
    ("text", "cores"), [("0-2,8-9\n", {0, 1, 2, 8, 9}), ("3\n", {3}), ("\n", set()), ("none\n", set())]
)
def test_linuxs_list_of_cores_is_read(text: str, cores: set[int], tmp_path: Path) -> None:
    (tmp_path / ADDRESS).mkdir()
    (tmp_path / ADDRESS / "local_cpulist").write_text(text)
    assert process_setup._cores_near(ADDRESS, tmp_path) == cores
    assert process_setup._cores_near("0000:43:00.0", tmp_path) == process_setup._cores_near(None, tmp_path) == set()


def bound(monkeypatch: pytest.MonkeyPatch, own: set[int], near: set[int], threads: int) -> tuple[list[set[int]], int]:
    """The sets of cores that the process's threads are bound to, and its number of threads."""
    sets: list[set[int]] = []
    number = [threads]
    monkeypatch.setattr(process_setup, "pci_address", lambda device: ADDRESS)
    monkeypatch.setattr(process_setup, "_cores_near", lambda address: near if address == ADDRESS else set())
    monkeypatch.setattr(os, "sched_getaffinity", lambda thread: own)
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: sets.append(set(cores)))
    monkeypatch.setattr(torch, "get_num_threads", lambda: number[-1])
    monkeypatch.setattr(torch, "set_num_threads", number.append)
    process_setup.bind_near_gpu(0)
    return sets, number[-1]


def test_a_rank_takes_the_cores_of_its_gpus_node_and_no_more_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = len(os.listdir("/proc/self/task"))
    sets, number = bound(monkeypatch, set(range(64)), {32, 33, 34}, threads=8)
    assert {32, 33, 34} in sets and all(each == {32, 33, 34} for each in sets) and len(sets) >= threads
    assert number == 3


def test_a_users_narrower_choice_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    sets, number = bound(monkeypatch, {1, 2, 40}, {0, 1, 2, 3}, threads=1)
    assert sets and all(each == {1, 2} for each in sets) and number == 1


@pytest.mark.parametrize(("own", "near"), [({40, 41}, {0, 1}), ({0, 1}, set())], ids=["cores elsewhere", "not known"])
def test_nothing_changes_without_a_core_that_is_near(
    own: set[int], near: set[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bound(monkeypatch, own, near, threads=8) == ([], 8)


def test_a_rank_binds_itself_before_it_takes_its_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads that CUDA and the group start later inherit the cores."""
    done: list[str] = []
    for name in ("keep_compiled_code_apart", "keep_freed_memory", "let_segments_grow"):
        monkeypatch.setattr(process_setup, name, lambda: None)
    monkeypatch.setattr(process_setup, "bind_near_gpu", lambda device: done.append(f"near {device}"))
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: done.append(f"take {device.index}"))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    monkeypatch.setattr(rank.Messages, "count", lambda: None)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: done.append(backend))
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "0")
    rank.join_group(dist.HashStore(), 2, 8, "cuda", local_rank=2, threads=4)
    rank.join_group(dist.HashStore(), 0, 2, "cpu", local_rank=0, threads=1)
    assert done == ["near 2", "take 2", "nccl", "gloo"]


@pytest.mark.parametrize("buses", [True, False], ids=["PyTorch knows it", "NVML knows it"])
def test_the_address_of_a_gpu_is_linuxs(buses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeGpu(0x43), FakeGpu(0x1B, dict(HEALTHY)), buses=buses)
    assert nvml.pci_address(1) == ADDRESS
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.pci_address(1) == (ADDRESS if buses else None)
