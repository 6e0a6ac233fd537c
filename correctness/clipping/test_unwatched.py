"""Clipping unwatched, on two ranks: shapes drawn anew, over many steps."""

from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.support.unwatched import assert_right_unwatched
from shardmark.api import Implementation


def draw(generator: torch.Generator) -> dict[str, Any]:
    shapes = torch.randint(1, 30, (6, 2), generator=generator).tolist()
    return {"gradients": [[torch.randn(shape, generator=generator) for shape in shapes] for _ in range(12)]}


def perform(target: Any, given: Any, rank: int | None) -> dict[str, Tensor]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from impl.clipping import adapted
    from impl.distributed import full

    mesh, found = None if rank is None else init_device_mesh("cpu", (2,), mesh_dim_names=("shard",)), {}
    for step in range(240):
        parameters = []
        for number, whole in enumerate(given["gradients"][step % 12]):
            placement = Replicate() if number == 5 else Shard(number % 2)
            gradient = whole.clone() if mesh is None else distribute_tensor(whole.clone(), mesh, [placement])
            parameters.append(torch.nn.Parameter(torch.zeros_like(gradient)))
            parameters[-1].grad = gradient
        norm = adapted(target)(parameters, 1.0 + step % 3, 2.0)
        if step in (0, 11, 239):
            found[f"the norm of step {step}"] = full(norm)
            found |= {f"gradient {i} of step {step}": full(p.grad) for i, p in enumerate(parameters)}
    return found


def expected(given: Any, ranks: int) -> dict[str, Tensor]:
    return perform(torch.nn.utils.clip_grad_norm_, given, None)


@pytest.mark.own_processes
@pytest.mark.judged
@pytest.mark.family("clipping")
def test_is_right_unwatched(implementation: Implementation) -> None:
    assert_right_unwatched(implementation, draw, perform, expected, ranks=2)
