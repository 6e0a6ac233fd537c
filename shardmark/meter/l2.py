"""The L2 cache of a GPU, and how a step finds it cold."""

from __future__ import annotations

import torch


def l2_bytes(device: str) -> int:
    """Bytes of the current GPU's L2 cache; 0 on CPU, whose caches are left as they are."""
    return int(torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size) if device == "cuda" else 0


def flush_l2(device: str) -> None:
    """Write twice as many bytes as the L2 cache has, so that the next step reads its tensors from memory."""
    if nbytes := l2_bytes(device):
        torch.empty(2 * nbytes, dtype=torch.int8, device=device).zero_()
