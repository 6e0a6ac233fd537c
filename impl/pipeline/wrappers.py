"""PyTorch's data parallelism and FSDP2, and others' data parallelism, around a stage: gradients stay on their rank
until the stage's last backward pass, and are reduced once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from impl.pipeline.deferred import Given


@contextmanager
def accumulating(module: Any) -> Iterator[None]:
    """In the block gradients of the module stay on their rank, and FSDP2 keeps what backward has gathered."""
    if isinstance(module, FSDPModule):
        _set_last(module, False)
        yield
    elif hasattr(module, "no_sync"):
        with module.no_sync():
            yield
    else:
        yield


def reduce(module: Any) -> None:
    """Reduce what the module's parameters have accumulated, once their last gradients are there. These may come from
    outside of its backward passes, so that the wrapper must be told."""
    if isinstance(module, FSDPModule):
        _set_last(module, True)
        state = fully_shard.state(module)  # type: ignore[attr-defined]
        for each in state._state_ctx.all_states:
            for group in each._fsdp_param_groups:
                group.post_backward()
        state._root_post_backward_final_callback()
    elif hasattr(module, "no_sync"):
        if isinstance(module, DistributedDataParallel):
            module.reducer.prepare_for_backward([])
        _add_zeros(module)
        if hasattr(module, "finish_gradient_synchronization"):
            module.finish_gradient_synchronization()


def _add_zeros(module: nn.Module) -> None:
    """A backward pass that adds nothing, for the hooks on parameters."""
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    torch.autograd.backward([Given.apply(parameter, torch.zeros_like(parameter)) for parameter in trained])


def _set_last(module: FSDPModule, last: bool) -> None:
    module.set_is_last_backward(last)
    module.set_reshard_after_backward(last)
    module.set_requires_gradient_sync(last)
