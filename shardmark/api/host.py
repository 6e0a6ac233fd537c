"""Whether a device has memory of its own, from which tensors can be offloaded to the host's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

_apart = {"cuda"}


def has_device_memory(device: torch.device) -> bool:
    """True if the device's memory is not the host's: an accelerator's, and a simulated one's."""
    return device.type in _apart


@contextmanager
def memory_apart(device: str) -> Iterator[None]:
    """Let tensors of that type of device count as an accelerator's in the block."""
    added = {device} - _apart
    _apart.update(added)
    try:
        yield
    finally:
        _apart.difference_update(added)
