"""Models whose parameters are DTensors: all-gather the full parameters, and clip the norm of all gradients."""

from __future__ import annotations

from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from impl.distributed import PlainStateDict, full


class DTensorModel(PlainStateDict):
    """Base of wrappers whose module reduces its DTensors' gradients in backward."""

    module: nn.Module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Nothing to do: gradients are reduced when backward returns."""

    def gather_full_parameters(self) -> dict[str, Tensor]:
        return gather_full_parameters(self.module)

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return clip_grad_norm_(self.module, max_norm)


@torch.no_grad()
def gather_full_parameters(model: nn.Module) -> dict[str, Tensor]:
    """A copy of every full parameter, by each of its names. All ranks call."""
    full = {parameter: _copy(parameter.detach()) for parameter in model.parameters()}
    return {name: full[parameter] for name, parameter in model.named_parameters(remove_duplicate=False)}


def clip_grad_norm_(model: nn.Module, max_norm: float) -> Tensor:
    """Scale gradients so that their norm over all ranks is at most `max_norm`; return their norm before that.

    All ranks call. Any placement will do: torch's norms handle DTensors, and return one. In float32 or more, unlike
    `torch.nn.utils.clip_grad_norm_`, which squares the ranks' norms in the gradients' dtype: in float16 they overflow.
    """
    parameters = [p for p in model.parameters() if p.grad is not None]
    dtype = reduce(torch.promote_types, (p.dtype for p in parameters), torch.float32)
    norms = [torch.linalg.vector_norm(p.grad, dtype=dtype) for p in parameters if p.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())
    nn.utils.clip_grads_with_norm_(parameters, max_norm, norm)
    return full(norm)


def _copy(parameter: Tensor) -> Tensor:
    whole = full(parameter)
    own = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    # With a single rank the gathered tensor is the rank's shard itself.
    return whole.clone() if whole.untyped_storage().data_ptr() == own.untyped_storage().data_ptr() else whole
