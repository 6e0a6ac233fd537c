"""Right training on meshes that differs from ours: the tests must accept it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from correctness.mesh.operators import Gather, summed
from correctness.support.planting import right
from impl.mesh import Decoder
from impl.mesh.decoder import Attention, FeedForward
from impl.mesh.replicated import refuse_but
from shardmark.api import Unsupported


def _rows(mesh: DeviceMesh) -> DeviceMesh | None:
    """The one axis of rows of their own; Unsupported where there are two."""
    names = [name for name in mesh.mesh_dim_names or () if name in ("dp", "shard")]
    if len(names) > 1:
        raise Unsupported("it takes dp or shard")
    return mesh[names[0]] if names else None


@right("PyTorch's DistributedDataParallel over dp, whose names have a prefix; ranks of tp do the same")
def distributed(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    if "dp" not in refuse_but(mesh, "dp", "tp"):
        return model
    return DistributedDataParallel(model, process_group=mesh.get_group("dp"), find_unused_parameters=True)


@right("each gradient is averaged by a hook as soon as backward has added to it")
def averages_in_hooks(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    names = refuse_but(mesh, "dp", "tp")
    group = mesh.get_group("dp") if "dp" in names else None

    def average(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        parameter.grad = summed(parameter.grad, group) / dist.get_world_size(group)

    if group is not None:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(average)
    return model


class _AtTheEnd(nn.Module):
    def __init__(self, module: nn.Module, mesh: DeviceMesh, axes: Sequence[str]) -> None:
        super().__init__()
        self.module, self.groups = module, [mesh.get_group(axis) for axis in axes]

    def forward(self, *args: Any) -> Any:
        return self.module(*args)

    def finish_gradient_synchronization(self) -> None:
        own = [p for p in self.module.parameters() if p.requires_grad]
        flat = torch.cat([(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in own])
        for group in self.groups:
            flat = summed(flat, group) / dist.get_world_size(group)
        for parameter, part in zip(own, flat.split([p.numel() for p in own]), strict=True):
            parameter.grad = part.view_as(parameter).clone()


@right("gradients are averaged as one flat tensor at the end, one axis after the other, and never sharded")
def flat_at_the_end(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    names = refuse_but(mesh, "dp", "shard", "tp")
    return _AtTheEnd(model, mesh, [name for name in names if name in ("dp", "shard")])


@right("PyTorch's fully_shard of the whole model as one unit")
def one_unit(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    refuse_but(mesh, "dp", "shard", "tp")
    rows = _rows(mesh)
    return model if rows is None else fully_shard(model, mesh=rows)


@right("fully_shard of each linear, which stays gathered after forward")
def stays_gathered(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    refuse_but(mesh, "shard", "tp")
    rows = _rows(mesh)
    if rows is None:
        return model
    assert isinstance(model, Decoder)
    for layer in model.layers:
        fully_shard(layer.attention, mesh=rows, reshard_after_forward=False)
    return fully_shard(model, mesh=rows, reshard_after_forward=False)


@right("fully_shard of layers that are recomputed in backward")
def recomputed(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    names = tuple(name for name in refuse_but(mesh, "dp", "shard", "tp") if name != "tp")
    assert isinstance(model, Decoder)
    for index, layer in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(layer)
        if names:
            fully_shard(model.layers[index], mesh=mesh[names])
    return fully_shard(model, mesh=mesh[names]) if names else model


@right("the feed-forward networks alone are cut over tp")
def cuts_feed_forward(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    names = refuse_but(mesh, "shard", "tp")
    assert isinstance(model, Decoder)
    for layer in model.layers:
        if "tp" in names and isinstance(layer.feed_forward, FeedForward):
            plan = {"w1": ColwiseParallel(), "w2": RowwiseParallel(), "w3": ColwiseParallel()}
            parallelize_module(layer.feed_forward, mesh["tp"], plan)
    return fully_shard(model, mesh=mesh["shard"]) if "shard" in names else model


@right("PyTorch's sequence parallelism: norms on slices, whose gradients are summands until they are added")
def sequence_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    names = refuse_but(mesh, "shard", "tp")
    assert isinstance(model, Decoder)
    if "tp" not in names or model.size.experts or model.size.tied:
        raise Unsupported("it takes tp, and neither experts nor tied embeddings")
    if not all(parameter.requires_grad for parameter in model.parameters()):
        raise Unsupported("PyTorch's SequenceParallel thaws frozen norms")
    tp = mesh["tp"]
    whole = PrepareModuleInput(
        input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None), use_local_output=True
    )
    for layer in model.layers:
        plan = {
            "attention_norm": SequenceParallel(),
            "ffn_norm": SequenceParallel(),
            "attention": whole,
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(layer, tp, plan)
    parallelize_module(
        model,
        tp,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        },
    )
    return fully_shard(model, mesh=mesh["shard"]) if "shard" in names else model


def _gathers_keys(attention: Attention, mesh: DeviceMesh, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    group, first = mesh.get_group("cp"), mesh.get_local_rank("cp") * q.shape[2]
    keys, values = (Gather.apply(x, 2, group, True).repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    seen = torch.arange(keys.shape[2]) <= torch.arange(first, first + q.shape[2])[:, None]
    scores = torch.einsum("bhqd,bhkd->bhqk", q, keys) / q.shape[-1] ** 0.5
    return scores.where(seen, -torch.inf).softmax(-1) @ values


@right("attention gathers keys and values over cp, and PyTorch's wrapper averages over dp and cp together")
def gathers_keys(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    names = refuse_but(mesh, "dp", "cp")
    assert isinstance(model, Decoder)
    if "cp" in names:
        for layer in model.layers:
            layer.attention.attend = partial(_gathers_keys, layer.attention, mesh)
    return _AtTheEnd(model, mesh, names)
