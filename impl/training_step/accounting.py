"""The training step on one device in closed form: FLOPs, and bytes at the peak of each part of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from impl.accounting.beside import beside, peak_of_part
from impl.accounting.ledger import Bytes
from impl.accounting.model import training_work
from impl.accounting.plain import PlainLanguageModel
from impl.checkpointing import accounting as checkpointing
from impl.model.mlp import MLP_SIZES
from impl.model.sizes import SIZES
from shardmark.api import OwnModelCase, Work, followed

if TYPE_CHECKING:
    from impl.training_step.cases import TrainingStepCase


def work(case: TrainingStepCase | OwnModelCase) -> Work:
    """FLOPs and least bytes of the part of a step that the case names. Forward reads the weights, backward reads them
    again and writes their gradients, and AdamW moves 28 bytes a parameter."""
    if isinstance(case, OwnModelCase):
        return case.work
    parameters = (MLP_SIZES if case.model in MLP_SIZES else SIZES)[case.model].parameters
    whole = _mlp_work(case) if case.model in MLP_SIZES else training_work(case)
    if case.mode == "forward":
        flops = whole.model_flops // 3  # backward takes two products where forward takes one
        return Work(flops, 4 * parameters, model_flops=flops)
    return replace(whole, bytes_moved=(12 if case.mode == "forward_backward" else 40) * parameters)


def _mlp_work(case: TrainingStepCase) -> Work:
    """FLOPs of forward and backward: 6 per token for each value of a matrix that multiplies (all but the embedding)."""
    size = MLP_SIZES[case.model]
    flops = 6 * case.tokens * (size.layers * 2 * size.dim * size.hidden + size.vocab * size.dim)
    return Work(flops, model_flops=flops)


SCALER = 12
"""Bytes of float16's loss scaling in backward: the scale, the number of steps since it changed, the scaled loss."""


def eager_peak(case: TrainingStepCase, device: str = "cpu") -> Bytes:
    """Peak in bytes of everything live: parameters, inputs, gradients, moments, activations, temporaries."""
    peak = peak_of_part(beside(followed(PlainLanguageModel.of(case), device)), case.mode)
    if case.mode != "forward" and case.dtype == "float16":
        peak = peak.add({"loss scaler": SCALER})
    return peak


def checkpointed_peak(case: TrainingStepCase, device: str = "cpu") -> Bytes:
    """Peak in bytes if each block keeps only its input; eager's peak as a bound for the transformer in half
    precision."""
    known = case.model in MLP_SIZES or case.dtype == "float32"
    return checkpointing.full_peak(case, device) if known else eager_peak(case, device)


SOFTMAX_FLOPS = 5
"""Operations of softmax per score: compare with the maximum, subtract it, exponentiate, add to the sum, divide."""


def attention_flops(case: TrainingStepCase) -> dict[str, int]:
    """FLOPs of all layers' attention in one forward pass, as eager attention does it: every score, causal or not.

    "scores" is q kᵀ, "softmax" is over the scores, "values" is the probabilities times v.
    """
    size = SIZES[case.model]
    scores = size.layers * case.batch * size.heads * case.context**2
    product = 2 * scores * size.head_dim
    return {"scores": product, "softmax": SOFTMAX_FLOPS * scores, "values": product}
