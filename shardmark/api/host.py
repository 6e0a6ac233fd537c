"""Whether a device has memory of its own, from which tensors can be offloaded to the host's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

_device_types = {"cuda"}


def has_device_memory(device: torch.device) -> bool:
    """True if the device's memory is not the host's: an accelerator's, and a simulated one's."""
    return device.type in _device_types


def to_host(tensor: Tensor, non_blocking: bool = False) -> Tensor:
    """A copy in the host's memory. With `non_blocking` it is pinned, and has arrived once the current stream has."""
    return tensor.to(torch.device("cpu"), non_blocking=non_blocking)


@contextmanager
def counts_as_device_memory(device: str) -> Iterator[None]:
    """Let tensors of that type of device count as an accelerator's in the block."""
    added = {device} - _device_types
    _device_types.update(added)
    try:
        yield
    finally:
        _device_types.difference_update(added)
