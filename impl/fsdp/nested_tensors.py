"""Tensors nested in a module's inputs and outputs: in tuples, lists, dicts, subclasses of dict, and dataclasses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def tensors_in(value: Any) -> Iterator[Tensor]:
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            yield leaf
        else:
            for item in _items(leaf).values():
                yield from tensors_in(item)


def _base(x: Tensor) -> Tensor:
    """The tensor that x is a view of, or x itself."""
    return x if x._base is None else x._base


def bases_of(value: Any) -> set[int]:
    """The ids of the tensors in a value; of a view, the id of its base."""
    return {id(_base(x)) for x in tensors_in(value)}


def entrances(output: Any, given: set[int]) -> Iterator[Tensor]:
    """The tensors by which backward may enter the module that returned this output and was given those ids.

    Once a view is changed in place, backward goes through its base alone, so a view's base is an entrance, too, unless
    it is an input's.
    """
    for x in tensors_in(output):
        if x.requires_grad:
            yield x
            if (base := _base(x)) is not x and base.requires_grad and id(base) not in given:
                yield base


def changed(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return a copy with changed tensors, or the object itself if no tensor changes: a module may write into a list
    or dict. Containers keep their classes."""

    def of_leaf(leaf: Any) -> Any:
        items = _items(leaf)
        found = {name: changed(item, change) for name, item in items.items()}
        if all(found[name] is item for name, item in items.items()):
            return leaf if items else change(leaf)
        new = copy(leaf)
        for name, item in found.items():
            if isinstance(new, dict):
                new[name] = item
            else:
                object.__setattr__(new, name, item)  # a dataclass may be frozen
        return new

    found = tree_map(of_leaf, value)
    same = all(a is b for a, b in zip(tree_leaves(value), tree_leaves(found), strict=True))
    return value if same else found


def _items(leaf: Any) -> dict[Any, Any]:
    """The items of a container that PyTorch's trees have as a leaf, by key or by field."""
    if isinstance(leaf, dict):
        return dict(leaf)
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return {field.name: getattr(leaf, field.name) for field in fields(leaf)}
    return {}
