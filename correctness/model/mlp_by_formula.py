"""The MLP language model written as one formula."""

import torch
from torch import Tensor


def plain(w: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits by the formula; it shares no layer with the model."""
    x = w["embedding.weight"][tokens]
    for i in range(sum(name.endswith("w1.weight") for name in w)):
        hidden = torch.einsum("btd,hd->bth", x, w[f"blocks.{i}.w1.weight"]) + w[f"blocks.{i}.w1.bias"]
        gelu = hidden * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)))
        x = x + torch.einsum("bth,dh->btd", gelu, w[f"blocks.{i}.w2.weight"]) + w[f"blocks.{i}.w2.bias"]
    centered = x - x.mean(-1, keepdim=True)
    normed = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return (normed * w["norm.weight"] + w["norm.bias"]) @ w["output.weight"].T
