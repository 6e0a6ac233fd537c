"""Right full sharding that differs from ours: the tests must accept it."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from correctness.fsdp.small_fsdp import SmallFSDP
from correctness.support.planting import right
from impl.fsdp import FullyShardedDataParallel
from impl.fsdp.contract import ODD_PARAMETERS
from impl.fsdp.nested_tensors import changed
from shardmark.api import Unsupported


class _AllReduces(SmallFSDP):
    def begin_reduce(self, shard: nn.Parameter, gradient: Tensor) -> None:
        flat = self.padded(gradient.to(self.reduce_dtype or shard.dtype))
        handle = dist.all_reduce(flat, group=self.group, async_op=True)
        self.pending.append((shard, flat.chunk(self.ranks)[self.rank], handle))

    def gather(self, shard: Tensor, shape: torch.Size, dtype: torch.dtype | None) -> Tensor:
        own = shard.detach().to(dtype or shard.dtype)
        parts = [torch.empty_like(own) for _ in range(self.ranks)]
        dist.all_gather(parts, own, group=self.group)
        return torch.cat(parts)[: shape.numel()].view(shape)


@right("a function makes the wrapper; gradients are summed by an all-reduce, of which each rank keeps its part")
def all_reduces(module: nn.Module, **options: Any) -> SmallFSDP:
    return _AllReduces(module, **options)


@right("each rank scales its gradients before they are summed, and reduces as soon as backward has them")
class ScalesFirst(SmallFSDP):
    def begin_reduce(self, shard: nn.Parameter, gradient: Tensor) -> None:
        super().begin_reduce(shard, gradient / self.ranks)
        self.finish_gradient_synchronization()

    def mean(self, total: Tensor) -> Tensor:
        return total


@right("parameters are interleaved: rank r has each n-th element from r on")
class Interleaved(SmallFSDP):
    def shard_of(self, full: Tensor) -> Tensor:
        return self.padded(full)[self.rank :: self.ranks].clone()

    def begin_reduce(self, shard: nn.Parameter, gradient: Tensor) -> None:
        super().begin_reduce(shard, self.padded(gradient).view(-1, self.ranks).T)

    def gather(self, shard: Tensor, shape: torch.Size, dtype: torch.dtype | None) -> Tensor:
        flat = super().gather(shard, torch.Size([self.ranks * shard.numel()]), dtype)
        return flat.view(self.ranks, -1).T.flatten()[: shape.numel()].view(shape)


@right("it takes float32 parameters alone")
class InFloat32(SmallFSDP):
    def check(self, module: nn.Module) -> None:
        if any(p.dtype != torch.float32 for p in module.parameters()):
            raise Unsupported("it takes float32")
        super().check(module)


@right("no nn.Module and no clip_grad_norm_: an object with the contract's methods around ours")
class PlainObject:
    def __init__(
        self, module: nn.Module, *, process_group: Any = None, compute_dtype: Any = None, reduce_dtype: Any = None
    ):
        if isinstance(module, PlainObject):
            raise ValueError("it is sharded already")
        options = {"compute_dtype": compute_dtype, "reduce_dtype": reduce_dtype}
        self._sharded = FullyShardedDataParallel(module, process_group=process_group, **options)
        self.module = module

    def parameters(self) -> Iterator[nn.Parameter]:
        return self._sharded.parameters()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._sharded(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        self._sharded.finish_gradient_synchronization()

    def gather_full_parameters(self) -> dict[str, Tensor]:
        return self._sharded.gather_full_parameters()


@right("PyTorch's fully_shard of the root module alone, with errors worded otherwise")
class FullyShard(nn.Module):
    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        group = process_group or dist.group.WORLD
        assert group is not None
        if any("_is_sharded" in vars(part) for part in module.modules()):
            raise ValueError("twice?")
        if not any(p.requires_grad for p in module.parameters()):
            raise ValueError("nothing here learns")
        for kind, has in ODD_PARAMETERS.items():
            if any(map(has, module.parameters())):
                raise Unsupported(f"fully_shard takes no {kind}")
        own = {name: p.shape for name, p in module.named_parameters()}
        every: list[Any] = [None] * group.size()
        dist.all_gather_object(every, own, group=group)
        for other in every:
            for name in every[0] | other:
                if other.get(name) != every[0].get(name):
                    raise ValueError(f"{name}: {other.get(name)}, and {every[0].get(name)} on the first rank")
        for tensor in (*module.parameters(), *module.buffers()):
            dist.broadcast(tensor.detach(), group=group, group_src=0)
        mesh = DeviceMesh.from_group(group, next(module.parameters()).device.type)
        self.compute_dtype = compute_dtype
        # PyTorch's own cast makes a plain dict of a subclass of dict.
        policy = MixedPrecisionPolicy(compute_dtype, reduce_dtype, cast_forward_inputs=False)
        # By default the root stays whole after an evaluation, and this root is the whole model.
        self.module = fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        for part in self.modules():
            vars(part)["_is_sharded"] = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = changed((args, kwargs), self._cast)
        return self.module(*args, **kwargs)

    def _cast(self, x: Any) -> Any:
        floating = isinstance(x, Tensor) and x.is_floating_point()
        return x.to(self.compute_dtype) if self.compute_dtype and floating else x

    def finish_gradient_synchronization(self) -> None:
        pass

    @torch.no_grad()
    def gather_full_parameters(self) -> dict[str, Tensor]:
        self.module.reshard()  # a forward without backward leaves them gathered
        named = self.module.named_parameters(remove_duplicate=False)
        return {name: p.full_tensor().clone() for name, p in named}  # type: ignore[attr-defined]
