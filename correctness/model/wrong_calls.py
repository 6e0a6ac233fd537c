"""Planted defects: transformers with a part whose backward is wrong where it comes again or late."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu

from correctness.model.transformer_parts import Parts
from correctness.support.planting import defect


class _Gate(torch.autograd.Function):
    """silu(gate) * up, whose backward runs once."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.saved = gate.detach().clone(), up.detach().clone()
        return silu(gate) * up

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return _gradients(*ctx.saved, grad)


def _gradients(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    sigmoid = gate.sigmoid()
    return grad * up * sigmoid * (1 + gate * (1 - sigmoid)), grad * gate * sigmoid


class _WritesOver(_Gate):
    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        for x, gradient in zip(ctx.saved, _gradients(*ctx.saved, grad), strict=True):
            x.copy_(gradient)
        return ctx.saved


class _TwiceDifferentiable(_Gate):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return _gradients(*ctx.saved, grad)


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.saved = x.detach(), weight.detach()
        return x @ weight.T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        x, weight = ctx.saved
        return grad @ weight, grad.flatten(0, 1).T @ x.flatten(0, 1)


class Gates(Parts):
    function: Any = _Gate

    def gated(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.function.apply(gate, up)


@defect(cause="gradients", caught_by="test_a_second_backward_pass")
class GradientsOverWhatIsSaved(Gates):
    """As linkedin/Liger-Kernel's SwiGLU saves memory: a second pass begins with the gradients of the first."""

    function = _WritesOver


@defect(cause="gradients", caught_by="test_a_second_derivative")
class ConstantGradients(Gates):
    """Keeps what is detached, without `once_differentiable`: gradients' own gradients lack a part, without an error."""

    function = _TwiceDifferentiable


@defect(cause="gradients", caught_by="test_a_backward_after_a_weight_has_changed")
class WeightOfTheNextStep(Parts):
    """Has its weight as an attribute of ctx, where autograd does not see an optimizer's step before backward."""

    def project(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        return _Project.apply(x, w["output.weight"])


@defect(cause="numerics", caught_by="test_activations_that_float16_lacks")
class GateOfFloat16(Parts):
    """As in huggingface/transformers#5651 an activation is above 65,504: bfloat16 runs in a kernel of float16."""

    def gate(self, x: Tensor) -> Tensor:
        return silu(x.half()).to(x.dtype) if x.dtype == torch.bfloat16 else silu(x)
