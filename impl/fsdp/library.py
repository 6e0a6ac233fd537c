"""PyTorch's own FSDP1 and FSDP2, under the family's contract. Neither takes a parameter that several units share."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.torch_version import TorchVersion

from impl.distributed import PlainStateDict, broadcast_state, check_same_module
from impl.fsdp.contract import ODD_PARAMETERS, Facts, has_integers
from impl.fsdp.dtensors import DTensorModel
from impl.fsdp.split_into_units import shared_between
from impl.fsdp.wrapping import LINEARS_AND_EMBEDDINGS, Policy, check_unsharded, choose_units, mark_sharded
from shardmark.api import Unsupported, has_device_memory, register


class TorchFSDP2(DTensorModel):
    """`torch.distributed.fsdp.fully_shard` of each unit; parameters become DTensors that are sharded by rows.

    With `hybrid` they are sharded over the ranks of a node, and every node has a copy (hybrid sharding, HSDP): only
    gradients go between nodes. A node has `LOCAL_WORLD_SIZE` ranks, as torchrun says; without it all ranks are in one.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        wrap: Policy = LINEARS_AND_EMBEDDINGS,
        reshard_after_forward: bool = True,
        cpu_offload: bool = False,
        hybrid: bool = False,
    ) -> None:
        super().__init__()
        if has_integers(module) and TorchVersion(torch.__version__) < "2.13":
            # It made each parameter again as one that needs a gradient: pytorch/pytorch#177844.
            raise Unsupported("PyTorch's FSDP2 takes no parameters of integers before torch 2.13")
        units = synchronized_units(module, wrap, process_group)
        own = next(module.parameters()).device
        device, pins = own.type, has_device_memory(own)
        group = process_group or dist.group.WORLD
        assert group is not None
        self.module = self._shard(
            units,
            mesh=_nodes(group, device) if hybrid else _flat(group, device),
            reshard_after_forward=reshard_after_forward,
            mp_policy=MixedPrecisionPolicy(compute_dtype, reduce_dtype),
            offload_policy=CPUOffloadPolicy(pin_memory=pins) if cpu_offload else OffloadPolicy(),
        )
        mark_sharded(module)

    def _shard(self, units: list[nn.Module], *, reshard_after_forward: bool, **options: Any) -> nn.Module:
        """Call `fully_shard(unit, **options)` on every unit; return the root module, which is the first."""
        for unit in units[:0:-1]:
            fully_shard(unit, reshard_after_forward=reshard_after_forward, **options)
        # None is PyTorch's default: the root module is not resharded after forward, because backward begins with it.
        fully_shard(units[0], reshard_after_forward=None if reshard_after_forward else False, **options)
        return units[0]


def _flat(group: dist.ProcessGroup, device: str) -> DeviceMesh:
    return DeviceMesh.from_group(group, device, mesh_dim_names=("ranks",))


def _requires_nodes(device: str) -> str | None:
    ranks, in_node = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    return None if ranks > in_node else "needs several nodes, as torchrun starts them; in one it is fsdp2"


def _nodes(group: dist.ProcessGroup, device: str) -> DeviceMesh:
    """The ranks node by node; a flat mesh where all are in one node. Unsupported where nodes differ in size."""
    size = dist.get_world_size(group)
    in_node = int(os.environ.get("LOCAL_WORLD_SIZE", size))
    if size <= in_node:
        return _flat(group, device)
    if size % in_node or group is not dist.group.WORLD:
        raise Unsupported(f"hybrid sharding takes all ranks of full nodes, not {size} ranks in nodes of {in_node}")
    return init_device_mesh(device, (size // in_node, in_node), mesh_dim_names=("nodes", "ranks"))


class TorchFSDP1(PlainStateDict):
    """`torch.distributed.fsdp.FullyShardedDataParallel` with `use_orig_params=True`.

    `backward_prefetch` is "pre", "post" or None: the next unit is all-gathered before this unit's gradients are
    computed, after that, or only when it is needed. `reshard_after_forward=False` is the strategy `SHARD_GRAD_OP`.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        wrap: Policy = LINEARS_AND_EMBEDDINGS,
        reshard_after_forward: bool = True,
        backward_prefetch: str | None = "pre",
        forward_prefetch: bool = False,
        cpu_offload: bool = False,
    ) -> None:
        super().__init__()
        prefetch = {"pre": BackwardPrefetch.BACKWARD_PRE, "post": BackwardPrefetch.BACKWARD_POST, None: None}
        if backward_prefetch not in prefetch:
            raise ValueError(f'backward_prefetch is "pre", "post" or None, got {backward_prefetch!r}')
        if cpu_offload and all(parameter.device.type == "cpu" for parameter in module.parameters()):
            raise Unsupported("FSDP1 offloads to the CPU only from an accelerator")
        units = synchronized_units(module, wrap, process_group)
        device = next(module.parameters()).device
        self.module = FSDP1(
            module,
            process_group=process_group or dist.group.WORLD,
            sharding_strategy=ShardingStrategy.FULL_SHARD if reshard_after_forward else ShardingStrategy.SHARD_GRAD_OP,
            cpu_offload=CPUOffload(cpu_offload),
            auto_wrap_policy=CustomPolicy(lambda part: part in units[1:]),
            backward_prefetch=prefetch[backward_prefetch],
            forward_prefetch=forward_prefetch,
            mixed_precision=MixedPrecision(compute_dtype, reduce_dtype) if compute_dtype or reduce_dtype else None,
            device_id=device,  # without it FSDP1 looks for an accelerator
            use_orig_params=True,
        )
        mark_sharded(module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        """Nothing to do: gradients are reduced when backward returns."""

    @torch.no_grad()
    def gather_full_parameters(self) -> dict[str, Tensor]:
        with FSDP1.summon_full_params(self.module, writeback=False):
            return {
                name.replace("_fsdp_wrapped_module.", ""): p.detach().clone()
                for name, p in self.module.named_parameters(remove_duplicate=False)
            }

    @property
    def clip_grad_norm_(self) -> Callable[[float], Tensor]:
        """FSDP1's own, which takes norms in float32: it has none for parameters in float64 (AttributeError)."""
        if any(p.dtype == torch.float64 for p in self.parameters()):
            raise AttributeError("FSDP1 clips no gradients in float64")
        model: Any = self.module
        return model.clip_grad_norm_


def synchronized_units(module: nn.Module, wrap: Policy, process_group: dist.ProcessGroup | None) -> list[nn.Module]:
    """Give every rank rank 0's values, and return the units; Unsupported where units share parameters, or where
    parameters have no elements, no dimensions or gaps in memory."""
    check_unsharded(module)
    for name, parameter in module.named_parameters():
        if odd := [kind for kind, has in ODD_PARAMETERS.items() if has(parameter)]:
            raise Unsupported(f"PyTorch's FSDP takes no {odd[0]}, as {name!r} is one")
    check_same_module(module, process_group)
    units = choose_units(wrap, module)
    if shared := shared_between(module, units):
        raise Unsupported(f"PyTorch's FSDP takes tied parameters within one unit, and {shared!r} is in two")
    broadcast_state(module, process_group)
    return units


register("fsdp", "fsdp1", TorchFSDP1, tested_briefly=True, predicted=True, called="FSDP1")
register(
    "fsdp", "fsdp1_post", partial(TorchFSDP1, backward_prefetch="post"), called="FSDP1 that prefetches after backward"
)
register("fsdp", "fsdp1_no_prefetch", partial(TorchFSDP1, backward_prefetch=None), called="FSDP1 without prefetch")
register(
    "fsdp", "fsdp1_forward_prefetch", partial(TorchFSDP1, forward_prefetch=True), called="FSDP1 with forward prefetch"
)
register("fsdp", "fsdp2", TorchFSDP2, tested_briefly=True, predicted=True, called="FSDP2")
register(
    "fsdp",
    "fsdp2_kept",
    partial(TorchFSDP2, reshard_after_forward=False),
    facts=Facts(reshard_after_forward=False),
    predicted=True,
    called="FSDP2 without resharding after forward",
)
register(
    "fsdp",
    "fsdp2_hybrid",
    partial(TorchFSDP2, hybrid=True),
    requires=(_requires_nodes,),
    tested_briefly=True,
    called="FSDP2 within each node",
)
