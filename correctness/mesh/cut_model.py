"""A decoder that is cut over a mesh by hand, with plain tensors: products over `tp` with sequence parallelism
(Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models", 2022), experts over `ep`; keys and
values are gathered over `cp`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import embedding, silu

from correctness.mesh.operators import Gather, Group, Scatter, equal_part, summed
from impl.mesh import Decoder
from impl.mesh.decoder import Attention, Experts, FeedForward, Layer, MixtureOfExperts
from shardmark.api import Unsupported

SEQUENCE = 1
"""The dimension of activations that sequence parallelism cuts."""


class CutModel:
    """A decoder whose parameters are this rank's parts."""

    axes: tuple[str, ...] = ("dp", "shard", "cp", "tp")

    def __init__(self, model: Decoder, mesh: DeviceMesh) -> None:
        names = list(mesh.mesh_dim_names or ())
        if other := [name for name in names if name not in self.axes]:
            raise Unsupported(f"it takes {', '.join(self.axes)}, and not {', '.join(other)}")
        self.mesh, self.model = mesh, model
        self.groups: dict[str, Group] = {name: mesh.get_group(name) for name in names if mesh[name].size() > 1}
        self.groups |= self.expert_group()
        self.cuts: dict[str, tuple[str, int]] = {}
        """Axis and dimension along which a parameter is cut, by its name."""
        self.cut()

    # The mesh.

    def expert_group(self) -> dict[str, Group]:
        try:
            ep = self.mesh["ep"]
        except KeyError:
            return {}
        return {"ep": ep.get_group()} if ep.size() > 1 else {}

    def group(self, axis: str) -> Group:
        return self.groups.get(axis)

    def size(self, axis: str) -> int:
        group = self.group(axis)
        return 1 if group is None else dist.get_world_size(group)

    def rank(self, axis: str) -> int:
        group = self.group(axis)
        return 0 if group is None else dist.get_rank(group)

    def data_axes(self) -> tuple[str, ...]:
        return ("dp", "shard", "cp")

    def data_ranks(self) -> int:
        return math.prod(self.size(axis) for axis in self.data_axes())

    def over(self, value: Tensor, axes: Iterable[str]) -> Tensor:
        for axis in axes:
            value = summed(value, self.group(axis))
        return value

    # Cutting the model.

    def cut(self) -> None:
        for index, layer in enumerate(self.model.layers):
            if not isinstance(layer, Layer):  # of another stage
                continue
            if self.group("tp") is not None or self.group("cp") is not None:
                self.cut_attention(layer.attention, f"layers.{index}.attention")
            feed_forward = layer.feed_forward
            if isinstance(feed_forward, MixtureOfExperts):
                self.cut_mixture(feed_forward, f"layers.{index}.feed_forward")
            elif self.group("tp") is not None:
                self.cut_feed_forward(feed_forward, f"layers.{index}.feed_forward")
        if self.group("tp") is not None:
            self.cut_vocabulary()
            self.model.forward = MethodType(partial(self.forward, self.model.forward), self.model)  # type: ignore[method-assign]

    def part(self, weight: Tensor, axis: str, dim: int) -> Tensor:
        """This rank's part of a weight."""
        if weight.shape[dim] % self.size(axis):
            raise Unsupported(f"{tuple(weight.shape)} cannot be cut over {self.size(axis)} ranks of {axis}")
        return weight.chunk(self.size(axis), dim)[self.rank(axis)]

    def cut_parameter(self, module: nn.Module, name: str, prefix: str, axis: str, dim: int) -> None:
        whole = getattr(module, name)
        own = nn.Parameter(self.part(whole.detach(), axis, dim).clone(), requires_grad=whole.requires_grad)
        setattr(module, name, own)
        self.cuts[f"{prefix}.{name}"] = axis, dim

    def cut_attention(self, attention: Attention, prefix: str) -> None:
        if self.group("tp") is not None:
            if attention.wk.out_features // attention.head_dim % self.size("tp"):
                raise Unsupported(f"heads of keys and values cannot be cut over {self.size('tp')} ranks")
            for name in ("wq", "wk", "wv"):
                self.cut_parameter(getattr(attention, name), "weight", f"{prefix}.{name}", "tp", 0)
            self.cut_parameter(attention.wo, "weight", f"{prefix}.wo", "tp", 1)
            self.wrap(attention, self.enter, self.leave)
        if self.group("cp") is not None:
            attention.attend = self.attend  # type: ignore[method-assign]

    def cut_feed_forward(self, feed_forward: FeedForward, prefix: str) -> None:
        for name, dim in (("w1", 0), ("w3", 0), ("w2", 1)):
            self.cut_parameter(getattr(feed_forward, name), "weight", f"{prefix}.{name}", "tp", dim)
        self.wrap(feed_forward, self.enter, self.leave)

    def cut_mixture(self, mixture: MixtureOfExperts, prefix: str) -> None:
        """Every rank of `tp` computes the same experts on the whole sequence."""
        if self.group("ep") is not None:
            for name in ("w1", "w2"):
                self.cut_parameter(mixture.experts, name, f"{prefix}.experts", "ep", 0)
            mixture.experts.forward = MethodType(self.run_experts, mixture.experts)  # type: ignore[method-assign]
        if self.group("tp") is not None:
            self.wrap(mixture, self.enter_whole, self.leave_whole)

    def cut_vocabulary(self) -> None:
        model = self.model
        tied = model.output.weight is model.tok_embeddings.weight
        self.cut_parameter(model.tok_embeddings, "weight", "tok_embeddings", "tp", 0)
        if tied:
            model.output.weight = model.tok_embeddings.weight
        else:
            self.cut_parameter(model.output, "weight", "output", "tp", 0)
        model.tok_embeddings.forward = self.embed  # type: ignore[method-assign]

    def wrap(self, module: nn.Module, enter: Callable[[Tensor], Tensor], leave: Callable[[Tensor], Tensor]) -> None:
        inner = module.forward
        module.forward = lambda x, *more: leave(inner(enter(x), *more))  # type: ignore[method-assign]

    # Forward.

    def forward(self, inner: Any, model: Decoder, tokens: Tensor, positions: Tensor) -> Tensor:
        """Between layers each rank of `tp` has its part of the sequence; logits are of its part of the vocabulary."""
        x = self.model.tok_embeddings(tokens)
        for layer in model.layers:
            x = layer(x, positions)
        return model.output(self.enter(model.norm(x)))

    def enter(self, x: Tensor) -> Tensor:
        """The whole sequence, for products of which each rank has a part."""
        return Gather.apply(x, SEQUENCE, self.group("tp"), True)

    def leave(self, x: Tensor) -> Tensor:
        """This rank's part of the sequence, of the sum of what the ranks' parts of a product give."""
        return equal_part(x, SEQUENCE, self.group("tp"), True)

    def enter_whole(self, x: Tensor) -> Tensor:
        """The whole sequence, for work that each rank does alike."""
        return Gather.apply(x, SEQUENCE, self.group("tp"), False)

    def leave_whole(self, x: Tensor) -> Tensor:
        return equal_part(x, SEQUENCE, self.group("tp"))

    def embed(self, tokens: Tensor) -> Tensor:
        weight = self.model.tok_embeddings.weight
        first = self.rank("tp") * weight.shape[0]
        own = (tokens >= first) & (tokens < first + weight.shape[0])
        found = embedding(torch.where(own, tokens - first, 0), weight) * own[..., None]
        return self.leave(found)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Queries of this rank's slice of the context, keys and values of all slices."""
        keys, values = self.gather_keys(k), self.gather_keys(v)
        keys, values = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (keys, values))
        scores = q @ keys.transpose(-2, -1) * self.scale(q)
        return scores.masked_fill(~self.seen(q.shape[2], keys.shape[2]), -math.inf).softmax(-1) @ values

    def gather_keys(self, x: Tensor) -> Tensor:
        return Gather.apply(x, 2, self.group("cp"), True)

    def scale(self, q: Tensor) -> float:
        return 1 / math.sqrt(q.shape[-1])

    def seen(self, queries: int, keys: int) -> Tensor:
        """Which keys each query of this rank's slice sees."""
        return torch.ones(queries, keys, dtype=torch.bool).tril(self.rank("cp") * queries)

    def run_experts(self, experts: Experts, x: Tensor, shares: Tensor) -> Tensor:
        """This rank's experts on the tokens of all ranks of `ep`, which get the sums of all experts' outputs back."""
        everyone, all_shares = (self.to_experts(each) for each in (x, shares))
        own = self.own_shares(all_shares, experts.w1.shape[0])
        hidden = silu(torch.einsum("td,ehd->teh", everyone, experts.w1))
        out = torch.einsum("teh,edh,te->td", hidden, experts.w2, own)
        return Scatter.apply(out, 0, x.shape[0], self.group("ep"), True)

    def to_experts(self, x: Tensor) -> Tensor:
        return Gather.apply(x, 0, self.group("ep"), True)

    def own_shares(self, shares: Tensor, experts: int) -> Tensor:
        return shares.narrow(1, self.rank("ep") * experts, experts)
