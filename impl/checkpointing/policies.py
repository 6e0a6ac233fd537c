"""Checkpointing policies: which activations forward saves for backward, and which backward recomputes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import checkpoint

from impl.checkpointing import accounting, nesting
from impl.checkpointing.contract import Policy
from impl.checkpointing.keeping import contexts
from impl.checkpointing.nesting import Nest, Series
from shardmark.api import Race, register


def none(model: nn.Module) -> nn.Module:
    """Save everything: no checkpointing."""
    _blocks(model)
    return model


def full(model: nn.Module) -> nn.Module:
    """Save only each block's input."""
    return every(1)(model)


def every(n: int) -> Policy:
    """A policy that saves only the input of each n-th block, and everything of the others."""
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"every n-th block is checkpointed, with n from 1 on, got {n!r}")

    def policy(model: nn.Module) -> nn.Module:
        for block in dict.fromkeys(_blocks(model)[n - 1 :: n]):
            _checkpoint(block)
        return model

    return policy


def segments(model: nn.Module, *, length: int | None = None) -> nn.Module:
    """Save only the input of each segment of `length` blocks, by default about sqrt(n), where n is their number.

    Backward recomputes a segment and saves everything of its blocks. So n / length inputs and the activations of
    `length` blocks are in memory at most (Chen et al., 2016, section 4.1).
    """
    if length is not None and (not isinstance(length, int) or length < 1):
        raise ValueError(f"a segment has a whole number of blocks, from 1 on, got {length!r}")
    return _nested(model, partial(nesting.segments, length=length))


def recursive(model: nn.Module) -> nn.Module:
    """Save only the input of the first half of the blocks, and of the first half of each half.

    Backward recomputes a half by halves. So 1 + log2(n) block inputs, rounded down, and the activations of one block
    are in memory at most, and a block runs at most 2 + log2(n) / 2 times on average (Chen et al., 2016, section 4.4).
    """
    return _nested(model, nesting.halves)


def selective(model: nn.Module) -> nn.Module:
    """Save each block's input and the outputs of its matrix products and attention; recompute the rest."""
    for block in dict.fromkeys(_blocks(model)):
        _checkpoint(block, context_fn=partial(contexts, _is_saved))
    return model


SAVED = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten.baddbmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    }
)
"""Operators whose outputs `selective` saves: matrix products, and SDPA's fused kernels with their log-sum-exp."""


def _is_saved(operator: Any) -> bool:
    """Inside an autograd.Function gradients are disabled. Products there are tiles, which nothing outside reads."""
    return operator in SAVED and torch.is_grad_enabled()


class _Checkpointed(nn.Module):
    """A mixin in front of a block's class, which runs that class's forward under `checkpoint`."""

    _options: dict[str, Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _checkpointed(super().forward, [self], **self._options)(*args, **kwargs)


def _nested(model: nn.Module, arrange: Callable[[int], Series]) -> nn.Module:
    """Checkpoint several blocks together, where the model's forward loops over `model.blocks`."""
    blocks = _blocks(model)
    _mix_in(blocks, _Nested)
    vars(blocks)["_arrange"] = arrange
    return model


class _Nested(nn.ModuleList):
    """A ModuleList that iterates over functions instead of blocks, which run several blocks under `checkpoint`."""

    _arrange: Callable[[int], Series]

    def __iter__(self) -> Iterator[Any]:
        blocks = list(self._modules.values())
        before: Tensor | None = None

        def run(nest: Nest, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            nonlocal before
            if before is not None and x is not before:
                raise ValueError(
                    "this checkpointing runs several blocks together, and this model does something between them: "
                    "each block must take the output of the one before as it is"
                )
            before = _run((nest,), blocks, x, *args, **kwargs)
            return before

        for nest in self._arrange(len(blocks)):
            yield partial(run, nest)

    def __repr__(self) -> str:
        return repr(nn.ModuleList(self._modules.values()))


def _run(series: Series, blocks: list[Any], x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    for nest in series:
        if isinstance(nest, int):
            x = blocks[nest](x, *args, **kwargs)
        else:
            inside = [blocks[number] for number in nesting.numbers(nest)]
            x = _checkpointed(partial(_run, nest, blocks), inside)(x, *args, **kwargs)
    return x


def _checkpointed(function: Callable[..., Any], modules: list[Any], **options: Any) -> Callable[..., Any]:
    """Run `function`, which runs those modules, under `checkpoint`; if they contain dropout, restore the random
    state."""
    has_dropout = any(isinstance(part, _DropoutNd) for module in modules for part in module.modules())
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=has_dropout, **options)


def _checkpoint(block: nn.Module, **options: Any) -> None:
    _mix_in(block, _Checkpointed)
    vars(block)["_options"] = options


def _mix_in(module: nn.Module, mixin: type[nn.Module]) -> None:
    """Put `mixin` in front of this module's class. Unlike a wrapper module, this changes no parameter's name."""
    module.__class__ = _class((mixin, type(module)))


@cache  # blocks of one class share the new class, so that code compiled for one model serves the next
def _class(bases: tuple[type[nn.Module], ...]) -> type[nn.Module]:
    return type(bases[-1].__name__, bases, {"__module__": bases[-1].__module__})


def _blocks(model: nn.Module) -> nn.ModuleList:
    """Return the model's blocks; ValueError if there are none, or they are checkpointed already."""
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) == 0:
        raise ValueError(
            f"checkpointing needs `model.blocks`, an nn.ModuleList of blocks; {type(model).__name__} has none"
        )
    if isinstance(blocks, _Nested) or any(isinstance(block, _Checkpointed) for block in blocks):
        raise ValueError(
            f"this {type(model).__name__} is checkpointed already: a policy is applied once, to a fresh model"
        )
    return blocks


for _name, _called, _policy, _formulas, _peer in (
    ("none", "a step without checkpointing", none, accounting.NONE, None),
    ("full", "checkpointing of every block", full, accounting.FULL, Race("none")),
    ("every_2", "checkpointing of every second block", every(2), accounting.EVERY_2, Race("none")),
    ("segments", "checkpointing of segments of blocks", segments, accounting.SEGMENTS, Race("none")),
    ("recursive", "recursive checkpointing", recursive, accounting.RECURSIVE, Race("none")),
    ("selective", "selective checkpointing", selective, accounting.SELECTIVE, Race("none")),
):
    register("checkpointing", _name, _policy, memory=_formulas.peak, time=_peer, facts=_formulas, called=_called)
