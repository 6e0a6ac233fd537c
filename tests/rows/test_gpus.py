"""GPUs and NVIDIA's libraries in `machine_info`, by fakes of NVML, of Linux's folders and of cuBLAS."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shardmark.rows import gpus
from shardmark.rows.machine import describe_machine
from tests.support.fake_nvml import HEALTHY, FakeGpu, install

ONE, OTHER, FAR = 0x1B, 0x43, 0xC1


def described(monkeypatch: pytest.MonkeyPatch, *fakes: FakeGpu, **options: bool) -> dict[str, Any]:
    install(monkeypatch, *fakes, **options)
    return gpus.describe_gpus()


def test_gpus_behind_a_switch_are_joined_by_all_links(monkeypatch: pytest.MonkeyPatch) -> None:
    switch = SimpleNamespace(busId="00000000:05:00.0")
    links = {"P2PStatus": lambda *_: 0, "NvLinkState": 1, "NvLinkRemotePciInfo": switch}
    found = described(monkeypatch, *(FakeGpu(bus, HEALTHY | links) for bus in (ONE, OTHER)))
    assert found["topology"] == {"0-1": "NV18"} and found["ecc"] == [True, True]


def test_links_to_a_third_gpu_do_not_count_and_pci_is_in_nvidias_words(monkeypatch: pytest.MonkeyPatch) -> None:
    ends = [FakeGpu(bus).bus_id for bus in (OTHER, OTHER, FAR, FAR, FAR)]
    near: dict[str, Any] = {
        "P2PStatus": lambda other, _: 0 if other.bus == OTHER else 5,
        "NvLinkState": lambda link: int(link < len(ends)),
        "NvLinkRemotePciInfo": lambda link: SimpleNamespace(busId=ends[link]),
        "TopologyCommonAncestor": lambda other: 50,
    }
    fakes = [FakeGpu(ONE, HEALTHY | near), FakeGpu(OTHER, {"TopologyCommonAncestor": 40}), FakeGpu(FAR)]
    found = described(monkeypatch, *fakes)
    assert found["topology"] == {"0-1": "NV2", "0-2": "SYS", "1-2": "NODE"}
    assert found["ecc"] == [True, None, None]


def test_without_nvml_topology_and_ecc_are_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    found = described(monkeypatch, FakeGpu(ONE), FakeGpu(OTHER), loads=False)
    assert found["topology"] == {"0-1": None} and found["ecc"] == [None, None]
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpus.describe_gpus() == found


def test_the_numa_node_is_linuxs(tmp_path: Path) -> None:
    for address, node in (("0000:1b:00.0", "1\n"), ("0000:43:00.0", "-1\n")):
        (tmp_path / address).mkdir()
        (tmp_path / address / "numa_node").write_text(node)
    assert gpus._numa_node("0000:1b:00.0", tmp_path) == 1
    assert gpus._numa_node("0000:43:00.0", tmp_path) is None  # one node alone
    assert gpus._numa_node("0000:05:00.0", tmp_path) is gpus._numa_node(None, tmp_path) is None


def test_cublas_says_its_own_version(monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    class Cublas:
        def __init__(self, name: str) -> None:
            names.append(name)

        @staticmethod
        def cublasGetProperty(kind: int, value: Any) -> int:
            value._obj.value = (13, 1, 0)[kind]
            return 0

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(ctypes, "CDLL", Cublas)
    assert gpus._cublas_version() == "13.1.0" and names == ["libcublas.so.13"]
    monkeypatch.setattr(Cublas, "cublasGetProperty", staticmethod(lambda kind, value: 1))
    assert gpus._cublas_version() is None


def test_cudnns_number_is_read_as_before_9_and_since() -> None:
    assert gpus._dotted(91002, 10_000) == "9.10.2" and gpus._dotted(8902, 10_000) == "8.9.2"
    assert gpus._dotted(None, 10_000) is None


def test_a_machine_without_gpus_asks_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardmark.rows.machine.describe_gpus", lambda: 1 / 0)
    assert "topology" not in describe_machine("cpu")
