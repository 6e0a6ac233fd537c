"""The training step on one device in closed form: FLOPs, and bytes at the peak of each part of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from impl.accounting import mlp
from impl.accounting.model import training_bytes, training_work
from impl.checkpointing import accounting as checkpointing
from impl.model.mlp import MLP_SIZES
from impl.model.sizes import SIZES
from shardmark.grid import Work

if TYPE_CHECKING:
    from impl.training_step.cases import TrainingStepCase


def work(case: TrainingStepCase) -> Work:
    """FLOPs and least bytes of the part of a step that the case names: forward reads the weights, backward reads them
    again and writes their gradients, and AdamW moves 28 bytes a parameter."""
    if case.model in MLP_SIZES:
        return mlp.work(case)
    size = SIZES[case.model]
    whole = training_work(case)
    if case.mode != "forward":
        return replace(whole, bytes_moved=(12 if case.mode == "forward_backward" else 40) * size.parameters)
    forward = whole.model_flops // 3  # backward takes two products where forward takes one
    return Work(forward, 4 * size.parameters, model_flops=forward)


SCALER = 12
"""Bytes that float16's loss scaling holds in backward: the scale, how long it has held, and the scaled loss."""


def eager_peak(case: TrainingStepCase) -> int:
    """Bytes at the peak, of everything live: parameters, inputs, gradients, moments, activations, temporaries."""
    if case.model in MLP_SIZES:
        return mlp.eager_peak(case)
    if case.attention == "eager":
        return _eager_attention_peak(case)
    step = training_bytes(case)
    moments = 0 if case.mode == "step" else step.optimizer_state  # they come with the first update
    if case.mode == "forward":
        return step.peak_at_logits - moments
    peak = max(step.peak_at_loss, step.peak_at_output, step.peak_at_feed_forward, step.peak_at_embedding)
    return peak - moments + (SCALER if case.dtype == "float16" else 0)


def checkpointed_peak(case: TrainingStepCase) -> int:
    """The same where each block keeps its input alone; of the transformer in half precision a bound: eager's."""
    if case.model in MLP_SIZES:
        return mlp.eager_peak(case, checkpointed=True)
    whole = case.dtype == "float32" and case.mode == "step"
    return checkpointing.FULL.peak(case) if whole else eager_peak(case)


def _eager_attention_peak(case: TrainingStepCase) -> int:
    """Of a whole step in float32 with eager attention.

    It leaves more for backward in each layer: the probabilities and a mask, and not its output and log-sum-exp. Its own
    largest moment is softmax's backward in the last layer.
    """
    size, step = SIZES[case.model], training_bytes(case)
    hidden = case.tokens * size.d_model
    scores = case.batch * size.heads * case.context**2
    root = 8  # sqrt(head_dim), which the division saves as a float64
    kept = size.layers * (4 * (scores - hidden - case.tokens * size.heads) + case.context**2 + root)

    # By then the loss, the final norm, the feed-forward and attention's output projection have gone backward.
    gone = case.tokens * size.vocab + 6 * hidden + 2 * case.tokens + 4 * case.tokens * size.d_ff + 2 * hidden
    gradients = size.vocab * size.d_model + 3 * size.d_model * size.d_ff + size.d_model**2 + 2 * size.d_model
    flowing = 2 * hidden  # past attention, and into v
    at_softmax = step.after_forward + kept + 4 * (gradients + flowing + 2 * scores - gone)
    in_layers = max(step.peak_at_loss, step.peak_at_output, step.peak_at_feed_forward) + kept
    return max(in_layers, at_softmax, step.peak_at_embedding)


SOFTMAX_FLOPS = 5
"""What softmax does to each score: compare with the maximum, subtract it, exponentiate, add to the sum, divide."""


def attention_flops(case: TrainingStepCase) -> dict[str, int]:
    """FLOPs of all layers' attention in one forward pass, as eager attention does it: every score, causal or not.

    "scores" is q kᵀ, "softmax" is over the scores, "values" is the probabilities times v.
    """
    size = SIZES[case.model]
    scores = size.layers * case.batch * size.heads * case.context**2
    product = 2 * scores * size.head_dim
    return {"scores": product, "softmax": SOFTMAX_FLOPS * scores, "values": product}
