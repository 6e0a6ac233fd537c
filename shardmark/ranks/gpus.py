"""NVIDIA's driver and devices: why PyTorch cannot use them, or a rank its GPU no longer."""

from __future__ import annotations

import os
import re
import subprocess
import threading
from contextlib import suppress
from pathlib import Path

import torch

from shardmark.api.finding import first_line

KERNEL_MODULE = Path("/proc/driver/nvidia/version")
"""Written by the driver; seen in a container too, to which the devices may not be given."""
DEVICES = Path("/dev")
"""The folder of the devices nvidia0, nvidia1, ..."""
AT_REST = 0.5
"""Seconds that a GPU gets to finish the work of a failed call: less than other ranks get to answer."""


def driver_version() -> str | None:
    """The version of NVIDIA's driver, such as "580.95.05"; None without one."""
    with suppress(OSError):
        if found := re.search(r"Kernel Module +(?:for \S+ +)?(\d[\d.]*)", KERNEL_MODULE.read_text()):
            return found[1]
    return next(iter(_smi("--query-gpu=driver_version", "--format=csv,noheader")), None)


def has_device() -> bool:
    """Whether this machine, or this container, has an NVIDIA GPU, which CUDA_VISIBLE_DEVICES does not hide."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1", "NoDevFiles"):
        return False
    return any(DEVICES.glob("nvidia[0-9]*")) or bool(_smi("--list-gpus"))  # WSL has no such files


def device_at_hand() -> str:
    """Return "cuda" where PyTorch can use a GPU, "cpu" where there is none.

    Raises ValueError, in one line, for a GPU that PyTorch cannot use: whoever has one does not mean the CPU.
    """
    if torch.cuda.is_available():
        return "cuda"
    if has_device():
        hidden = "CUDA_VISIBLE_DEVICES= hides it, and then the CPU is measured"
        raise ValueError(f"torch cannot use this machine's GPU: {why_unusable()}; {hidden}")
    return "cpu"


def why_unusable() -> str:
    """Why PyTorch uses no GPU here, in one line: its build, the driver, and PyTorch's own words."""
    driver = driver_version()
    try:
        torch.cuda.init()  # raises what `is_available` only warns of, once in a process
        says = "nothing"
    except Exception as error:  # an AssertionError of a build without CUDA, a RuntimeError of the driver
        says = first_line(error)
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA"
    found = f"NVIDIA's driver is {driver}" if driver else "there is no NVIDIA driver"
    return f"torch {torch.__version__} is built {built}, {found}, and PyTorch says: {says}"


def unrest() -> str | None:
    """Why the GPU cannot take another call, if it cannot: an error on it stays until the process ends, and a collective
    that other ranks never begin does not end."""
    if not torch.cuda.is_initialized():
        return None
    errors: list[RuntimeError] = []

    def wait(device: int) -> None:
        try:
            torch.cuda.set_device(device)  # the current device is each thread's own
            torch.cuda.synchronize()
        except RuntimeError as error:
            errors.append(error)

    waiting = threading.Thread(target=wait, args=(torch.cuda.current_device(),), daemon=True)
    waiting.start()
    waiting.join(AT_REST)
    if waiting.is_alive():
        return "work on its GPU that does not end"
    return f"an error on its GPU ({first_line(errors[0])})" if errors else None


def _smi(*options: str) -> list[str]:
    """The lines that nvidia-smi prints; none where it does not work."""
    try:
        command = ["nvidia-smi", *options]
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in done.stdout.splitlines() if line]
