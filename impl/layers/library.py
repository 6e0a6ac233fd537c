"""PyTorch's own ways to the layers: eager under torch.compile, and torch's rms_norm."""

from __future__ import annotations

import torch
from torch import Tensor

from impl.attention.compiled import compile_each_shape
from impl.layers.accounting import eager_peak
from impl.layers.contract import check_norm
from impl.layers.eager import EagerLayers, added_and_normed, both_rotated, gated, normed
from shardmark.api import Race, Unsupported, register, requires_compiler


class CompiledLayers(EagerLayers):
    """Eager's formulas, each under torch.compile. Contract and errors: `impl.layers.Layers`."""

    normed = staticmethod(compile_each_shape(normed))
    added_and_normed = staticmethod(compile_each_shape(added_and_normed))
    gated = staticmethod(compile_each_shape(gated))
    both_rotated = staticmethod(compile_each_shape(both_rotated))


class TorchLayers:
    """`torch.nn.functional.rms_norm`, one kernel on CUDA. PyTorch has neither SwiGLU nor rotary embeddings.

    Unsupported where weight has another dtype than x: its fused kernel is not taken then.
    """

    @staticmethod
    def rms_norm(x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        """See `impl.layers.Layers.rms_norm`."""
        check_norm(x, weight)
        if weight.dtype != x.dtype:
            raise Unsupported(f"torch's rms_norm takes x and weight of one dtype, got {x.dtype}, {weight.dtype}")
        return torch.nn.functional.rms_norm(x, weight.shape, weight, eps)

    @staticmethod
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
        """See `impl.layers.Layers.add_rms_norm`."""
        check_norm(x, weight, residual)
        total = x + residual
        return TorchLayers.rms_norm(total, weight, eps=eps), total


register(
    "layers",
    "compiled",
    CompiledLayers,
    memory=eager_peak,  # a limit: what the compiler plans is its own
    time=Race("eager"),
    requires=(requires_compiler,),
    tested_briefly=True,
    called="the compiled layers",
)
register("layers", "torch", TorchLayers, time=Race("eager"), tested_briefly=True, called="PyTorch's rms_norm")
