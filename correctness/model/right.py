"""Right language models that work in unusual ways: the tests must accept them."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, rms_norm, scaled_dot_product_attention, silu

from correctness.model.transformer_parts import Parts
from correctness.support.planting import right
from impl.model import Transformer, TransformerSize


@right("PyTorch's own functions over a dict of weights, a rotation matrix for RoPE, and a mask that is saved")
class Functional(nn.Module):
    def __init__(self, size: TransformerSize, *, context_length: int) -> None:
        super().__init__()
        self.size, self.context_length = size, context_length
        self.parts = Transformer(size, context_length=context_length)
        for name, part in list(self.parts.named_children()):
            self.add_module(name, part)
        del self.parts
        half = torch.arange(0, size.head_dim, 2, dtype=torch.float64)
        angles = torch.outer(torch.arange(context_length, dtype=torch.float64), 10_000.0 ** (-half / size.head_dim))
        rotation = torch.stack((angles.cos(), -angles.sin(), angles.sin(), angles.cos()), -1)
        self.rotation = rotation.unflatten(-1, (2, 2))  # no buffer, which `to(bfloat16)` would round
        self.register_buffer(
            "mask", torch.ones(context_length, context_length, dtype=torch.bool).tril(), persistent=False
        )

    def forward(self, tokens: Tensor) -> Tensor:
        batch, context = tokens.shape
        if context > self.context_length:
            raise ValueError("too long")
        if tokens.device.type == "cpu" and ((tokens < 0) | (tokens >= self.size.vocab)).any():
            raise ValueError("no such token")
        w = dict(self.named_parameters())
        x = embedding(tokens, w["embedding.weight"])
        for i in range(self.size.layers):
            block = f"blocks.{i}."
            normed = self._norm(x, w[f"{block}attention_norm.weight"])
            q, k, v = (
                linear(normed, w[f"{block}attention.{name}.weight"]).view(batch, context, self.size.heads, -1)
                for name in ("query", "key", "value")
            )
            q, k, v = (each.transpose(1, 2) for each in (self._rotate(q), self._rotate(k), v))
            mixed = scaled_dot_product_attention(q, k, v, attn_mask=self.mask[:context, :context])
            x = x + linear(mixed.transpose(1, 2).flatten(-2), w[f"{block}attention.output.weight"])
            normed = self._norm(x, w[f"{block}feed_forward_norm.weight"])
            both = linear(normed, torch.cat([w[f"{block}feed_forward.w{n}.weight"] for n in (1, 3)]))
            gate, up = both.chunk(2, -1)
            x = x + linear(silu(gate) * up, w[f"{block}feed_forward.w2.weight"])
        return linear(self._norm(x, w["norm.weight"]), w["output.weight"])

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return rms_norm(x, x.shape[-1:], weight.to(x.dtype), 1e-5)

    def _rotate(self, x: Tensor) -> Tensor:
        rotation = self.rotation[: x.shape[1]].to(x)
        return torch.einsum("tpij,bthpj->bthpi", rotation, x.unflatten(-1, (-1, 2))).flatten(-2)


@right("a sequence at a time, and the tokens of it that are asked for in one batch")
class OneByOne(Transformer):
    def forward(self, tokens: Tensor) -> Tensor:
        return torch.cat([super(OneByOne, self).forward(one[None]) for one in tokens])


@right("a function that makes it, with options in between")
def made(size: TransformerSize, *, context_length: int, **options: Any) -> nn.Module:
    return Transformer(size, context_length=context_length, **options)


@right("RoPE over halves of a head whose features are in another order, and logits in three parts")
class RotatesHalves(Transformer):
    def __init__(self, size: TransformerSize, *, context_length: int) -> None:
        super().__init__(size, context_length=context_length)
        for block in self.blocks:
            block.attention.rotary = _Halves()
        self.output.forward = self._in_thirds

    def _in_thirds(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x, part) for part in self.output.weight.tensor_split(3)], -1)


class _Halves(nn.Module):
    """Permutes queries and keys alike, so their products are unchanged."""

    def forward(self, x: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        frequencies = torch.exp(torch.arange(half, dtype=torch.float64, device=x.device) * (-math.log(10_000) / half))
        angles = torch.arange(x.shape[-2], dtype=torch.float64, device=x.device)[:, None] * frequencies
        cos, sin = (table.repeat(1, 2).to(x.dtype) for table in (angles.cos(), angles.sin()))
        even, odd = x[..., 0::2], x[..., 1::2]
        return torch.cat((even, odd), -1) * cos + torch.cat((-odd, even), -1) * sin


@right("angles in float32, as most models have them, but for float64")
class AnglesInFloat32(Parts):
    def positions(self, context: int, x: Tensor) -> Tensor:
        return super().positions(context, x).to(torch.promote_types(x.dtype, torch.float32))

    def frequencies(self, x: Tensor) -> Tensor:
        return super().frequencies(x).to(torch.promote_types(x.dtype, torch.float32))
