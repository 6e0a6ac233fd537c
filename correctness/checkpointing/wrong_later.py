"""Planted defects: right until a model is copied, a backward raises or an output is not used, or but in float16."""

from __future__ import annotations

import weakref
from functools import partial
from itertools import count
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from correctness.checkpointing.events import DROPOUTS
from correctness.checkpointing.models import distinct_blocks
from correctness.checkpointing.wrong import Forward, recomputed, wrapped
from correctness.support.planting import defect
from impl.checkpointing.policies import _mix_in


class _IfKnown:
    """Recomputes the forward of a block that is in a weak set, in which no deep copy is."""

    known: ClassVar[weakref.WeakSet[_IfKnown]] = weakref.WeakSet()

    def __init__(self, forward: Forward) -> None:
        self.forward = forward
        self.known.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return (recomputed(self.forward) if self in self.known else self.forward)(*args, **kwargs)


@defect(cause="memory", caught_by="test_it_saves_where_a_model_is_copied")
def copies_save_nothing(model: nn.Module) -> nn.Module:
    return wrapped(model, lambda forward, block: _IfKnown(forward))


FLAG = {"recomputing": False}


def _flagged(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    runs = count()

    def run(*args: Any, **kwargs: Any) -> Any:
        FLAG["recomputing"] = next(runs) > 0
        output = forward(*args, **kwargs)
        FLAG["recomputing"] = False
        return output

    return (forward if FLAG["recomputing"] else recomputed(run, early_stop=False))(*args, **kwargs)


@defect(cause="errors", caught_by="test_it_saves_after_a_batch_that_raised")
def flag_without_finally(model: nn.Module) -> nn.Module:
    """A flag says that a block is recomputed, so that none within it is checkpointed; an error leaves it set."""
    FLAG["recomputing"] = False
    return wrapped(model, lambda forward, block: partial(_flagged, forward))


def _compressed(forward: Forward, x: Any, *args: Any, **kwargs: Any) -> Any:
    runs = count()

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        if next(runs) and isinstance(x, Tensor) and x.dtype == torch.float16:
            x = x.bfloat16().half()
        return forward(x, *args, **kwargs)

    return recomputed(run)(x, *args, **kwargs)


@defect(cause="numerics", caught_by="test_any_history_is_to_the_bit")
def keeps_half_inputs_in_bfloat16(model: nn.Module) -> nn.Module:
    """Keeps what is in half precision in bfloat16, which has fewer bits than float16."""
    return wrapped(model, lambda forward, block: partial(_compressed, forward))


class _Named(torch.autograd.Function):
    """A block's outputs, whose backward says in a profile where it is."""

    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.view_as(each) for each in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        with torch.profiler.record_function("backward of a block"):
            return gradients


@defect(cause="gradients", caught_by="test_any_history_is_to_the_bit")
def names_backward_for_profiles(model: nn.Module) -> nn.Module:
    """microsoft/onnxruntime#6822: a Function gets zeros for unused outputs, and passes them on to parameters."""

    def named(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        output = recomputed(forward)(*args, **kwargs)
        tensors = {x: x for x in tree_leaves(output) if isinstance(x, Tensor) and x.requires_grad}
        if tensors:
            tensors = dict(zip(tensors, _Named.apply(*tensors), strict=True))
        return tree_map_only(Tensor, lambda x: tensors.get(x, x), output)

    return wrapped(model, lambda forward, block: partial(named, forward))


@defect(cause="random numbers", caught_by="test_dropout_drops_the_same_again")
def looks_for_dropout_once(model: nn.Module) -> nn.Module:
    """unslothai/unsloth#10744: keeps random state where a block has a dropout module when the policy is applied."""

    def keeping(forward: Forward, block: nn.Module) -> Forward:
        return recomputed(forward, preserve_rng_state=any(isinstance(part, DROPOUTS) for part in block.modules()))

    return wrapped(model, keeping)


def _restored(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    state, runs = torch.get_rng_state(), count()

    def run(*args: Any, **kwargs: Any) -> Any:
        if not next(runs):
            return forward(*args, **kwargs)
        now = torch.get_rng_state()
        torch.set_rng_state(state)
        output = forward(*args, **kwargs)
        torch.set_rng_state(now)
        return output

    return recomputed(run, early_stop=False, preserve_rng_state=False)(*args, **kwargs)


@defect(cause="random numbers", caught_by="test_the_pass_after_one_that_raised")
def random_state_without_finally(model: nn.Module) -> nn.Module:
    """As NVIDIA/Megatron-LM's `CheckpointFunction`: an error in the recomputation leaves forward's random state."""
    return wrapped(model, lambda forward, block: partial(_restored, forward))


def _detached(x: Any, depth: int) -> Any:
    """Without the graph of tensors in tuples, lists and dicts that are in others."""
    if isinstance(x, Tensor):
        return x.detach() if depth > 2 else x
    if isinstance(x, (tuple, list)):
        return type(x)(_detached(each, depth + 1) for each in x)
    return {name: _detached(each, depth + 1) for name, each in x.items()} if isinstance(x, dict) else x


@defect(cause="gradients", caught_by="test_any_history_is_to_the_bit")
def takes_tensors_one_level_deep(model: nn.Module) -> nn.Module:
    """unslothai/unsloth-zoo#1038: a tensor in a tuple in a dict gets no gradient."""

    def nested(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = (_detached(x, 0) for x in (args, kwargs))
        return recomputed(forward)(*args, **kwargs)

    return wrapped(model, lambda forward, block: partial(nested, forward))


@defect(cause="gradients", caught_by="test_any_history_is_to_the_bit")
def takes_complex_tensors_for_constants(model: nn.Module) -> nn.Module:
    """As where an autograd.Function keeps graphs of what `is_floating_point()` alone: a block's complex rotations, if
    they are learned, get no gradient."""

    def cut(x: Tensor) -> Tensor:
        return x.detach() if x.is_complex() else x

    def real(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map_only(Tensor, cut, (args, kwargs))
        return recomputed(forward)(*args, **kwargs)

    return wrapped(model, lambda forward, block: partial(real, forward))


class _PlainTuples(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = recomputed(super().forward)(*args, **kwargs)
        return tuple(output) if isinstance(output, tuple) else output


@defect(cause="shapes", caught_by="test_any_history_is_to_the_bit_as_without")
def rebuilds_tuples(model: nn.Module) -> nn.Module:
    """pytorch/pytorch#85088: a block's outputs are put into a plain tuple, whatever class they were in."""
    for block in distinct_blocks(model):
        _mix_in(block, _PlainTuples)
    return model
