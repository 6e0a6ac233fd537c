"""Which operators of a graph a compiler fuses into one kernel, by the rules of Inductor's lowering and scheduler.

A pointwise operator has no tensor of its own: it is computed again wherever its value is used. Tensors, here "buffers",
are made of reductions, of what a kernel that is not fused reads, of the graph's results, and of values with several
uses that would otherwise read more than 4 tensors, or compute more than 30 operators, each time. Buffers that iterate
over the same elements are made by one kernel where one reads another, or both read much the same.

PyTorch 2.13: torch/_inductor/config.py (`realize_reads_threshold` and others), graph.py, scheduler.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from graphlib import TopologicalSorter
from heapq import heappop, heappush
from math import prod
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from shardmark.predict.simulation.costs import Cost, touched

MOST_READS, MOST_OPERATORS, MOST_READS_OF_ONE = 4, 30, 8
"""A value with several uses is made if it reads more tensors, or takes more operators; one with a single use, too, if
it reads more than the last number."""

_REDUCTIONS = ("sum", "mean", "amax", "amin", "prod", "var", "var_mean", "any", "all", "argmax", "argmin")
_MADE = ("full", "full_like", "zeros_like", "ones_like", "iota", "scalar_tensor", "inductor_lookup_seed")
_LOADS = ("gather", "index", "index_select", "embedding")
"""Operators that read those rows alone that they return."""
_MOVED = ("cat", "constant_pad_nd", "slice_scatter", "inductor_random")


@dataclass
class Kernel:
    """One launch: an operator with a kernel of its own, or several fused ones. A view is one, too, without work."""

    nodes: list[fx.Node]
    """Those whose values it makes."""
    reads: list[fx.Node]
    """Values that must live until it has run."""
    cost: Cost | None = None
    """The cost of fused operators; None for another operator, whose call says it."""
    over: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Values that may be written over one that is read, if that is dead afterwards."""


def kernels_of(graph: fx.Graph, donated: Collection[fx.Node] = ()) -> list[Kernel]:
    """The kernels of a graph of ATen's operators, in an order in which they can run. They may write over those inputs
    of the graph that are `donated`."""
    return _Fusion(graph, donated).kernels()


class _Fusion:
    def __init__(self, graph: fx.Graph, donated: Collection[fx.Node]) -> None:
        self._nodes = [node for node in graph.nodes if node.op != "output"]
        self._donated = donated
        self._reads: dict[fx.Node, dict[fx.Node, fx.Node]] = {}
        """By fused operator: the values that its expression reads, each with a node of the shape that is read of it."""
        self._operators: dict[fx.Node, int] = {}
        """By fused operator: the operators of its expression."""
        self._buffers: dict[fx.Node, tuple[Any, ...]] = {}
        """Fused operators whose values are made, each with the elements over which its kernel iterates."""
        for node in self._nodes:
            if _is_fused(node):
                self._express(node)
        self._readers: dict[fx.Node, list[fx.Node]] = {}
        """Buffers that read a value."""
        for node in self._buffers:
            for base in self._reads[node]:
                self._readers.setdefault(base, []).append(node)
        self._stage = self._stages()

    def _express(self, node: fx.Node) -> None:
        """Note what the operator's expression is, and whether its value is made."""
        reads: dict[fx.Node, fx.Node] = {}
        operators = 1
        for given in node.all_input_nodes:
            base = _base(given)
            some = _name(node) in _LOADS and given is node.args[0]
            if base in self._reads and base not in self._buffers:
                reads |= dict.fromkeys(self._reads[base], node) if some else self._reads[base]
                operators += self._operators[base]
            elif isinstance(given.meta.get("val"), Tensor):
                reads[base] = node if some else given
        self._reads[node], self._operators[node] = reads, operators
        uses = list(_uses(node))
        needed = _reduces(node) or not all(map(_is_fused, uses))
        large = len(reads) > MOST_READS or operators > MOST_OPERATORS
        if needed or (large and len(uses) > 1) or len(reads) > MOST_READS_OF_ONE:
            self._buffers[node] = self._iterates(node)

    def _iterates(self, node: fx.Node) -> tuple[Any, ...]:
        """The elements over which a kernel that makes the value iterates."""
        elements = _layouts(node)[0].numel()
        if _reduces(node):
            given = node.all_input_nodes[0].meta["val"]
            return ("rows", given.numel()) if _is_of_rows(node, given.shape) else ("columns", given.numel(), elements)
        for base in self._reads[node]:  # such as a row's scale, made of its sum
            if base in self._buffers and _reduces(base) and _layouts(base)[0].numel() == elements:
                return self._buffers[base]
        return "rows", elements

    def _stages(self) -> dict[fx.Node, int]:
        """A kernel's stage comes after those of all that it reads; buffers of one kernel have the same."""
        stage: dict[fx.Node, int] = {}
        for node in self._nodes:
            if node.op == "placeholder":
                stage[node] = 0
            elif node in self._buffers:
                apart = {base: self._buffers.get(base) != self._buffers[node] for base in self._reads[node]}
                stage[node] = max((stage[base] + apart[base] for base in apart), default=1)
            elif not _is_fused(node) and not _is_view(node):
                stage[node] = 1 + max((stage[_base(each)] for each in node.all_input_nodes), default=0)
        for node in reversed(self._buffers):  # as late as its readers, if these can be one kernel with it
            readers = self._readers.get(node, [])
            alike = all(self._buffers[each] == self._buffers[node] for each in readers)
            if readers and alike and all(map(_is_fused, _uses(node))):
                stage[node] = max(stage[node], min(stage[each] for each in readers))
        return stage

    def kernels(self) -> list[Kernel]:
        """All kernels, in the graph's order as far as fused ones allow."""
        found = [self._fused(buffers) for buffers in self._groups()]
        for node in self._nodes:
            if _is_view(node):
                if _base(node) in self._stage and not all(map(_is_fused, _uses(node))):
                    found.append(Kernel([node], node.all_input_nodes))
            elif not _is_fused(node) and node.op != "placeholder":
                found.append(Kernel([node], node.all_input_nodes))
        return self._in_order(found)

    def _in_order(self, kernels: list[Kernel]) -> list[Kernel]:
        """The kernels by the place of their last node in the graph, but each after those that make what it reads."""
        place = {node: i for i, node in enumerate(self._nodes)}
        makers = {node: i for i, kernel in enumerate(kernels) for node in kernel.nodes}
        sorter = TopologicalSorter({i: {makers[n] for n in k.reads if n in makers} for i, k in enumerate(kernels)})
        sorter.prepare()
        ready: list[tuple[int, int]] = []
        ordered: list[Kernel] = []
        while sorter.is_active():
            for i in sorter.get_ready():
                heappush(ready, (max(place[node] for node in kernels[i].nodes), i))
            _, i = heappop(ready)
            ordered.append(kernels[i])
            sorter.done(i)
        return ordered

    def _groups(self) -> Iterator[list[fx.Node]]:
        """Buffers that one kernel makes."""
        groups: dict[tuple[Any, ...], list[list[fx.Node]]] = {}
        for node, elements in self._buffers.items():
            alike = groups.setdefault((self._stage[node], elements), [])
            met = [group for group in alike if any(self._together(each, node) for each in group)]
            for group in met:
                alike.remove(group)
            alike.append([*(each for group in met for each in group), node])
        for alike in groups.values():
            yield from alike

    def _together(self, first: fx.Node, second: fx.Node) -> bool:
        """Whether one kernel makes both, which iterate over the same elements: if one reads the other, or if at least
        half of what either reads is the same. Others would only have to wait for one another."""
        if first in self._reads[second]:
            return True
        reads = [
            {base: touched(seen.meta["val"]) for base, seen in self._reads[node].items()} for node in (first, second)
        ]
        shared = sum(nbytes for base, nbytes in reads[1].items() if base in reads[0])
        return shared > 0 and 2 * shared >= min(sum(each.values()) for each in reads)

    def _fused(self, buffers: list[fx.Node]) -> Kernel:
        reads: dict[fx.Node, list[Tensor]] = {}
        for node in buffers:
            for base, view in self._reads[node].items():
                if base not in buffers:
                    reads.setdefault(base, []).append(view.meta["val"])
        made = [node for node in buffers if self._leaves(node, buffers)]
        writes = [each for node in made for each in _layouts(node)]
        numbers = [*(each for seen in reads.values() for each in seen), *writes]
        cost = Cost(
            next((each.dtype for each in numbers if each.is_floating_point()), torch.int64),
            flops=0.0,
            nbytes=sum(min(sum(map(touched, seen)), _whole(base)) for base, seen in reads.items())
            + sum(map(touched, writes)),
            reduces=any(map(_reduces, buffers)),
            name="fused " + " ".join(dict.fromkeys(map(_name, buffers))),
        )
        over = {
            node: base
            for node in made
            for base, seen in reads.items()
            if (base.op != "placeholder" or base in self._donated)
            and len(seen) == 1
            and _layout(seen[0]) == _layout(base.meta["val"]) == _layout(node.meta["val"])
        }
        return Kernel(made, list(reads), cost, over)

    def _leaves(self, node: fx.Node, kernel: Collection[fx.Node]) -> bool:
        """Whether anything outside of the kernel uses the value."""
        return not all(map(_is_fused, _uses(node))) or not all(each in kernel for each in self._readers.get(node, []))


def _whole(node: fx.Node) -> float:
    return sum(map(touched, _layouts(node)))


def _layout(value: Any) -> tuple[Any, ...]:
    return (value.shape, value.stride(), value.dtype) if isinstance(value, Tensor) else ()


def _layouts(node: fx.Node) -> list[Tensor]:
    value = node.meta["val"]
    return [value] if isinstance(value, Tensor) else [each for each in value if isinstance(each, Tensor)]


def _name(node: fx.Node) -> str:
    return node.target._schema.name.partition("::")[2] if isinstance(node.target, OpOverload) else str(node.target)


def _is_fused(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, OpOverload) or _is_view(node):
        return False
    known = _name(node) in (*_REDUCTIONS, *_MADE, *_LOADS, *_MOVED) or torch.Tag.pointwise in node.target.tags
    return known and not any(argument.is_write for argument in node.target._schema.arguments)


def _is_view(node: fx.Node) -> bool:
    """Whether the value is a view, or one of several that a fused operator returns."""
    if not isinstance(node.target, OpOverload):
        return node.target is getitem and _is_fused(node.all_input_nodes[0])
    returns = node.target._schema.returns
    return bool(returns) and all(each.alias_info is not None and not each.alias_info.is_write for each in returns)


def _reduces(node: fx.Node) -> bool:
    return _name(node) in _REDUCTIONS


def _base(node: fx.Node) -> fx.Node:
    """The node of whose value this one is a view, or itself."""
    while _is_view(node):
        node = node.all_input_nodes[0]
    return node


def _uses(node: fx.Node) -> Iterator[fx.Node]:
    """Nodes that use the value or a view of it, and are no views."""
    for use in node.users:
        if _is_view(use):
            yield from _uses(use)
        else:
            yield use


def _is_of_rows(node: fx.Node, shape: torch.Size) -> bool:
    """Whether a reduction is over the last dimensions, whose elements lie side by side."""
    given: Any = node.args[1] if len(node.args) > 1 else None
    dims = given if isinstance(given, list | tuple) else range(len(shape)) if given is None else [given]
    large = [d for d, size in enumerate(shape) if size > 1]
    reduced = {d % len(shape) for d in dims} if len(shape) else set()
    kept = [d for d in large if d not in reduced]
    return prod(shape[d] for d in reduced) <= 1 or not kept or max(kept) < min(d for d in large if d in reduced)
