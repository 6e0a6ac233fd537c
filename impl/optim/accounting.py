"""AdamW's step in closed form: bytes moved, bytes of state, bytes at the peak.

Bytes at the peak count what is there before the step: parameters, gradients, moments, master weights and step counts.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from impl.accounting.ledger import Bytes
from impl.model.sizes import SIZES, TransformerSize
from shardmark.api import Work

if TYPE_CHECKING:
    from impl.optim.cases import OptimizerCase


_STEP = 4  # bytes of a step count, a float32
_NUMBER = 8  # bytes of a Python number in an operation on CPU, a float64


def shapes(size: TransformerSize) -> list[tuple[int, ...]]:
    """Shapes of the parameters of the language model of that size."""
    d, f, vocab = size.d_model, size.d_ff, size.vocab
    layer: list[tuple[int, ...]] = [(d,), (d,), *[(d, d)] * 4, (f, d), (f, d), (d, f)]
    return [(vocab, d), *layer * size.layers, (d,), (vocab, d)]


def counts(case: OptimizerCase) -> list[int]:
    """Number of elements of each parameter."""
    return [math.prod(shape) for shape in shapes(SIZES[case.model])]


def bytes_per_parameter(case: OptimizerCase) -> int:
    """Bytes that a step must move for each parameter: 28 in float32, and in bfloat16 with master weights.

    Gradient, weight and both moments are read, weight and moments written; a parameter with a master weight is written,
    and not read. Clipping by global norm reads each gradient once more, before any of the update can be made.
    """
    size, state = _sizes(case)
    update = size + 6 * state + (size if case.master_weights else 0)
    return update + (0 if case.clipping == "none" else size)


def work(case: OptimizerCase) -> Work:
    """Least bytes moved; the dozen operations per element are negligible."""
    return Work(bytes_moved=bytes_per_parameter(case) * sum(counts(case)))


def before_step(case: OptimizerCase) -> Bytes:
    """Bytes of parameters, gradients and state."""
    size, state = _sizes(case)
    elements = sum(counts(case))
    return Bytes(
        {
            "parameters": size * elements,
            "gradients": size * elements,
            "exp_avg and exp_avg_sq": 2 * state * elements,
            "master weights": state * elements if case.master_weights else 0,
            "AdamW's step counts": _STEP * len(counts(case)),
        }
    )


def adamw_peak(case: OptimizerCase) -> Bytes:
    """Peak of `plain`, in bytes: the denominator of one parameter, and its gradient if that is in float32 or scaled."""
    _, state = _sizes(case)
    clips = case.clipping == "in_step"
    largest = state * max(counts(case))
    return before_step(case).add(
        {
            "denominator of the largest parameter": largest,
            "its gradient, in float32 or scaled": largest if case.master_weights or clips else 0,
            "norm of the gradients, and the coefficient made of it": 2 * max(state, 4) if clips else 0,
            "a Python number": _NUMBER,
        }
    )


def torch_forloop_peak(case: OptimizerCase) -> Bytes:
    """Peak of `torch_forloop`, in bytes: a root, the denominator made of it, and the previous parameter's
    denominator."""
    _, state = _sizes(case)
    tensors = counts(case)
    temporaries = max(2 * count + last for last, count in zip([0, *tensors], tensors, strict=False))
    return _torch_peak(case, {"denominators of two parameters": state * temporaries, "a Python number": _NUMBER})


def torch_foreach_peak(case: OptimizerCase) -> Bytes:
    """Peak of `torch_foreach`, in bytes: the denominators of all parameters."""
    _, state = _sizes(case)
    return _torch_peak(case, {"denominators": state * sum(counts(case))})


def torch_fused_peak(case: OptimizerCase) -> Bytes:
    """Peak of `torch_fused`, in bytes: no temporaries."""
    return _torch_peak(case, {})


def fused_triton_peak(case: OptimizerCase, chunk: int) -> Bytes:
    """Peak of `fused_triton`, in bytes: a table of addresses and scalars, a map of chunks of `chunk` elements, and a
    partial sum per chunk."""
    _, state = _sizes(case)
    tensors = counts(case)
    programs = sum(-(-count // chunk) for count in tensors)
    rows, decision, hyperparameters = 2 * 64 * len(tensors), 16, 8 * (1 + 5)
    peak = before_step(case).add({"table of addresses": rows + decision + hyperparameters, "chunks": 8 * programs})
    if case.clipping == "in_step":
        return peak.add(
            {"partial sums of the norm": 8 * programs, "this step's norm, and the last one's": 2 * max(state, 4)}
        )
    return peak.add(_norms(case) if case.clipping == "before_step" else {})


def _torch_peak(case: OptimizerCase, temporaries: dict[str, int]) -> Bytes:
    """Peak of torch's AdamW: with master weights it steps on float32 copies of all gradients; clipping happens
    before."""
    _, state = _sizes(case)
    gradients = state * sum(counts(case)) if case.master_weights else 0
    stepping = before_step(case).add({"gradients in float32": gradients, **temporaries})
    return stepping if case.clipping == "none" else max(stepping, before_step(case).add(_norms(case)))


def _norms(case: OptimizerCase) -> dict[str, int]:
    """Bytes that `clip_grad_norm_` needs: each gradient's norm twice, as it stacks them, and the total norm."""
    size, _ = _sizes(case)
    return {"norms of the gradients": size * (2 * len(counts(case)) + 1)}


def _sizes(case: OptimizerCase) -> tuple[int, int]:
    """Bytes per element: of a parameter or gradient, and of its moments and master weight."""
    size = getattr(torch, case.dtype).itemsize
    return size, 4 if case.master_weights else size
