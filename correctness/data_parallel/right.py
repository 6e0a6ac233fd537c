"""Right data-parallel wrappers that work in unusual ways: the tests must accept them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from correctness.data_parallel.wrappers import Overlapped, Plain
from correctness.support.planting import right
from impl.distributed import broadcast_state, check_same_module


@right("gathers every rank's gradient and takes the mean itself, in float64")
class GathersAndAverages(Plain):
    def reduce(self, gradient: Tensor) -> None:
        wide = gradient.to(torch.complex128 if gradient.is_complex() else torch.float64).view(-1)
        everyone = wide.new_empty(self.size, wide.numel())
        dist.all_gather_into_tensor(everyone.view(-1), wide, group=self.group)
        gradient.copy_(everyone.mean(0).view_as(gradient))


@right("each rank averages its part of one flat tensor, which is padded, and gathers the others")
class ScattersAndGathers(Plain):
    def average(self, parameters: list[nn.Parameter]) -> None:
        for dtype in sorted({p.dtype for p in parameters}, key=str):
            mine = [p for p in parameters if p.dtype == dtype]
            flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).reshape(-1) for p in mine])
            padded = torch.nn.functional.pad(flat, (0, -flat.numel() % self.size))
            part = torch.empty_like(padded[: padded.numel() // self.size])
            dist.reduce_scatter_tensor(part, padded, group=self.group)
            dist.all_gather_into_tensor(padded, part / self.size, group=self.group)
            sizes = [p.numel() for p in mine]
            for p, averaged in zip(mine, padded[: sum(sizes)].split(sizes), strict=True):
                p.grad = averaged.view(p.shape).clone()


class _Local(AbstractContextManager[None]):
    def __init__(self, wrapper: NoModule) -> None:
        self.wrapper = wrapper

    def __enter__(self) -> None:
        self.wrapper.depth += 1

    def __exit__(self, *_: object) -> None:
        self.wrapper.depth -= 1


@right("no nn.Module; leaves gradients that no rank has None; its no_sync is a class")
class NoModule:
    def __init__(self, module: nn.Module, process_group: dist.ProcessGroup | None = None) -> None:
        check_same_module(module, process_group)
        self.module, self.group, self.depth = module, process_group, 0
        broadcast_state(module, process_group)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        there = torch.tensor([p.grad is not None for p in trainable], dtype=torch.int32, device=trainable[0].device)
        if not self.depth:
            dist.all_reduce(there, group=self.group)
            for p in (p for p, anyone in zip(trainable, there.tolist(), strict=True) if anyone):
                gradient = torch.zeros_like(p) if p.grad is None else p.grad / dist.get_world_size(self.group)
                gradient = gradient.contiguous()
                dist.all_reduce(gradient, group=self.group)
                p.grad = gradient

    def no_sync(self) -> _Local:
        return _Local(self)

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()


@right("holds torch's own DistributedDataParallel")
class HoldsDDP:
    def __init__(self, module: nn.Module, *, process_group: dist.ProcessGroup | None = None) -> None:
        check_same_module(module, process_group)
        broadcast_state(module, process_group)
        self.module = module
        self.ddp = DistributedDataParallel(
            module, process_group=process_group, broadcast_buffers=False, find_unused_parameters=True
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.ddp(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        return None

    def no_sync(self) -> AbstractContextManager[None]:
        return self.ddp.no_sync()

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()


@right("waits for its handles from the last to the first")
class WaitsForTheLastFirst(Overlapped):
    def wait(self) -> None:
        for handle, p in [*zip(self.handles, self.order, strict=True)][::-1]:
            handle.wait()
            p.grad.div_(self.size)


@right("a function that returns the wrapper, which sends pickled gradients")
def pickled(module: nn.Module, *, process_group: dist.ProcessGroup | None = None, **options: Any) -> Any:
    return _Pickled(module, process_group=process_group)


class _Pickled(Plain):
    def finish_gradient_synchronization(self) -> None:
        if not self.synchronizing:
            return
        trainable = [p for p in self.module.parameters() if p.requires_grad]
        everyone: list[Any] = [None] * self.size
        dist.all_gather_object(everyone, [p.grad for p in trainable], group=self.group)
        for p, gradients in zip(trainable, zip(*everyone, strict=True), strict=True):
            total = sum((x for x in gradients if x is not None), torch.zeros_like(p))
            p.grad = total / self.size

    def no_sync(self) -> AbstractContextManager[None]:
        return super().no_sync() if self.synchronizing else nullcontext()
