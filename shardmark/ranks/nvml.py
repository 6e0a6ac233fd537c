"""NVIDIA's management library, NVML, through NVIDIA's own package for Python, nvidia-ml-py.

    gpu = Device.of(0)
    gpu and gpu.ask("PowerUsage")      # milliwatts; None where this GPU does not say

The package is imported when a GPU is first asked: machines without one do not need it. NVML API Reference Guide.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


def library() -> Any:
    """NVML's module, initialized; None if the package is not installed, or the library cannot be loaded."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()  # counted: a second call only counts
    except pynvml.NVMLError:  # no driver, a driver that does not match the library, no permission
        return None
    return pynvml


def pci_address(device: int) -> str | None:
    """CUDA device's address on the PCI bus as Linux writes it, "0000:1b:00.0"; None where it is not known."""
    properties: Any = torch.cuda.get_device_properties(device)
    if hasattr(properties, "pci_bus_id"):
        return f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    gpu = Device.of(device)
    found = None if gpu is None else gpu.ask("PciInfo")
    return None if found is None else str(found.busId).lower()[-len("0000:1b:00.0") :]


@dataclass(frozen=True)
class Device:
    """One GPU; that of the instance, where CUDA's device is an instance of a partitioned GPU (MIG)."""

    nvml: Any
    handle: Any

    @classmethod
    def of(cls, device: int) -> Device | None:
        """The GPU of CUDA's device of that number, which depends on CUDA_VISIBLE_DEVICES; None without NVML."""
        nvml = library()
        if nvml is None:
            return None
        properties: Any = torch.cuda.get_device_properties(device)
        if hasattr(properties, "pci_bus_id"):
            return cls._found(nvml, "ByPciBusId", str(pci_address(device)))
        uuid = str(properties.uuid)
        if (whole := cls._found(nvml, "ByUUID", f"GPU-{uuid}")) is not None:
            return whole
        instance = cls._found(nvml, "ByUUID", f"MIG-{uuid}")
        if instance is None:
            return None
        try:
            return cls(nvml, nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(instance.handle))
        except nvml.NVMLError:
            return None

    @classmethod
    def _found(cls, nvml: Any, how: str, name: str) -> Device | None:
        try:
            return cls(nvml, getattr(nvml, f"nvmlDeviceGetHandle{how}")(name))
        except nvml.NVMLError:
            return None

    def ask(self, what: str, *arguments: Any) -> Any:
        """Answer of `nvmlDeviceGet<what>`; None where this GPU, its driver or the package does not have it."""
        try:
            return getattr(self.nvml, f"nvmlDeviceGet{what}")(self.handle, *arguments)
        except (AttributeError, self.nvml.NVMLError):
            return None

    @property
    def is_shared(self) -> bool:
        """Whether the GPU is partitioned (MIG), so that others may compute on it too."""
        mode = self.ask("MigMode")  # [current, pending]
        return mode is not None and mode[0] == self.nvml.NVML_DEVICE_MIG_ENABLE
