"""Tensors nested in a module's inputs and outputs: in tuples, lists, dicts and dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def tensors_in(value: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            yield from tensors_in([getattr(leaf, field.name) for field in fields(leaf)])


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy with changed tensors, or the object itself if no tensor changes: a module may write into a list
    or dict."""
    found = tree_map(change, value)
    same = all(a is b for a, b in zip(tree_leaves(value), tree_leaves(found), strict=True))
    return value if same else found
