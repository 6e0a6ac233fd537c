"""Mistakes that attention is known for, each as a right attention with one step changed."""

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from impl.attention import kv_group, per_query_head

TILES = (16, 32, 64, 128, 256)


def mistakes(q: Tensor, k: Tensor, is_causal: bool) -> dict[str, Callable[..., Tensor]]:
    """The mistakes that make a difference for such inputs, each a function of (q, k, v, *, is_causal)."""
    q_len, k_len, head_dim, group = q.shape[-2], k.shape[-2], q.shape[-1], kv_group(q, k)
    found: dict[str, Callable[..., Tensor]] = {
        "without the scale 1/√head_dim": partial(_attention, scale=1.0),
        "with the scale 1/head_dim": partial(_attention, scale=1 / head_dim),
    }
    if is_causal:
        found["without the causal mask"] = partial(_attention, first=k_len)
        found["with a mask that hides each query's own key"] = partial(_attention, first=0)
        found["with a mask that shows one key too many"] = partial(_attention, first=2)
        found["with a mask aligned at the last key"] = partial(_attention, first=1 + k_len - q_len)
    if group > 1:
        found["with heads of k and v in the order 0 1 0 1"] = partial(_attention, tiled=True)
    tiles = [tile for tile in TILES if tile < k_len and k_len % tile]
    for keys, of in _grouped(tiles, lambda tile: k_len // tile * tile).items():
        found[f"without the last {k_len - keys} keys, beyond whole tiles of {of}"] = partial(_attention, keys=keys)
    for padded, of in _grouped(tiles, lambda tile: -k_len % tile).items():
        found[f"with zeros as keys up to a whole tile of {of}"] = partial(_attention, padded=padded)
    return found


def _grouped(tiles: list[int], by: Callable[[int], int]) -> dict[int, str]:
    """The tiles with which the same is done, as in "16 or 32"."""
    values = dict.fromkeys(map(by, tiles))
    return {value: " or ".join(str(tile) for tile in tiles if by(tile) == value) for value in values}


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    is_causal: bool,
    scale: float | None = None,
    first: int = 1,
    keys: int | None = None,
    padded: int = 0,
    tiled: bool = False,
) -> Tensor:
    """Attention over the first `keys` keys and `padded` zeros; its mask hides keys from the diagonal `first` on."""
    group = kv_group(q, k)
    k, v = (torch.cat([x] * group, dim=-3) if tiled else per_query_head(x, group) for x in (k, v))
    k, v = (torch.nn.functional.pad(x[..., :keys, :], (0, 0, 0, padded)) for x in (k, v))
    scores = q @ k.mT * (scale or 1 / math.sqrt(q.shape[-1]))
    if is_causal:
        hidden = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool, device=q.device).triu(first)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v
