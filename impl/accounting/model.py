"""The transformer's training step on one device: FLOPs and bytes moved."""

from __future__ import annotations

from typing import TYPE_CHECKING

from impl.model.sizes import SIZES
from shardmark.api import OwnModelCase, Work

if TYPE_CHECKING:
    from impl.training_step.cases import TrainingStepCase


def training_work(case: TrainingStepCase | OwnModelCase) -> Work:
    """FLOPs and least bytes of one training step on one rank.

    6 FLOPs a token for each parameter of a matrix that multiplies (all but the embedding and the norms), and causal
    attention's seven products; bytes: weights read twice, gradients written, and AdamW's 28 a parameter. `model_flops`
    leaves out the one of the seven products that the kernel computes again.
    """
    if isinstance(case, OwnModelCase):
        return case.work
    size = SIZES[case.model]
    matrices = size.parameters - size.vocab * size.d_model - (2 * size.layers + 1) * size.d_model
    product = case.tokens * case.context * size.d_model * size.layers  # 2 FLOPs each, for half of the pairs
    model_flops = 6 * case.tokens * matrices + 6 * product
    return Work(flops=model_flops + product, bytes_moved=40 * size.parameters, model_flops=model_flops)
