"""The compiler as a new machine has it, so that what a compile costs can be told.

with cold_compiler():
    step()  # compiles, whatever was compiled before
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch


@contextmanager
def cold_compiler(device: str) -> Iterator[None]:
    """What is compiled within is compiled from nothing: neither Dynamo nor the files of another run remember it.

    That the compiler itself is loaded first takes seconds, once in a process.
    """
    from torch._inductor.utils import fresh_cache

    _load_compiler(device)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with fresh_cache():
        yield


def has_compiled() -> bool:
    """Whether anything was compiled since the compiler was made cold."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@cache
def _load_compiler(device: str) -> None:
    torch.compile(lambda x: x + 1)(torch.ones(1, device=device))
