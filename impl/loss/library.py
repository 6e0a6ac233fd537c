"""PyTorch's own ways to the loss: eager under torch.compile, and torch's linear_cross_entropy in chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from impl.attention.compiled import compile_each_shape
from impl.loss.accounting import eager_peak, linear_cross_entropy_peak
from impl.loss.contract import check_inputs, product_dtype, statistics_dtype
from impl.loss.eager import summed_loss
from shardmark.api import Race, Unsupported, register, requires_compiler

_compiled = compile_each_shape(summed_loss)


def compiled_loss(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """Eager's formula under torch.compile. Shapes, dtypes and errors: `impl.loss.Loss`."""
    # Not inside the compiled function, where the compiler would raise its own error.
    check_inputs(hidden, weight, targets, ignore_index, label_smoothing, z_loss)
    count = (targets != ignore_index).sum().clamp(min=1)
    return _compiled(hidden, weight, targets, ignore_index, label_smoothing, z_loss) / count


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
) -> Tensor:
    """`torch.nn.functional.linear_cross_entropy` in chunks of the size that it chooses.

    Unsupported with label smoothing, which it does not take in chunks, and with z-loss, which it does not have.
    """
    check_inputs(hidden, weight, targets, ignore_index, label_smoothing, z_loss)
    if label_smoothing or z_loss:
        raise Unsupported(
            "torch's linear_cross_entropy in chunks takes neither label smoothing nor z-loss, "
            f"got label_smoothing={label_smoothing}, z_loss={z_loss}"
        )
    dtype = product_dtype(hidden, weight)
    with torch.autocast(hidden.device.type, enabled=False):  # it ignores autocast, so the inputs are cast here
        total = torch.nn.functional.linear_cross_entropy(
            hidden.to(dtype),
            weight.to(dtype),
            targets,
            reduction="sum",
            ignore_index=ignore_index,
            options=torch.nn.LinearCrossEntropyOptions(),
        )
    return total.to(statistics_dtype(dtype)) / (targets != ignore_index).sum().clamp(min=1)


def _has_it(device: str) -> str | None:
    if hasattr(torch.nn.functional, "linear_cross_entropy"):
        return None
    return f"torch {torch.__version__} has no torch.nn.functional.linear_cross_entropy; 2.13 has"


register(
    "loss",
    "compiled",
    compiled_loss,
    memory=eager_peak,  # a limit: what the compiler plans is its own
    time=Race("eager"),
    requires=(requires_compiler,),
    tested_briefly=True,
    called="the compiled loss",
)
register(
    "loss",
    "linear_cross_entropy",
    linear_cross_entropy,
    memory=linear_cross_entropy_peak,
    time=Race("eager"),
    requires=(_has_it,),
    tested_briefly=True,
    called="PyTorch's linear_cross_entropy",
)
