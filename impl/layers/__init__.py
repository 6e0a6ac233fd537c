"""Layers: what a decoder's block computes between its matrix products, which memory bounds.

from impl.layers import EagerLayers, FusedLayersTriton

normed, total = FusedLayersTriton.add_rms_norm(x, residual, weight, eps=1e-5)
hidden = FusedLayersTriton.swiglu(gate, up)
q, k = FusedLayersTriton.rotary(q, k, cos, sin)
"""

from __future__ import annotations

from impl.interpreting import NO_TRITON, requires_triton
from impl.layers.contract import (
    OPERATIONS,
    Layers,
    adapted,
    check_gated,
    check_norm,
    check_rotary,
    statistics_dtype,
)
from shardmark.api import register

# Implementations register in this order, simplest first, which is the order in every list and table.
# isort: off
from impl.layers.eager import EagerLayers

# isort: on

if NO_TRITON is None:
    from impl.layers.fused_triton import FusedLayersTriton
else:
    register("layers", "fused_triton", None, requires=(requires_triton,), called="the fused layers in Triton")

from impl.layers.library import CompiledLayers, TorchLayers

__all__ = [
    "OPERATIONS",
    "CompiledLayers",
    "EagerLayers",
    "FusedLayersTriton",
    "Layers",
    "TorchLayers",
    "adapted",
    "check_gated",
    "check_norm",
    "check_rotary",
    "statistics_dtype",
]
