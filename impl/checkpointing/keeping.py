"""Selective checkpointing: a forward pass that keeps the outputs of some operators, and a recomputation that uses them.

PyTorch's own counts the calls of every operator, and refuses a recomputation with one more, as where autocast had cast
a weight before the block began (pytorch/pytorch#193338). This one counts those that it keeps. Compiled code is left to
PyTorch's, whose compiler reads the policy.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

Keeps = Callable[[Any], bool]
"""Whether an operator's outputs are kept."""
Kept = deque[tuple[Any, list[int]]]
"""Outputs in the order of the calls, with the versions of their tensors: how often each had been written to."""


def contexts(keeps: Keeps) -> tuple[Any, Any]:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint`: contexts of the forward pass and its recomputation."""
    if torch.compiler.is_compiling():
        return create_selective_checkpoint_contexts(partial(_policy, keeps))
    kept: Kept = deque()
    return _Keeping(keeps, kept), _Using(keeps, kept)


def _policy(keeps: Keeps, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if keeps(operator) else CheckpointPolicy.PREFER_RECOMPUTE


class _Mode(TorchDispatchMode):
    def __init__(self, keeps: Keeps, kept: Kept) -> None:
        super().__init__()
        self.keeps, self.kept = keeps, kept


class _Keeping(_Mode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if self.keeps(func):
            detached = tree_map_only(Tensor, Tensor.detach, out)
            self.kept.append((detached, _versions(detached)))
        return out


class _Using(_Mode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.keeps(func):
            return func(*args, **(kwargs or {}))
        if not self.kept:
            raise RuntimeError(f"{func} is called once more than in forward: a second backward, or another program")
        out, versions = self.kept.popleft()
        if _versions(out) != versions:
            raise RuntimeError(f"an output of {func} was changed in place: it is kept for backward")
        return out


def _versions(out: Any) -> list[int]:
    return [each._version for each in tree_leaves(out) if isinstance(each, Tensor)]
