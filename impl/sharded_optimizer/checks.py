"""Mistakes that a user can make with a sharded optimizer: each is a one-line error, the same on every rank."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.collectives import Collectives
from impl.distributed import check_dense, described, of_every_rank

NOT_ELEMENTWISE = ("Adafactor", "LBFGS", "Muon", "SparseAdam")
"""torch's optimizers in which the update of one element depends on the parameter's other elements."""


def check_elementwise(optimizer_cls: type[torch.optim.Optimizer], defaults: dict[str, Any]) -> None:
    """Raise ValueError for an optimizer that is known to need full parameters or gradients."""
    clips = defaults.get("max_grad_norm") is not None
    if clips or optimizer_cls.__name__ in NOT_ELEMENTWISE:
        what = "max_grad_norm" if clips else optimizer_cls.__name__
        raise ValueError(f"{what} needs more than one rank's elements of each parameter, so it cannot be sharded")


def check_same_group(group: dict[str, Any], process_group: dist.ProcessGroup) -> None:
    """Raise ValueError if the ranks' parameters differ in number, shape, dtype or `requires_grad`."""
    every_rank = of_every_rank([described(p) for p in group["params"]], process_group)
    first = every_rank[0]
    for rank, other in enumerate(every_rank):
        if other != first:
            i = next((i for i, pair in enumerate(zip(first, other, strict=False)) if pair[0] != pair[1]), None)
            if i is None:
                counts = f"{len(first)} parameters on rank 0, {len(other)} on rank {rank}"
                raise ValueError(f"the ranks' parameters differ: {counts}")
            raise ValueError(
                f"the ranks' parameters differ at index {i}: {first[i]} on rank 0, {other[i]} on rank {rank}"
            )


def check_parameters(parameters: Sequence[nn.Parameter], moved: Sequence[nn.Parameter]) -> None:
    """Raise RuntimeError if parameters have moved, as updates would not reach the model; ValueError if one is not
    dense."""
    if moved:
        raise RuntimeError(
            f"a parameter of shape {tuple(moved[0].shape)} is no longer where the optimizer keeps it: make the "
            "optimizer after the model is moved or converted, and load into the model without assign=True"
        )
    for p in parameters:
        check_dense(p)


def check_averaged(
    parameters: Collection[nn.Parameter], process_group: dist.ProcessGroup, collectives: Collectives
) -> None:
    """RuntimeError on every rank where the ranks' gradients differ, because nothing has averaged them.

    Reads each gradient twice. The ranks exchange the number of gradients, their norm, and their inner product with a
    random tensor that is the same on every rank. The norm is not enough: mirrored inputs, for example, or the same
    tokens at other positions give different gradients with equal norms.
    """
    own = torch.zeros(3, dtype=torch.float64, device=next((p.device for p in parameters), None))
    if grads := [p.grad for p in parameters if p.grad is not None]:
        own[0] = len(grads)
        own[1] = total_norm(grads)
        own[2] = _projection(grads) / own[1]
    every_rank = own.new_empty(dist.get_world_size(process_group), 3)
    collectives.all_gather(every_rank.flatten(), own, process_group)
    same_norm = torch.allclose(every_rank[:, :2], every_rank[0, :2], rtol=1e-6, atol=0, equal_nan=True)
    inexact = [p.dtype for p in parameters if p.is_floating_point() or p.is_complex()]  # frozen ones may be integers
    rounding = max([1e-6, *(torch.finfo(dtype).eps for dtype in inexact)])
    if same_norm and torch.allclose(every_rank[:, 2], every_rank[0, 2], rtol=0, atol=rounding, equal_nan=True):
        return
    found = "; ".join(f"rank {r} has {int(n)} of norm {norm:.6g}" for r, (n, norm, _) in enumerate(every_rank.tolist()))
    raise RuntimeError(
        f"the ranks' gradients differ ({found}{', in other directions' if same_norm else ''}): average them before "
        "step(), or make the optimizer with average_gradients=True"
    )


def _projection(grads: list[Tensor]) -> Tensor:
    """The gradients' inner product with random tensors of their shapes, in float64.

    Each random tensor is the outer product of two vectors, so that it need not be allocated.
    """
    generator = torch.Generator(grads[0].device).manual_seed(0)
    total = torch.zeros((), dtype=torch.float64, device=grads[0].device)
    for grad in (torch.view_as_real(g) if g.is_complex() else g for g in grads):
        if grad.numel():
            matrix = grad.reshape(len(grad) if grad.ndim else 1, -1)
            rows, columns = (torch.randn(n, generator=generator, device=grad.device) for n in matrix.shape)
            total += torch.dot(rows.double(), torch.mv(matrix, columns.to(grad.dtype)).double())
    return total


def total_norm(grads: list[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, in float64."""
    return torch.stack([norm.double() for norm in torch._foreach_norm(grads)]).norm()
