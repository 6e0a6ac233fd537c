"""Minimal full sharding: the base of wrong and unusual implementations.

The root module is the only unit. Each parameter is sharded on its own, flattened and padded with zeros.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call

from impl.fsdp.nested_tensors import changed


class SmallFSDP(nn.Module):
    """Meets the family's contract, without its errors. A defect overrides one of the short methods."""

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.group = process_group or dist.group.WORLD
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.compute_dtype, self.reduce_dtype = compute_dtype, reduce_dtype or compute_dtype
        self.check(module)
        self.module = module
        self.pending: list[tuple[nn.Parameter, Tensor, Any]] = []
        with torch.no_grad():
            self.synchronize_start()
            self.replace_parameters()
        for part in self.modules():
            vars(part)["_is_sharded"] = True

    def check(self, module: nn.Module) -> None:
        """Raise ValueError for what cannot be sharded."""
        if any("_is_sharded" in vars(part) for part in module.modules()):
            raise ValueError("the module is sharded already")
        own = [(name, tuple(p.shape), str(p.dtype), p.requires_grad) for name, p in module.named_parameters()]
        every_rank: list[Any] = [None] * self.ranks
        dist.all_gather_object(every_rank, own, group=self.group)
        for other in every_rank:
            for mine, theirs in zip(every_rank[0], other, strict=False):
                if mine != theirs:
                    raise ValueError(f"the ranks' modules differ at {mine[0]}")
            if len(other) != len(every_rank[0]):
                raise ValueError(f"the ranks' modules differ in number of parameters: {len(other)}")
        if not any(p.requires_grad for p in module.parameters()):
            raise ValueError("nothing to train")

    def synchronize_start(self) -> None:
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            dist.broadcast(tensor.detach(), group=self.group, group_src=0)

    def replace_parameters(self) -> None:
        shards: dict[int, nn.Parameter] = {}
        self.shapes: dict[nn.Parameter, torch.Size] = {}
        keep = list(self.module.parameters())  # so that no id is reused
        for part in list(self.module.modules()):
            for name, parameter in part._parameters.items():
                if parameter is None:
                    continue
                if id(parameter) not in shards:
                    shard = nn.Parameter(self.shard_of(parameter.detach()), requires_grad=parameter.requires_grad)
                    shards[id(parameter)] = shard
                    self.shapes[shard] = parameter.shape
                part._parameters[name] = shards[id(parameter)]
        del keep

    # A parameter's shard, and back to the full parameter.

    def padded(self, full: Tensor) -> Tensor:
        """Flatten, and pad with zeros to a multiple of the number of ranks."""
        flat = full.reshape(-1)
        return torch.cat([flat, flat.new_zeros(-len(flat) % self.ranks)])

    def shard_of(self, full: Tensor) -> Tensor:
        return self.padded(full).chunk(self.ranks)[self.rank].clone()

    def gather(self, shard: Tensor, shape: torch.Size, dtype: torch.dtype | None) -> Tensor:
        own = shard.detach().to(dtype or shard.dtype)
        flat = own.new_empty(self.ranks * len(own))
        dist.all_gather_into_tensor(flat, own, group=self.group)
        return flat[: shape.numel()].view(shape)

    def gather_to_compute(self, shard: nn.Parameter) -> Tensor:
        floating = shard.is_floating_point()
        return self.gather(shard, self.shapes[shard], self.compute_dtype if floating else None)

    # The step.

    def named_shards(self) -> dict[str, nn.Parameter]:
        return dict(self.module.named_parameters(remove_duplicate=False))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = changed((args, kwargs), self.cast)
        shards = list(dict.fromkeys(self.named_shards().values()))
        full = dict(zip(shards, Gather.apply(self, *shards), strict=True))
        once = {name: p for name, p in self.by_name(full).items() if name in self.own_names()}
        return functional_call(self.module, once, args, kwargs, tie_weights=False)  # each name is given

    def own_names(self) -> set[str]:
        """Names of parameters, of which a module that is registered twice has one each: it is changed once."""
        parts = self.module.named_modules()
        return {f"{prefix}.{name}".lstrip(".") for prefix, part in parts for name in part._parameters}

    def by_name(self, full: dict[nn.Parameter, Tensor]) -> dict[str, Tensor]:
        """Full parameters by name, a tied one by each name, from those by shard."""
        return {name: full[p] for name, p in self.named_shards().items()}

    def cast(self, x: Any) -> Any:
        floating = isinstance(x, Tensor) and x.is_floating_point()
        return x.to(self.compute_dtype) if self.compute_dtype and floating else x

    def begin_reduce(self, shard: nn.Parameter, gradient: Tensor) -> None:
        flat = self.padded(gradient.to(self.reduce_dtype or shard.dtype))
        own = flat.new_empty(shard.numel())
        self.pending.append((shard, own, dist.reduce_scatter_tensor(own, flat, group=self.group, async_op=True)))

    def finish_gradient_synchronization(self) -> None:
        for shard, total, handle in self.pending:
            self.wait(handle)
            self.add(shard, self.mean(total).to(shard.dtype))
        self.pending.clear()

    def wait(self, handle: Any) -> None:
        handle.wait()

    def mean(self, total: Tensor) -> Tensor:
        return total / self.ranks

    def add(self, shard: nn.Parameter, gradient: Tensor) -> None:
        shard.grad = gradient if shard.grad is None else shard.grad + gradient

    @torch.no_grad()
    def gather_full_parameters(self) -> dict[str, Tensor]:
        full = {p: self.gather(p, self.shapes[p], None) for p in self.module.parameters()}
        return {name: value.clone() for name, value in self.by_name(full).items()}

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        total = torch.stack([g.double().square().sum() for g in gradients]).sum()
        dist.all_reduce(total, group=self.group)
        scale = (max_norm / (total.sqrt() + 1e-6)).clamp(max=1)
        for gradient in gradients:
            gradient.mul_(scale)
        return total.sqrt()


class Gather(torch.autograd.Function):
    """All full parameters of the model; backward hands the gradients to the model, zeros where there are none."""

    @staticmethod
    def forward(ctx: Any, model: SmallFSDP, *shards: nn.Parameter) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.model, ctx.shards = model, shards
        full = tuple(model.gather_to_compute(shard) for shard in shards)
        ctx.mark_non_differentiable(*(x for x, p in zip(full, shards, strict=True) if not p.requires_grad))
        return full

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, ...]:  # type: ignore[override]
        for shard, gradient in zip(ctx.shards, gradients, strict=True):
            if shard.requires_grad:
                ctx.model.begin_reduce(shard, gradient)
        return (None,) * (1 + len(gradients))
