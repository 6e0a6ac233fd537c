"""Strides in which arguments and gradients come, each a view of the same values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from correctness.layers.operations import Inputs

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns_apart": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "rows_apart": lambda x: x.repeat_interleave(2, dim=0)[::2],
    "rows_inside": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x,
    "heads_inside": lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2) if x.ndim > 2 else x,
    "half_of_a_product": lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
    "odd_offset": lambda x: torch.cat([x[..., :1], x], dim=-1)[..., 1:],
}
EXPANDED: dict[str, Callable[[Tensor], Tensor]] = {
    "one_row_for_all": lambda x: x[..., :1, :].expand_as(x),
    "one_number_for_all": lambda x: x.flatten()[0].expand_as(x),
}
"""Gradients as those of a sum or a mean: their values differ, too."""


def laid_out(inputs: Inputs, arguments: str, grads: str = "") -> Inputs:
    """The inputs with arguments, and gradients if given, in those layouts."""

    def viewed(tensors: Mapping[str, Tensor], how: str) -> dict[str, Tensor]:
        view = (LAYOUTS | EXPANDED).get(how, lambda x: x)
        return {name: view(x) for name, x in tensors.items()}

    return replace(inputs, tensors=viewed(inputs.tensors, arguments), grads=viewed(inputs.grads, grads))
