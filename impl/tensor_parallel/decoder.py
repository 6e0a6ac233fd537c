"""The decoder with each matrix cut over the ranks of `tp`; a technique is the way its products communicate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad, rms_norm, silu

from impl.distributed import local
from impl.mesh.decoder import IGNORED, Attention, Decoder, FeedForward, Layer, causal_attention, of_groups, rotated
from impl.tensor_parallel.communication import GatherColumns, Group, SumGradient, with_bias
from impl.tensor_parallel.drawing import drawing_apart
from impl.tensor_parallel.placing import cut, whole
from impl.tensor_parallel.vocabulary import VocabularyLoss, embedded
from shardmark.api import Unsupported


class Products(Protocol):
    """Products between parts of weights, and what is sent for them. Between layers a rank has its own tokens: all of
    them, or a slice."""

    @property
    def group(self) -> Group: ...

    @property
    def multiple(self) -> int:
        """The number of tokens is padded to a multiple of it."""
        ...

    def column(self, x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """Column-parallel products: of own tokens, (own tokens, dim), with each weight (own columns, dim); returns
        (tokens, own columns) of all tokens."""
        ...

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """A row-parallel product: of (tokens, own rows) with a weight (dim, own rows); returns (own tokens, dim). The
        bias, whole on every rank, is added to the sum, once."""
        ...

    def reduce(self, summand: Tensor) -> Tensor:
        """Own tokens of the sum over ranks of (tokens, dim)."""
        ...

    def whole(self, parameter: Tensor) -> Tensor:
        """A parameter that every rank has whole, for use with its own tokens."""
        ...

    def dropped(self, x: Tensor, p: float) -> Tensor:
        """Dropout of own tokens with probability p; ranks that share a token drop the same of its values."""
        ...


def columns(products: Products, x: Tensor, *layers: tuple[Tensor, Tensor | None]) -> list[Tensor]:
    """Column-parallel linear layers of the same input: own parts of each one's weight and bias."""
    outputs = products.column(x, [weight for weight, _ in layers])
    return [with_bias(out, bias) for out, (_, bias) in zip(outputs, layers, strict=True)]


def normalized(products: Products, x: Tensor, norm: nn.RMSNorm) -> Tensor:
    return rms_norm(x, norm.normalized_shape, products.whole(local(norm.weight)), norm.eps)


def own(layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
    """This rank's parts of a linear layer's weight and bias."""
    return local(layer.weight), None if layer.bias is None else local(layer.bias)


def cut_columns(layer: nn.Linear, mesh: DeviceMesh) -> nn.Linear:
    layer.weight = cut(layer.weight, mesh, 0)
    layer.bias = None if layer.bias is None else cut(layer.bias, mesh, 0)
    return layer


def cut_rows(layer: nn.Linear, mesh: DeviceMesh) -> nn.Linear:
    layer.weight = cut(layer.weight, mesh, 1)
    layer.bias = None if layer.bias is None else whole(layer.bias, mesh)
    return layer


def held_whole(layer: nn.Linear, mesh: DeviceMesh) -> nn.Linear:
    layer.weight = whole(layer.weight, mesh)
    layer.bias = None if layer.bias is None else whole(layer.bias, mesh)
    return layer


class ParallelAttention(nn.Module):
    """Each rank has as many heads as others. Where the ranks do not divide the heads of keys and values, their weights
    are whole, and a rank uses the rows of those that its own queries need. A fused product is cut by groups."""

    def __init__(self, attention: Attention, mesh: DeviceMesh, products: Products) -> None:
        super().__init__()
        self.training = attention.training
        self.products, self.head_dim, self.dropout = products, attention.head_dim, attention.dropout
        self.per_group, self.fused, self.kv_is_cut = attention.per_group, attention.fused, True
        if self.fused:
            groups = attention.wqkv.out_features // ((self.per_group + 2) * self.head_dim)
            if groups % mesh.size():
                raise Unsupported(f"a fused product of {groups} groups cannot be cut over {mesh.size()} ranks")
            self.wqkv, self.wo = cut_columns(attention.wqkv, mesh), cut_rows(attention.wo, mesh)
            return
        ranks, rank = mesh.size(), mesh.get_local_rank()
        heads, kv_heads = (each.out_features // self.head_dim for each in (attention.wq, attention.wk))
        if heads % ranks:
            raise Unsupported(f"{heads} heads cannot be cut over {ranks} ranks")
        self.kv_is_cut = kv_heads % ranks == 0
        place = cut_columns if self.kv_is_cut else held_whole
        self.wq, self.wo = cut_columns(attention.wq, mesh), cut_rows(attention.wo, mesh)
        self.wk, self.wv = place(attention.wk, mesh), place(attention.wv, mesh)
        per_rank = heads // ranks
        needed = [head // self.per_group for head in range(rank * per_rank, (rank + 1) * per_rank)]
        self.kv_of_heads = [head - needed[0] for head in needed]
        """The head of keys that each own head of queries uses, among those that this rank needs."""
        self.kv_rows = slice(needed[0] * self.head_dim, (needed[-1] + 1) * self.head_dim)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """x: (own tokens, dim); positions: (rows, context)."""
        q, k, v = self.heads(x)
        tokens, padding = positions.numel(), q.shape[0] - positions.numel()
        q, k, v = (each[:tokens].unflatten(0, positions.shape).transpose(1, 2) for each in (q, k, v))
        q, k = rotated(q, positions), rotated(k, positions)
        if not self.kv_is_cut and k.shape[1] > 1:  # which heads share one may differ from rank to rank
            k, v = k[:, self.kv_of_heads], v[:, self.kv_of_heads]
        mixed = self.attend(q, k, v).transpose(1, 2).flatten(2).flatten(0, 1)  # (tokens, own heads * head_dim)
        return self.products.row(pad(mixed, (0, 0, 0, padding)) if padding else mixed, *own(self.wo))

    def heads(self, x: Tensor) -> Sequence[Tensor]:
        """Own queries, keys and values of all tokens, (tokens, own heads, head_dim)."""
        if self.fused:
            (fused,) = columns(self.products, x, own(self.wqkv))
            return of_groups(fused, self.per_group, self.head_dim)
        every = columns(self.products, x, own(self.wq), self.own_kv(self.wk), self.own_kv(self.wv))
        return [each.unflatten(-1, (-1, self.head_dim)) for each in every]

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention; dropout draws other numbers on each rank, as each has other heads."""
        if not self.training or self.dropout == 0.0:
            return causal_attention(q, k, v, 0.0)
        with drawing_apart(q.device, self.products.group):
            return causal_attention(q, k, v, self.dropout)

    def own_kv(self, layer: nn.Linear) -> tuple[Tensor, Tensor | None]:
        weight, bias = own(layer)
        if self.kv_is_cut:
            return weight, bias
        group = self.products.group
        weight = SumGradient.apply(weight, group)[self.kv_rows]
        return weight, None if bias is None else SumGradient.apply(bias, group)[self.kv_rows]


class ParallelFeedForward(nn.Module):
    """SwiGLU: w1 and w3 are cut by columns, w2 by rows, so that the hidden values stay on their rank."""

    def __init__(self, feed_forward: FeedForward, mesh: DeviceMesh, products: Products) -> None:
        super().__init__()
        self.training, self.products = feed_forward.training, products
        self.w1, self.w2 = cut_columns(feed_forward.w1, mesh), cut_rows(feed_forward.w2, mesh)
        self.w3 = cut_columns(feed_forward.w3, mesh)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = columns(self.products, x, own(self.w1), own(self.w3))
        return self.products.row(silu(gate) * up, *own(self.w2))


class ParallelLayer(nn.Module):
    """Attention and a feed-forward network, each behind a norm; x: (own tokens, dim)."""

    def __init__(self, layer: Layer, mesh: DeviceMesh, products: Products) -> None:
        super().__init__()
        if not isinstance(layer.feed_forward, FeedForward):
            raise Unsupported("it cuts no experts")
        self.training, self.products = layer.training, products
        self.attention_norm, self.ffn_norm, self.dropout = layer.attention_norm, layer.ffn_norm, layer.dropout
        for norm in (self.attention_norm, self.ffn_norm):
            norm.weight = whole(norm.weight, mesh)
        self.attention = ParallelAttention(layer.attention, mesh, products)
        self.feed_forward = ParallelFeedForward(layer.feed_forward, mesh, products)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        x = x + self.dropped(self.attention(normalized(self.products, x, self.attention_norm), positions))
        return x + self.dropped(self.feed_forward(normalized(self.products, x, self.ffn_norm)))

    def dropped(self, x: Tensor) -> Tensor:
        p = self.dropout.p if self.training else 0.0
        return self.products.dropped(x, p) if p else x


class TensorParallelDecoder(nn.Module):
    """See `impl.tensor_parallel.Parallelize` for how it is called."""

    def __init__(self, model: Decoder, mesh: DeviceMesh, products: Products) -> None:
        super().__init__()
        self.training = model.training
        self.products, self.vocabulary = products, model.output.out_features
        self.first = mesh.get_local_rank() * -(-self.vocabulary // mesh.size())
        """The first row of the vocabulary that is this rank's."""
        tied = model.output.weight is model.tok_embeddings.weight
        self.tok_embeddings, self.norm = model.tok_embeddings, model.norm
        self.tok_embeddings.weight = cut(self.tok_embeddings.weight, mesh, 0)
        self.norm.weight = whole(self.norm.weight, mesh)
        self.layers = nn.ModuleList(
            ParallelLayer(layer, mesh, products) for layer in model.layers if isinstance(layer, Layer)
        )
        self.output = cut_columns(model.output, mesh)
        if tied:
            self.output.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor | None = None) -> Tensor:
        flat = tokens.flatten()
        padding = -len(flat) % self.products.multiple
        if padding:  # with a token of the batch: another one's embedding might not be finite
            flat = torch.cat([flat, flat[-1:].expand(padding)])
        x = self.embed(flat)
        for layer in self.layers:
            x = layer(x, positions)
        (logits,) = columns(self.products, normalized(self.products, x, self.norm), own(self.output))
        if targets is None:
            every = GatherColumns.apply(logits, self.vocabulary, self.products.group)
            return every[: tokens.numel()].view(*tokens.shape, self.vocabulary)
        return self.losses(logits, pad(targets.flatten(), (0, padding), value=IGNORED))

    def embed(self, tokens: Tensor) -> Tensor:
        """(tokens) to (own tokens, dim)."""
        return self.products.reduce(embedded(tokens, local(self.tok_embeddings.weight), self.first))

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The sum of the losses, by own columns of the logits (tokens, own columns)."""
        precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return VocabularyLoss.apply(precise, targets, self.first, self.products.group)
