"""Mistakes that layers are known for, each as right layers with one step changed; in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from correctness.layers.operations import Inputs, results
from impl.layers import EagerLayers

Wrong = Callable[[Inputs], dict[str, Tensor]]


def mistakes(inputs: Inputs) -> dict[str, Wrong]:
    """The mistakes that the operation has, each a function of the inputs to results and gradients."""
    if inputs.operation == "swiglu":
        return {
            "of silu(up) * gate": _renamed({"gate": "up", "up": "gate"}),
            "whose two gradients are swapped": _swapped("grad_gate", "grad_up"),
        }
    if inputs.operation == "rotary":
        return {
            "rotated the other way": _with(sin=lambda x: -x),
            "whose pairs are x[i] and x[i + head_dim / 2]": _halves,
            "of the next position's angles": _with(cos=_next, sin=_next),
        }
    return {
        "without eps, or with a smaller one": lambda inputs: results(EagerLayers, replace(inputs, eps=0.0)),
        "with a weight of 1 + weight": _with(weight=lambda x: 1 + x),
        "without weight": _with(weight=torch.ones_like),
        "of the sum of squares, and not their mean": _with(weight=lambda x: x / len(x) ** 0.5),
    }


def _with(**changes: Callable[[Tensor], Tensor]) -> Wrong:
    def wrong(inputs: Inputs) -> dict[str, Tensor]:
        tensors = {name: changes.get(name, lambda x: x)(x) for name, x in inputs.tensors.items()}
        return results(EagerLayers, replace(inputs, tensors=tensors))

    return wrong


def _next(table: Tensor) -> Tensor:
    return table.roll(-1, 0)


def _renamed(names: dict[str, str]) -> Wrong:
    def wrong(inputs: Inputs) -> dict[str, Tensor]:
        tensors = {name: inputs.tensors[names[name]] for name in inputs.tensors}
        found = results(EagerLayers, replace(inputs, tensors=tensors))
        return found | {f"grad_{name}": found[f"grad_{other}"] for name, other in names.items()}

    return wrong


def _swapped(one: str, other: str) -> Wrong:
    def wrong(inputs: Inputs) -> dict[str, Tensor]:
        found = results(EagerLayers, inputs)
        return found | {one: found[other], other: found[one]}

    return wrong


def _halves(inputs: Inputs) -> dict[str, Tensor]:
    """The pairs apart, as Hugging Face has them, rotated and put back."""

    def paired(x: Tensor) -> Tensor:
        return x.unflatten(-1, (2, -1)).mT.flatten(-2)

    def apart(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, 2)).mT.flatten(-2)

    tensors = {name: paired(x) if name in "qk" else x for name, x in inputs.tensors.items()}
    grads = {name: paired(x) for name, x in inputs.grads.items()}
    return {name: apart(x) for name, x in results(EagerLayers, replace(inputs, tensors=tensors, grads=grads)).items()}
