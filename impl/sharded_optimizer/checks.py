"""What a user can get wrong around a sharded optimizer, each an error of one line, on every rank alike."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.collectives import Collectives
from impl.data_parallel.base import described, of_every_rank

NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""torch's optimizers whose update of an element depends on the others of its parameter."""


def check_elementwise(optimizer_cls: type[torch.optim.Optimizer], defaults: dict[str, Any]) -> None:
    """ValueError for an optimizer that is known to need more than a part of a parameter."""
    clips = defaults.get("max_grad_norm") is not None
    if clips or optimizer_cls.__name__ in NOT_ELEMENTWISE:
        what = "max_grad_norm" if clips else optimizer_cls.__name__
        raise ValueError(f"{what} needs more than one rank's elements of each parameter, so it cannot be sharded")


def check_same_group(group: dict[str, Any], process_group: dist.ProcessGroup) -> None:
    """ValueError where the ranks' parameters differ in number, shape, dtype or in being trainable."""
    everyone = of_every_rank([described(p) for p in group["params"]], process_group)
    for rank, theirs in enumerate(everyone):
        if theirs != everyone[0]:
            i = next((i for i, pair in enumerate(zip(everyone[0], theirs, strict=False)) if pair[0] != pair[1]), None)
            if i is None:
                counts = f"{len(everyone[0])} parameters on rank 0, {len(theirs)} on rank {rank}"
                raise ValueError(f"the ranks' parameters differ: {counts}")
            raise ValueError(
                f"the ranks' parameters differ at index {i}: {everyone[0][i]} on rank 0, {theirs[i]} on rank {rank}"
            )


def check_averaged(
    parameters: Collection[nn.Parameter], process_group: dist.ProcessGroup, collectives: Collectives
) -> None:
    """RuntimeError on every rank where the ranks' gradients are not the same: nobody averaged them.

    Reads each gradient twice. The ranks exchange how many there are, their norm, and their product with a random tensor
    that is the same everywhere: the norm alone is one for mirrored inputs, and for tokens in other places.
    """
    mine = torch.zeros(3, dtype=torch.float64, device=next((p.device for p in parameters), None))
    if grads := [p.grad for p in parameters if p.grad is not None]:
        mine[0] = len(grads)
        mine[1] = total_norm(grads)
        mine[2] = _projection(grads) / mine[1]
    everyone = mine.new_empty(dist.get_world_size(process_group), 3)
    collectives.all_gather(everyone.flatten(), mine, process_group)
    as_large = torch.allclose(everyone[:, :2], everyone[0, :2], rtol=1e-6, atol=0, equal_nan=True)
    rounding = max([1e-6, *(torch.finfo(p.dtype).eps for p in parameters)])
    if as_large and torch.allclose(everyone[:, 2], everyone[0, 2], rtol=0, atol=rounding, equal_nan=True):
        return
    says = "; ".join(f"rank {r} has {int(n)} of norm {norm:.6g}" for r, (n, norm, _) in enumerate(everyone.tolist()))
    raise RuntimeError(
        f"the ranks' gradients differ ({says}{', in other directions' if as_large else ''}): average them before "
        "step(), or make the optimizer with average_gradients=True"
    )


def _projection(grads: list[Tensor]) -> Tensor:
    """Their product with a random tensor of the same shapes, in float64: of each, an outer product of two vectors."""
    generator = torch.Generator(grads[0].device).manual_seed(0)
    total = torch.zeros((), dtype=torch.float64, device=grads[0].device)
    for grad in (torch.view_as_real(g) if g.is_complex() else g for g in grads):
        if grad.numel():
            matrix = grad.reshape(len(grad) if grad.ndim else 1, -1)
            rows, columns = (torch.randn(n, generator=generator, device=grad.device) for n in matrix.shape)
            total += torch.dot(rows.double(), torch.mv(matrix, columns.to(grad.dtype)).double())
    return total


def total_norm(grads: list[Tensor]) -> Tensor:
    """The norm of all of them together, in float64."""
    return torch.stack([norm.double() for norm in torch._foreach_norm(grads)]).norm()
