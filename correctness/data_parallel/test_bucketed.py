"""The bucketed wrapper beyond the family's contract: buckets, their order, hooks, dtypes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

from correctness.support.whole_batch import (
    DIM,
    adam,
    error_line,
    module,
    single_process,
    train,
)
from impl.data_parallel import BucketedDataParallel, TorchDataParallel
from impl.data_parallel.buckets import partition
from shardmark.plugin import WorldsBySize
from shardmark.ranks.world import World


class Branches(nn.Module):
    """A sum of layers; gradients arrive in the reverse of the order of calls."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: Tensor, order: list[int]) -> Tensor:
        """(rows, DIM) -> (rows, DIM)."""
        return torch.stack([self.layers[i](x) for i in order]).sum(0)


def layers_in_buckets(device: str) -> list[list[int]]:
    """Return the layers in bucket order for each step; each rank calls them in another order each time."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = BucketedDataParallel(Branches().to(device), bucket_mb=1e-5)
    index = {layer.weight: i for i, layer in enumerate(model.module.layers)}
    seen: list[list[int]] = []

    def hook(group: dist.ProcessGroup | None, bucket: Any) -> torch.futures.Future[Tensor]:
        assert bucket.index() == len(seen[-1]) and bucket.is_last() == (len(seen[-1]) == 3)
        [parameter] = bucket.parameters()
        seen[-1].append(index[parameter])
        return default_hooks.allreduce_hook(group, bucket)

    model.register_comm_hook(None, hook)
    x = torch.full((1, DIM), rank + 1.0, device=device)
    for step in range(3):
        seen.append([])
        model.zero_grad()
        model(x, [(step + 1 + rank + i * (3 if step else 1)) % 4 for i in (0, 2, 1, 3)]).sum().backward()
        model.finish_gradient_synchronization()
        for p in model.parameters():
            torch.testing.assert_close(p.grad, torch.full_like(p, (ranks + 1) / 2))
    return seen


def test_the_order_is_rank_0s_of_the_first_step_and_stays(world: World, device: str) -> None:
    reverse, learnt = [3, 2, 1, 0], [0, 2, 3, 1]  # rank 0 called 1, 3, 2, 0
    assert world.run(layers_in_buckets, device) == [[reverse, learnt, learnt]] * world.size


def where_gradients_lie(device: str) -> None:
    """Gradients stay in one flat tensor through accumulation, zeroing in place, and replacement."""
    model = BucketedDataParallel(nn.Linear(DIM, DIM).to(device))
    x = torch.full((1, DIM), dist.get_rank() + 1.0, device=device)
    mean = (dist.get_world_size() + 1) / 2

    def step(times: int) -> list[int]:
        with model.no_sync():
            for _ in range(times - 1):
                model(x).sum().backward()
        model(x).sum().backward()
        model.finish_gradient_synchronization()
        torch.testing.assert_close(model.module.weight.grad, torch.full_like(model.module.weight, times * mean))
        assert len({p.grad.untyped_storage().data_ptr() for p in model.parameters()}) == 1
        return [p.grad.data_ptr() for p in model.parameters()]

    step(1)
    model.zero_grad()
    first = step(1)
    model.zero_grad()
    assert step(3) == first
    model.zero_grad(set_to_none=False)
    assert step(2) == first
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    assert step(2) == first


def test_gradients_live_in_the_bucket(world: World, device: str) -> None:
    world.run(where_gradients_lie, device)


HOOKS = {
    "allreduce": (default_hooks.allreduce_hook, lambda: None),
    "fp16_compress": (default_hooks.fp16_compress_hook, lambda: None),
    "bf16_compress": (default_hooks.bf16_compress_hook, lambda: None),
    "powerSGD": (
        powerSGD_hook.powerSGD_hook,
        lambda: powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=1, start_powerSGD_iter=3),
    ),
}
"""torch's communication hooks, and a state for each."""


def train_with_hook(name: str, device: str, wrapper: Any) -> dict[str, Tensor]:
    model = wrapper(module("plain", 0, device))
    hook, state = HOOKS[name]
    # Renamed: DDP refuses bf16_compress by name without NCCL.
    model.register_comm_hook(state(), lambda state, bucket: hook(state, bucket))
    train(model, adam(model), device, model.finish_gradient_synchronization)
    return {key: tensor.cpu() for key, tensor in model.state_dict().items()}


@pytest.mark.parametrize("name", HOOKS)
def test_torchs_communication_hooks_do_what_they_do_for_ddp(name: str, worlds: WorldsBySize, device: str) -> None:
    """Equal to the bit, as the sum of two ranks does not depend on order. Exception: PowerSGD multiplies matrices,
    which start at other addresses in our buckets, and a library may add in another order for another alignment."""
    ours, theirs = (
        worlds(2).run(train_with_hook, name, device, wrapper) for wrapper in (BucketedDataParallel, TorchDataParallel)
    )
    for mine, other in zip(ours, theirs, strict=True):
        rounded = 1e-12 if name == "powerSGD" else 0
        torch.testing.assert_close(mine, other, rtol=rounded, atol=rounded)
    plain = single_process("plain", 2, device)
    exact = all(torch.allclose(plain[key], ours[0][key], rtol=1e-12, atol=1e-12) for key in plain)
    assert exact == (name == "allreduce")  # the other hooks lose precision, which shows that they ran


def hook_twice(device: str) -> list[str]:
    hooked = BucketedDataParallel(nn.Linear(2, 2).to(device))
    hooked.register_comm_hook(None, default_hooks.allreduce_hook)
    narrow = BucketedDataParallel(nn.Linear(2, 2).to(device), reduce_dtype=torch.bfloat16)
    return [
        error_line(RuntimeError, model.register_comm_hook, None, default_hooks.allreduce_hook)
        for model in (hooked, narrow)
    ]


def test_one_way_to_communicate_is_enough(world: World, device: str) -> None:
    for lines in world.run(hook_twice, device):
        assert all("one communication hook or in reduce_dtype" in line for line in lines)


@pytest.mark.parametrize("bucket_mb", [0, -1, float("nan")])
def test_bucket_sizes_are_positive(bucket_mb: float) -> None:
    with pytest.raises(ValueError, match="bucket_mb is a positive number of megabytes"):
        BucketedDataParallel(nn.Linear(1, 1), bucket_mb=bucket_mb)


def test_reductions_are_of_floating_point() -> None:
    with pytest.raises(ValueError, match=r"reduce_dtype is a floating-point dtype, not torch\.int8"):
        BucketedDataParallel(nn.Linear(1, 1), reduce_dtype=torch.int8)


def _sizes(elements: list[int], bucket_bytes: float, least_bytes: float) -> list[list[int]]:
    runs = partition([nn.Parameter(torch.empty(n)) for n in elements], bucket_bytes, least_bytes)
    return [[p.numel() for p in run] for run in runs]


def test_buckets_are_filled_in_order_up_to_their_size() -> None:
    assert _sizes([2, 3, 9, 1, 1], bucket_bytes=20, least_bytes=20) == [[2, 3], [9], [1, 1]]  # five float32


def test_buckets_grow_from_the_first_and_shrink_to_the_last() -> None:
    found = _sizes([1] * 64, bucket_bytes=64, least_bytes=4)
    assert list(map(len, found)) == [1, 1, 2, 4, 8, 16, 16, 8, 4, 2, 1, 1]
    assert list(map(len, _sizes([1] * 64, bucket_bytes=1000, least_bytes=4))) == [1, 1, 2, 4, 8, 16, 16, 8, 4, 2, 1, 1]
    assert list(map(len, _sizes([1] * 64, bucket_bytes=1000, least_bytes=256))) == [64]


def test_dtypes_fill_their_own_buckets() -> None:
    dtypes = [torch.float32, torch.float64, torch.float32, torch.float64, torch.float32]
    parameters = [nn.Parameter(torch.empty(1, dtype=dtype)) for dtype in dtypes]
    runs = partition(parameters, bucket_bytes=8)
    places = [[next(i for i, p in enumerate(parameters) if p is found) for found in run] for run in runs]
    assert places == [[1], [0, 2], [4], [3]]
