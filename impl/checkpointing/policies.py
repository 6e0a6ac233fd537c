"""Checkpointing policies, from keeping everything to keeping what is dear to compute."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from impl.checkpointing import accounting
from impl.checkpointing.contract import Policy
from impl.checkpointing.segments import segment_length
from shardmark.registry import Race, register


def none(model: nn.Module) -> nn.Module:
    """Keep everything."""
    _blocks(model)
    return model


def full(model: nn.Module) -> nn.Module:
    """Keep nothing of each block but its input."""
    return every(1)(model)


def every(n: int) -> Policy:
    """A policy that keeps nothing of each n-th block but its input, and everything of the others."""
    if not isinstance(n, int) or n < 1:
        raise ValueError(f"every n-th block is checkpointed, with n from 1 on, got {n!r}")

    def policy(model: nn.Module) -> nn.Module:
        for block in _blocks(model)[n - 1 :: n]:
            _checkpoint(block)
        return model

    return policy


def recursive(model: nn.Module) -> nn.Module:
    """Keep the input of each segment of sqrt(n) blocks; in backward one segment's block inputs, and all of one block.

    Chen et al., "Training Deep Nets with Sublinear Memory Cost", 2016, section 4: a segment is checkpointed, and within
    it each block once more, so that about 2 sqrt(n) block inputs and the activations of one block are there at once. It
    is a loop over `model.blocks` that runs segments: a model that indexes them gets what `full` does.
    """
    blocks = _blocks(model)
    for block in blocks:
        _checkpoint(block)
    _become(blocks, _Segmented)
    return model


def selective(model: nn.Module) -> nn.Module:
    """Keep each block's input and what its matrix products and attention gave; compute the rest again."""
    for block in _blocks(model):
        _checkpoint(block, context_fn=partial(create_selective_checkpoint_contexts, _keep_products))
    return model


KEPT = frozenset(
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
"""What `selective` does not compute again: matrix products, and SDPA's fused kernels with their log-sum-exp."""


def _keep_products(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    # Inside an autograd.Function, where gradients are disabled, products are tiles that nothing outside it asks for.
    keep = op in KEPT and torch.is_grad_enabled()
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


class _Checkpointed(nn.Module):
    """What a checkpointed block's class is put on top of: its forward is that class's, under `checkpoint`."""

    _options: dict[str, Any]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The block's output."""
        return _checkpointed(super().forward, [self], **self._options)(*args, **kwargs)


class _Segmented(nn.ModuleList):
    """Blocks as they were, but for what a loop over them gets: functions, each of them a segment of blocks."""

    def __iter__(self) -> Iterator[Any]:
        blocks = list(self._modules.values())
        length = segment_length(len(blocks))
        before: Tensor | None = None

        def run(segment: list[Any], x: Tensor) -> Tensor:
            nonlocal before
            if before is not None and x is not before:
                raise ValueError(
                    "recursive checkpointing runs blocks in segments, and this model does something between them: "
                    "each block must take the output of the one before as it is"
                )
            before = _checkpointed(partial(_in_turn, segment), segment)(x)
            return before

        for start in range(0, len(blocks), length):
            yield partial(run, blocks[start : start + length])

    def __repr__(self) -> str:
        return repr(nn.ModuleList(self._modules.values()))


def _in_turn(blocks: list[Any], x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def _checkpointed(function: Callable[..., Any], modules: list[Any], **options: Any) -> Callable[..., Any]:
    """`function`, of those modules, under `checkpoint`; the generators' state is kept where it may matter."""
    drops = any(isinstance(part, _DropoutNd) for module in modules for part in module.modules())
    return partial(checkpoint, function, use_reentrant=False, preserve_rng_state=drops, **options)


def _checkpoint(block: nn.Module, **options: Any) -> None:
    _become(block, _Checkpointed)
    vars(block)["_options"] = options


def _become(module: nn.Module, kind: type[nn.Module]) -> None:
    """Put `kind` on top of that one module's class: unlike a wrapper, this renames no parameter and no class."""
    module.__class__ = _class((kind, type(module)))


@cache  # blocks of a class stay of one class, so that what is compiled for a model does for the next one
def _class(bases: tuple[type[nn.Module], ...]) -> type[nn.Module]:
    return type(bases[-1].__name__, bases, {"__module__": bases[-1].__module__})


def _blocks(model: nn.Module) -> nn.ModuleList:
    """The model's blocks; ValueError where there are none, or they are checkpointed."""
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList) or len(blocks) == 0:
        raise ValueError(
            f"checkpointing needs `model.blocks`, an nn.ModuleList of blocks; {type(model).__name__} has none"
        )
    if isinstance(blocks, _Segmented) or any(isinstance(block, _Checkpointed) for block in blocks):
        raise ValueError(
            f"this {type(model).__name__} is checkpointed already: a policy is applied once, to a fresh model"
        )
    return blocks


register("checkpointing", "none", none, memory=accounting.NONE.peak)
register("checkpointing", "full", full, memory=accounting.FULL.peak, time=Race("none"))
register("checkpointing", "every_2", every(2), memory=accounting.every(2).peak, time=Race("none"))
register("checkpointing", "recursive", recursive, memory=accounting.RECURSIVE.peak, time=Race("none"))
register("checkpointing", "selective", selective, memory=accounting.SELECTIVE.peak, time=Race("none"))
