"""PyTorch's data parallelism and FSDP2, and others' data parallelism, around a stage: gradients stay on their rank
until the stage's last backward pass, and are reduced once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from impl.pipeline.deferred import Given


def outermost_wrappers(module: nn.Module) -> list[Any]:
    """The wrappers in a stage that lie in no other one: the stage itself, or some of its layers."""
    if isinstance(module, FSDPModule) or hasattr(module, "no_sync"):
        return [module]
    return [wrapper for child in module.children() for wrapper in outermost_wrappers(child)]


@contextmanager
def accumulating(wrappers: Sequence[Any]) -> Iterator[None]:
    """In the block gradients stay on their rank, and FSDP2 keeps what backward has gathered."""
    with ExitStack() as stack:
        for wrapper in wrappers:
            if isinstance(wrapper, FSDPModule):
                _set_last(wrapper, False)
                stack.callback(_set_last, wrapper, True)
            else:
                stack.enter_context(wrapper.no_sync())
        yield


def reduce(wrapper: Any) -> None:
    """Reduce what the wrapper's parameters have accumulated, once their last gradients are there. These may come from
    outside of its backward passes, so that it does not notice them."""
    if isinstance(wrapper, FSDPModule):
        state = fully_shard.state(wrapper)  # type: ignore[attr-defined]
        for group in _groups(state):
            group.post_backward()
        state._root_post_backward_final_callback()
        return
    if isinstance(wrapper, DistributedDataParallel):
        wrapper.reducer.prepare_for_backward([])
    _add_zeros(wrapper)
    if hasattr(wrapper, "finish_gradient_synchronization"):
        wrapper.finish_gradient_synchronization()


def widen(wrapper: Any) -> None:
    """Add gradients that FSDP2 computes in a narrow dtype to those so far in the dtype in which it reduces them: it
    does so after its own backward passes, and gradients of weights come outside of them."""
    if isinstance(wrapper, FSDPModule):
        for group in _groups(fully_shard.state(wrapper)):  # type: ignore[attr-defined]
            for each in group.fsdp_params:
                each.accumulate_unsharded_grad_if_needed()
                each.to_accumulated_grad_if_needed()


def _groups(state: Any) -> Iterator[Any]:
    """FSDP2's groups of parameters, of a module and of those in it."""
    for each in state._state_ctx.all_states:
        yield from each._fsdp_param_groups


def _add_zeros(module: nn.Module) -> None:
    """A backward pass that adds nothing, for the hooks on parameters."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    if trained:
        torch.autograd.backward([Given.apply(parameter, torch.zeros_like(parameter)) for parameter in trained])


def _set_last(module: FSDPModule, last: bool) -> None:
    module.set_is_last_backward(last)
    module.set_reshard_after_backward(last)
    module.set_requires_gradient_sync(last)
