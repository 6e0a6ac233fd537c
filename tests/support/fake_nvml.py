"""NVIDIA's module `pynvml` as a plain object, and CUDA's devices beside it: no GPU is needed."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

PER_SECOND = 10**9
"""Nanoseconds."""


class NVMLError(Exception):
    pass


class NotSupported(NVMLError):
    pass


@dataclass
class FakeGpu:
    """A GPU with its answers by the end of the function's name; it does not support any other."""

    bus: int = 0x1B
    answers: dict[str, Any] = field(default_factory=dict)

    @property
    def bus_id(self) -> str:
        return f"00000000:{self.bus:02X}:00.0"


HEALTHY = {
    "CurrentClocksEventReasons": 0,
    "ClockInfo": lambda kind: {1: 1980, 2: 2619}[kind],
    "Temperature": lambda sensor: 61,
    "PowerUsage": 500_000,
    "TotalEnergyConsumption": 7_000,
    "ViolationStatus": lambda policy: SimpleNamespace(violationTime=0),
    "MigMode": [0, 0],
    "EccMode": [1, 1],
}


def install(monkeypatch: pytest.MonkeyPatch, *gpus: FakeGpu, loads: bool = True, buses: bool = True) -> None:
    """Let `import pynvml` find these GPUs, and CUDA have as many; NVML may not load, or PyTorch not know PCI's."""
    nvml: Any = ModuleType("pynvml")
    nvml.NVMLError = NVMLError
    nvml.NVML_CLOCK_SM, nvml.NVML_CLOCK_MEM, nvml.NVML_TEMPERATURE_GPU = 1, 2, 0
    nvml.NVML_PERF_POLICY_POWER, nvml.NVML_PERF_POLICY_THERMAL, nvml.NVML_DEVICE_MIG_ENABLE = 0, 1, 1
    nvml.NVML_P2P_CAPS_INDEX_NVLINK, nvml.NVML_P2P_STATUS_OK, nvml.NVML_NVLINK_MAX_LINKS = 2, 0, 18

    def init() -> None:
        if not loads:
            raise NVMLError("NVML shared library not found")

    def by_address(address: str) -> FakeGpu:
        return _only(gpu for gpu in gpus if gpu.bus_id.lower().endswith(address))

    def by_uuid(uuid: str) -> Any:
        return _only(gpu for gpu in gpus if uuid == gpu.answers.get("UUID", f"GPU-{gpu.bus}"))

    nvml.nvmlInit, nvml.nvmlDeviceGetHandleByPciBusId, nvml.nvmlDeviceGetHandleByUUID = init, by_address, by_uuid
    nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle = lambda instance: instance.answers["parent"]
    nvml.nvmlDeviceGetPciInfo = lambda gpu: SimpleNamespace(busId=gpu.bus_id)
    for name in {name for gpu in gpus for name in gpu.answers} | HEALTHY.keys():
        setattr(nvml, f"nvmlDeviceGet{name}", _answer(name))
    monkeypatch.setitem(sys.modules, "pynvml", nvml)

    def properties(device: int) -> SimpleNamespace:
        gpu = gpus[device]
        known = {"pci_domain_id": 0, "pci_bus_id": gpu.bus, "pci_device_id": 0} if buses else {}
        return SimpleNamespace(uuid=str(gpu.bus), **known)

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(gpus))


def _only(found: Any) -> Any:
    for each in found:
        return each
    raise NVMLError("Not Found")


def _answer(name: str) -> Any:
    def answer(gpu: FakeGpu, *arguments: Any) -> Any:
        if name not in gpu.answers:
            raise NotSupported("Not Supported")
        value = gpu.answers[name]
        return value(*arguments) if callable(value) else value

    return answer
