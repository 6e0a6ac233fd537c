"""Selective checkpointing: a forward pass that keeps the outputs of some operators, and a recomputation that uses them.

PyTorch's own counts the calls of every operator, and refuses a recomputation with one more, as where autocast had cast
a weight before the block began (pytorch/pytorch#193338); nor does it allow a second backward through a retained graph.
This one counts those that it keeps, by operator and by the shapes and dtypes of its arguments, and frees them in the
backward that frees the graph. Compiled code is left to PyTorch's, whose compiler reads the policy.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
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
Kept = defaultdict[Any, deque[tuple[Any, list[int]]]]
"""Outputs by call (`_call`), in their order, with the versions of their tensors: how often each had been written to."""


def contexts(keeps: Keeps) -> tuple[Any, Any]:
    """The `context_fn` of `torch.utils.checkpoint.checkpoint`: contexts of the forward pass and its recomputation."""
    if torch.compiler.is_compiling():
        return create_selective_checkpoint_contexts(partial(_policy, keeps))
    kept: Kept = defaultdict(deque)
    return _Keeping(keeps, kept), _Using(keeps, kept)


def _policy(keeps: Keeps, context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if keeps(operator) else CheckpointPolicy.PREFER_RECOMPUTE


class _Mode(TorchDispatchMode):
    def __init__(self, keeps: Keeps, kept: Kept) -> None:
        super().__init__()
        self.keeps, self.kept = keeps, kept

    def _copy_what_it_writes(self, func: Any, args: Any) -> None:
        """Copy kept outputs before the operator writes to them, as in `h = linear(x); h += x`. Versions would not tell
        where x has three dimensions: a linear layer then returns the product's memory, and no view of the product."""
        pairs = zip(func._schema.arguments, args, strict=False)
        written = {_memory(each) for argument, each in pairs if argument.is_write and isinstance(each, Tensor)}
        for kept in self.kept.values():
            for place, (out, _) in enumerate(kept):
                if written & {_memory(each) for each in tree_leaves(out) if isinstance(each, Tensor)}:
                    copy = tree_map_only(Tensor, Tensor.clone, out)
                    kept[place] = copy, _versions(copy)


class _Keeping(_Mode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self._copy_what_it_writes(func, args)
        out = func(*args, **(kwargs or {}))
        if self.keeps(func):
            # Below autograd a detached tensor would count versions of its own, and writes to the output be missed.
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                detached = tree_map_only(Tensor, Tensor.detach, out)
            self.kept[_call(func, args)].append((detached, _versions(detached)))
        return out


class _Using(_Mode):
    """Entered once for each recomputation."""

    def __enter__(self) -> Any:
        self.used: Counter[Any] = Counter()
        return super().__enter__()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable:
            self._copy_what_it_writes(func, args)
        if not self.keeps(func):
            return func(*args, **(kwargs or {}))
        call = _call(func, args)
        kept = self.kept[call]
        if self.used[call] == len(kept):
            raise RuntimeError(f"{func} is called once more than in forward: it is another program")
        if torch._C._autograd._get_current_graph_task_keep_graph():  # another backward may follow
            out, versions = kept[self.used[call]]
            self.used[call] += 1
        else:
            out, versions = kept.popleft()
        if _versions(out) != versions:
            raise RuntimeError(f"an output of {func} was changed in place: it is kept for backward")
        return out


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _call(func: Any, args: Any) -> Any:
    return func, *((each.shape, each.dtype) for each in tree_leaves(args) if isinstance(each, Tensor))


def _versions(out: Any) -> list[int]:
    return [each._version for each in tree_leaves(out) if isinstance(each, Tensor)]
