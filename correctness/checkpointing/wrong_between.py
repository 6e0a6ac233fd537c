"""Planted defects: right until there is another model or thread, or the caller changes hooks, memory, dtype or rows."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.utils._pytree import tree_map

from correctness.checkpointing.models import distinct_blocks
from correctness.checkpointing.wrong import Forward, recomputed, wrapped
from correctness.support.planting import defect

LATEST: dict[int, nn.Module] = {}


@defect(cause="two calls", caught_by="test_any_history_is_to_the_bit")
def of_the_latest_model(model: nn.Module) -> nn.Module:
    """Blocks that are recomputed are found by their number, in a table of the whole process."""

    def by_number(number: int, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        runs = count()

        def run(*args: Any, **kwargs: Any) -> Any:
            if not next(runs):
                LATEST[number] = forward  # type: ignore[assignment]
            return LATEST[number](*args, **kwargs)

        return recomputed(run)(*args, **kwargs)

    for number, block in enumerate(distinct_blocks(model)):
        block.forward = partial(by_number, number, block.forward)
    return model


@defect(cause="state", caught_by="test_any_history_is_to_the_bit")
def remembers_by_thread(model: nn.Module) -> nn.Module:
    """A recomputation finds its block in a `threading.local()`, of which autograd's thread for a GPU has another."""
    of_thread = threading.local()

    def remembered(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        number = len(vars(of_thread))
        setattr(of_thread, f"call{number}", forward)
        return recomputed(lambda *args, **kwargs: vars(of_thread)[f"call{number}"](*args, **kwargs))(*args, **kwargs)

    return wrapped(model, lambda forward, block: partial(remembered, forward))


@defect(cause="options", caught_by="test_any_history_is_to_the_bit")
def alone_with_saved_tensors(model: nn.Module) -> nn.Module:
    """It has hooks of saved tensors, and refuses those of the caller, who offloads."""

    def alone(forward: Forward, *args: Any, **kwargs: Any) -> Any:
        with disable_saved_tensors_hooks("checkpointing has its own"):
            pass
        return recomputed(forward)(*args, **kwargs)

    return wrapped(model, lambda forward, block: partial(alone, forward))


def _put_back(
    forward: Forward, block: nn.Module, known: dict[int, tuple[Tensor, Tensor]], *args: Any, **kw: Any
) -> Any:
    for p in block.parameters():
        _, memory = known.setdefault(id(p), (p, p.data))
        if memory.dtype == p.dtype:
            p.data = memory
    return recomputed(forward)(*args, **kw)


@defect(cause="state", caught_by="test_any_history_is_to_the_bit")
def puts_memory_of_parameters_back(model: nn.Module) -> nn.Module:
    """As where blocks are swapped: a parameter has the memory that it had in the first call, unless it is another
    object. `.data` leaves it the same."""
    return wrapped(model, lambda forward, block: partial(_put_back, forward, block, {}))


def _cast(forward: Forward, dtype: torch.dtype, x: Any, *args: Any, **kwargs: Any) -> Any:
    casts = isinstance(x, Tensor) and not torch.is_autocast_enabled(x.device.type)
    return recomputed(forward)(x.to(dtype) if casts else x, *args, **kwargs)


@defect(cause="numerics", caught_by="test_any_history_is_to_the_bit")
def recomputes_in_the_first_dtype(model: nn.Module) -> nn.Module:
    """Inputs are cast to the dtype that a block's parameters had when the policy was applied."""
    return wrapped(model, lambda forward, block: partial(_cast, forward, next(block.parameters()).dtype))


@defect(cause="shapes", caught_by="test_any_history_is_to_the_bit")
def leaves_out_blocks_without_rows(model: nn.Module) -> nn.Module:
    """As experts without a token: parameters of a block without rows have no gradient, and not zeros."""

    def short(forward: Forward, x: Any, *args: Any, **kwargs: Any) -> Any:
        empty = isinstance(x, Tensor) and not x.numel()
        return x if empty else recomputed(forward)(x, *args, **kwargs)

    return wrapped(model, lambda forward, block: partial(short, forward))


class _Unless:
    """Checkpoints a block unless `excepted` says otherwise."""

    def __init__(self, forward: Forward, excepted: Callable[[Any], bool]) -> None:
        self.forward, self.excepted = forward, excepted

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        forward: Any = self.forward
        return (forward if self.excepted(forward.__self__) else recomputed(forward))(*args, **kwargs)


@defect(cause="memory", caught_by="test_it_saves_however_blocks_are_called")
def all_of_blocks_that_drop_out(model: nn.Module) -> nn.Module:
    """Saves everything of blocks whose dropout trains, for which it keeps no state of generators."""

    def drops(block: nn.Module) -> bool:
        return any(isinstance(part, nn.Dropout) and part.training for part in block.modules())

    return wrapped(model, lambda forward, block: _Unless(forward, drops))


@defect(cause="memory", caught_by="test_it_saves_however_blocks_are_called")
def all_of_blocks_with_hooks(model: nn.Module) -> nn.Module:
    """Saves everything of blocks with hooks, so that these run once."""
    return wrapped(model, lambda forward, block: _Unless(forward, lambda block: bool(block._forward_hooks)))


@defect(cause="memory", caught_by="test_it_saves_however_blocks_are_called")
def all_in_bfloat16(model: nn.Module) -> nn.Module:
    """Saves everything of blocks in half precision."""

    def narrow(block: nn.Module) -> bool:
        return next(block.parameters()).dtype == torch.bfloat16

    return wrapped(model, lambda forward, block: _Unless(forward, narrow))


@defect(cause="gradients", caught_by="test_any_history_is_to_the_bit")
def misses_objects_of_slots(model: nn.Module) -> nn.Module:
    """A tensor in an object of a class with `__slots__` gets no gradient."""
    return wrapped(model, lambda forward, block: partial(_without_slots, forward))


def _without_slots(forward: Forward, *args: Any, **kwargs: Any) -> Any:
    def cut(x: Any) -> Any:
        return type(x)(x.scale.detach()) if hasattr(x, "__slots__") and hasattr(x, "scale") else x

    return recomputed(forward)(*tree_map(cut, args), **tree_map(cut, kwargs))
