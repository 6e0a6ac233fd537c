"""Which experts tokens go to, in a simulation: the router's choices get values, by the share of tokens of each expert.

A mixture of experts whose forward loops over experts (`x[mask]`, `torch.where`, `nonzero`) has tensors whose sizes are
the numbers of tokens of each expert. All of these follow from the indices of one `topk`, `argmax` or `max`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload

from shardmark.api.registry import Unsupported

aten = torch.ops.aten

_INDICES = {aten.topk.default: 1, aten.max.dim: 1, aten.argmax.default: None}
"""Operators of routers, and which of their results has the indices; None: the only one."""


@dataclass(frozen=True)
class Routing:
    """Shares of the tokens' choices, one for each expert; empty for equal shares of any number of experts."""

    shares: tuple[float, ...] = ()

    @classmethod
    def of(cls, text: str | None) -> Routing | None:
        """The routing of `--routing`, checked by `shardmark.api.recipe`; None without it."""
        if text is None:
            return None
        return cls() if text == "uniform" else cls(tuple(float(share) for share in text.split(",")))

    def choose(self, operator: OpOverload, args: tuple[Any, ...], results: Any) -> Tensor | None:
        """Fill the indices among a router's results, and return them; None for any other operator.

        A router chooses along the last dimension, which has an entry for each expert.
        """
        if operator not in _INDICES or not args[0].is_floating_point():
            return None
        experts, dims = args[0].size(-1), args[0].dim()
        place = 2 if operator is aten.topk.default else 1
        dim = args[place] if len(args) > place else -1 if operator is aten.topk.default else None
        if dim not in (-1, dims - 1) or experts < 2 or len(self.shares) not in (0, experts):
            return None
        which = _INDICES[operator]
        indices: Tensor = results if which is None else results[which]
        each = args[1] if operator is aten.topk.default else 1
        chosen = self.chosen(indices.numel() // max(each, 1), each, experts)
        indices.copy_(torch.from_numpy(chosen).view(indices.shape))
        return indices

    def chosen(self, tokens: int, each: int, experts: int) -> Any:
        """Different experts of each token, (tokens, each): an expert's number of tokens is its share, to one token.

        Systematic sampling (Madow, 1949). Unsupported where an expert's share is more than all tokens.
        """
        shares = np.array(self.shares or [1.0] * experts)
        expected = each * shares / shares.sum()
        if expected.max() > 1 + 1e-9:
            raise Unsupported(f"--routing: each token goes to {each} experts, so a share is at most {1 / each:.3g}")
        points = (np.arange(tokens)[:, None] + 0.5) / max(tokens, 1) + np.arange(each)
        return np.minimum(np.searchsorted(np.cumsum(expected), points, side="right"), experts - 1)
