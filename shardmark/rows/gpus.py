"""The GPUs of a machine, how they are joined, and the versions of NVIDIA's libraries, for a run's `machine_info`."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import Any

import torch

from shardmark.ranks.nvml import Device, pci_address

PATHS = {0: "same board", 10: "PIX", 20: "PXB", 30: "PHB", 40: "NODE", 50: "SYS"}
"""The farthest thing between two GPUs on PCI, as `nvidia-smi topo` abbreviates it: one PCI switch, several of them, the
processor's host bridge, several bridges of a NUMA node, the link between NUMA nodes."""


def describe_gpus() -> dict[str, Any]:
    """Fields of `machine_info` on CUDA, by CUDA's numbers of devices; what is not known is None.

    "topology" has each pair, such as "0-1", as NV and a number of NVLinks, or as in PATHS; "numa_nodes" and "ecc" have
    each device's NUMA node, and whether its memory corrects errors.
    """
    devices = range(torch.cuda.device_count())
    gpus = [Device.of(device) for device in devices]
    return {
        "nccl": _nccl_version(),
        "cudnn": _dotted(torch.backends.cudnn.version(), 10_000),
        "cublas": _cublas_version(),
        "topology": {f"{i}-{j}": _joined(gpus[i], gpus[j]) for i, j in combinations(devices, 2)},
        "numa_nodes": [_numa_node(pci_address(device)) for device in devices],
        "ecc": [_corrects_errors(gpu) for gpu in gpus],
    }


def _joined(one: Device | None, other: Device | None) -> str | None:
    if one is None or other is None:
        return None
    nvml = one.nvml
    if one.ask("P2PStatus", other.handle, nvml.NVML_P2P_CAPS_INDEX_NVLINK) == nvml.NVML_P2P_STATUS_OK:
        up = [link for link in range(nvml.NVML_NVLINK_MAX_LINKS) if one.ask("NvLinkState", link)]
        there = other.ask("PciInfo")
        ends = [one.ask("NvLinkRemotePciInfo", link) for link in up]
        direct = sum(there is not None and end is not None and end.busId == there.busId for end in ends)
        return f"NV{direct or len(up)}"  # through a switch all of them lead to each other GPU
    level = one.ask("TopologyCommonAncestor", other.handle)
    return None if level is None else PATHS.get(level, str(level))


def _corrects_errors(gpu: Device | None) -> bool | None:
    mode = None if gpu is None else gpu.ask("EccMode")  # [current, pending]
    return None if mode is None else bool(mode[0])


def _numa_node(address: str | None, devices: Path = Path("/sys/bus/pci/devices")) -> int | None:
    """Number of the NUMA node; None where Linux does not say, or has none (-1)."""
    with suppress(OSError, ValueError):
        node = int((devices / str(address) / "numa_node").read_text())
        return node if node >= 0 else None
    return None


def _nccl_version() -> str | None:
    try:
        return ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):  # PyTorch was built without it
        return None


def _cublas_version() -> str | None:
    """Version of the library that PyTorch has loaded, as it says itself: its package may be another."""
    try:
        cublas = ctypes.CDLL(f"libcublas.so.{str(torch.version.cuda).partition('.')[0]}")
        parts = [ctypes.c_int() for _ in range(3)]
        failed = [cublas.cublasGetProperty(kind, ctypes.byref(part)) for kind, part in enumerate(parts)]
    except (OSError, AttributeError):
        return None
    return None if any(failed) else ".".join(str(part.value) for part in parts)


def _dotted(version: int | None, major: int) -> str | None:
    """cuDNN's version: 91002 is 9.10.2, and before 9 it was 8902 for 8.9.2."""
    if version is None:
        return None
    major = major if version >= major else major // 10
    return f"{version // major}.{version % major // 100}.{version % 100}"
