"""The language model's training step in closed form: FLOPs, and bytes live at the end of each of its phases.

One AdamW step (fused, so without temporaries) in float32 with `sdpa` attention; T tokens, d = d_model, f = d_ff.
"""

from __future__ import annotations

from dataclasses import dataclass

from impl.model.sizes import SIZES, TransformerSize
from shardmark.cases import TrainingStepCase, Work

_FLOAT = 4  # bytes of a float32


@dataclass(frozen=True)
class TrainingBytes:
    """Bytes live on one rank through a training step without any wrapper, at the end of each phase."""

    after_init: int
    before_step: int
    after_forward: int
    after_backward: int
    parameters: int
    embedding: int
    peak_at_loss: int
    """When backward begins: log-probabilities, their gradient and the logits' gradient exist at once."""
    peak_at_output: int
    """When backward leaves the output projection: its weight's gradient is there, and the one that flows on."""
    peak_at_embedding: int
    """When backward ends: every gradient is there, and still the one that flows into the embedding, and the loss's."""


def activation_bytes(size: TransformerSize, batch: int, context: int) -> int:
    """Bytes that forward leaves for backward, the loss included.

    A layer keeps 11 T d: input, normed (before and after its weight), rotated q and k, v, attention's output (as the
    kernel and as the projection want it), the sum with the input, and that normed (twice); 4 T f: both projections,
    the gate, the product; and per token two norms' rms and each head's log-sum-exp.
    """
    tokens = batch * context
    layer = 11 * tokens * size.d_model + 4 * tokens * size.d_ff + 2 * tokens + tokens * size.heads
    head = 3 * tokens * size.d_model + tokens + tokens * size.vocab  # final norm, log-probabilities
    scalars = 2  # the loss, and the number of targets in it
    return _FLOAT * (size.layers * layer + head + scalars)


def training_bytes(case: TrainingStepCase) -> TrainingBytes:
    """Bytes live through one training step of that case."""
    size = SIZES[case.model]
    tokens = case.batch * case.context
    parameters = _FLOAT * size.parameters
    rotary = _FLOAT * case.context * size.head_dim  # sines and cosines
    tensors = 3 + 9 * size.layers  # parameters, each with a step counter in AdamW
    after_init = parameters + rotary + 16 * tokens  # int64 tokens and targets
    before_step = after_init + 2 * parameters + _FLOAT * tensors  # moments
    after_forward = before_step + activation_bytes(size, case.batch, case.context)
    after_backward = before_step + parameters + _FLOAT  # gradients, and the loss
    embedding = _FLOAT * size.vocab * size.d_model  # the output projection is as large
    flowing = _FLOAT * tokens * size.d_model  # the gradient that flows from layer to layer
    return TrainingBytes(
        after_init=after_init,
        before_step=before_step,
        after_forward=after_forward,
        after_backward=after_backward,
        parameters=parameters,
        embedding=embedding,
        peak_at_loss=after_forward + 2 * _FLOAT * tokens * size.vocab,
        peak_at_output=after_forward + embedding + flowing,
        peak_at_embedding=after_backward + flowing + _FLOAT,
    )


def training_work(case: TrainingStepCase) -> Work:
    """FLOPs and least bytes of one training step on one rank.

    6 FLOPs a token for each parameter of a matrix that multiplies (all but the embedding and the norms), and causal
    attention's seven products; bytes: weights read twice, gradients written, and AdamW's 28 a parameter.
    """
    size = SIZES[case.model]
    tokens = case.batch * case.context
    matrices = size.parameters - size.vocab * size.d_model - (2 * size.layers + 1) * size.d_model
    attention = 7 * tokens * case.context * size.d_model * size.layers
    return Work(flops=6 * tokens * matrices + attention, bytes_moved=40 * size.parameters)
