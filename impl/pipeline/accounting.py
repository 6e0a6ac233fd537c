"""Pipelines in closed form: bytes of a step whose stages sleep."""

from __future__ import annotations

from typing import Any

from impl.accounting.ledger import Bytes
from impl.pipeline.cases import SleepingCase

_FLOAT, _DOUBLE, WIDTH = 4, 8, 2


def sleeping_peak(case: Any, device: str = "cpu") -> Bytes | None:
    """An upper bound of a rank's bytes, for two stages of it, whose schedule holds every micro-batch. Real stages are
    predicted: what they hold between their passes is in `impl.pipeline.held`."""
    if not isinstance(case, SleepingCase):
        return None
    stages, tensor = 2, WIDTH * _FLOAT
    passes = stages * case.micro_batches
    return Bytes(
        {
            "inputs": tensor,
            "weights and gradients": 2 * stages * WIDTH * tensor,
            "a product of weights' gradients": WIDTH * tensor,
            "inputs and outputs of forward passes": 2 * passes * tensor,
            "their gradients": 2 * passes * tensor,
            "losses": 2 * _FLOAT * case.micro_batches + 2 * _DOUBLE,
        }
    )
