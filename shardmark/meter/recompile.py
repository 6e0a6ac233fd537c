"""A cold compiler, as on a new machine, to measure what compiling costs.

with cold_compiler():
    step()  # compiles, whatever was compiled before
"""

from __future__ import annotations

import gc
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import torch
import torch.distributed as dist

from shardmark.api.requirements import requires_compiler

CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
"""Environment variables of the folders of compiler files."""


@contextmanager
def cold_compiler(device: str) -> Iterator[None]:
    """Code in the block compiles from nothing: Dynamo forgets what it compiled, and the compiler's folder is empty.

    The compiler itself is loaded first, which takes seconds once in a process. The ranks of a host share the folder, as
    they share the usual one. Every rank calls this.
    """
    from torch._inductor.utils import fresh_cache

    _load_compiler(device)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    with fresh_cache(), _shared_files():
        yield


@contextmanager
def _shared_files() -> Iterator[None]:
    """Give all ranks of this host the first rank's folder of compiler files."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    mine = socket.gethostname(), {name: os.environ[name] for name in CACHES}
    everyone = [mine] * dist.get_world_size()
    dist.all_gather_object(everyone, mine)
    with patch.dict(os.environ, next(files for host, files in everyone if host == mine[0])):
        yield
    dist.barrier()  # the first rank deletes them


def has_compiled() -> bool:
    """Whether anything was compiled since `cold_compiler` began."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0


@cache
def _load_compiler(device: str) -> None:
    requires_compiler(device)  # which compiles
    gc.collect()
    gc.freeze()  # the compiler stays, and each collection would take a quarter of a second to look through it
