"""FlashAttention without a backward of its own, and with a mistake that no short sequence shows: can you see it?

pytest correctness --impl attention=examples/flash_attention_wrong.py:attention
"""

import torch
from flash_attention import check, precise, scores_of, tile, tiles


def attention(q, k, v, *, is_causal=False):
    """q (..., queries, dim), k and v (..., keys, dim)."""
    check(q, k, v)
    outputs = []
    for rows in tiles(q):
        biggest = torch.tensor(float("-inf"), device=q.device)
        total, summed = 0.0, 0.0
        for columns in tiles(k, before=rows.stop if is_causal else None):
            scores = scores_of(q, k, rows, columns, is_causal)  # (..., rows, columns)
            before, biggest = biggest, torch.maximum(biggest, scores.amax(-1, keepdim=True))
            weights = (scores - biggest).exp()
            total = total * (before - biggest).exp() + weights.sum(-1, keepdim=True)
            summed = summed + weights @ tile(v, columns, q)
        outputs.append((summed / total).to(q.dtype))
    return torch.cat(outputs, -2) if outputs else torch.empty_like(q, dtype=precise(q))
