"""Strides in which arguments and gradients come, each a view of the same values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from correctness.engine.strides import EXPANDED, any_strides, any_strides_of_rows
from correctness.layers.operations import Inputs

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "columns_apart": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "rows_apart": lambda x: x.repeat_interleave(2, dim=0)[::2],
    "rows_inside": lambda x: x.mT.contiguous().mT if x.ndim > 1 else x,
    "heads_inside": lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2) if x.ndim > 2 else x,
    "half_of_a_product": lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
    "odd_offset": lambda x: torch.cat([x[..., :1], x], dim=-1)[..., 1:],
    **EXPANDED,
    "any_strides": any_strides,
    "any_strides_of_rows": any_strides_of_rows,
}
OF_GRADIENTS = LAYOUTS | {"one_number_for_all": lambda x: x.flatten()[0].expand_as(x)}
"""`one_number_for_all` is the gradient that backward of a sum or a mean gives: every stride is 0."""


def laid_out(inputs: Inputs, arguments: Sequence[str] = (), grads: Sequence[str] = ()) -> Inputs:
    """The inputs with each argument, and each result's gradient, in a layout of its own; what has none stays."""

    def viewed(tensors: dict[str, Tensor], layouts: Sequence[str]) -> dict[str, Tensor]:
        views = [OF_GRADIENTS.get(how, lambda x: x) for how in layouts]
        return tensors | {name: view(x) for (name, x), view in zip(tensors.items(), views, strict=False)}

    return replace(inputs, tensors=viewed(inputs.tensors, arguments), grads=viewed(inputs.grads, grads))
