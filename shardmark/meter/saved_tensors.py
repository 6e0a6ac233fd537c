"""Bytes that autograd keeps for backward, as its hooks see them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from shardmark.api.workload import Workload
from shardmark.meter.trace import modules_of


class _ForwardEndedError(Exception):
    """The step has marked the end of forward."""


class _Saved:
    """Stands in for a saved tensor in the graph."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def saved_bytes(workload: Workload) -> int | None:
    """Bytes that autograd keeps at the end of forward: at the mark "forward", or when backward first asks for a tensor.

    Backward does not run after the mark: under hooks it would get a parameter's tensor at the time of saving, though
    FSDP may have replaced it.
    """
    own = [StorageWeakRef(storage) for tensor in _own_tensors(workload) for storage in _storages(tensor)]
    packed: list[weakref.ref[_Saved]] = []
    found: list[int] = []

    def pack(tensor: Tensor) -> _Saved:
        saved = _Saved(tensor.detach())  # a node that saves its own output would keep itself alive
        packed.append(weakref.ref(saved))
        return saved

    def unpack(saved: _Saved) -> Tensor:
        weigh()
        return saved.tensor

    def weigh() -> None:
        if not found:
            known = {reference.cdata for reference in own}
            kept = [saved.tensor for reference in packed if (saved := reference()) is not None]
            storages = {storage._cdata: storage for tensor in kept for storage in _storages(tensor)}
            found.append(sum(each.nbytes() for address, each in storages.items() if address not in known))

    def mark(part: str) -> None:
        if part == "forward":
            weigh()
            raise _ForwardEndedError

    with saved_tensors_hooks(pack, unpack), suppress(_ForwardEndedError):
        workload.prepare()
        workload.step(mark)
        weigh()
    return found[0] if packed else None


def _own_tensors(workload: Workload) -> Iterator[Tensor]:
    module = modules_of(workload)
    yield from module.parameters()
    yield from module.buffers()
    yield from (leaf for leaf in tree_leaves(vars(workload)) if isinstance(leaf, Tensor))


def _storages(tensor: Tensor) -> Iterator[torch.UntypedStorage]:
    """The tensor's storage; for a tensor made of others, such as a DTensor, theirs."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor.untyped_storage()
        return
    names, _ = tensor.__tensor_flatten__()
    for part in (getattr(tensor, name) for name in names):
        if isinstance(part, Tensor):  # a DTensor's mesh is a part, too
            yield from _storages(part)
