"""Clipping on a mesh of ranks: gradients scaled by their norm, in which each parameter counts once.

    norm = clip_by_axes(model.parameters(), max_norm=1.0)

`clip_gathered` gathers every gradient, `clip_by_axes` sends one number for each set of axes, and `library` is PyTorch's
own `clip_grad_norm_`.
"""

from __future__ import annotations

from impl.clipping.base import scale_, whole_gradients
from impl.clipping.contract import Clip, adapted

# Implementations register in this order, the reference first, which is the order in every list and table.
# isort: off
from impl.clipping.gathered import clip_gathered, gathered_norm
from impl.clipping.by_axes import clip_by_axes, total_norm
from impl.clipping.library import clip_by_torch
# isort: on

__all__ = [
    "Clip",
    "adapted",
    "clip_by_axes",
    "clip_by_torch",
    "clip_gathered",
    "gathered_norm",
    "scale_",
    "total_norm",
    "whole_gradients",
]
