"""The language model's training step in closed form: FLOPs, and bytes live at the end of each of its phases.

One AdamW step (fused, so without temporaries) with `sdpa` attention; T tokens, d = d_model, f = d_ff. In "bfloat16" and
"float16", which are autocast over float32 parameters, matrix products read copies of weights and inputs in that dtype,
and the graph keeps the copies; the sums that run along the layers, the norms and the loss stay in float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from impl.model.sizes import SIZES, TransformerSize
from shardmark.grid import Work

if TYPE_CHECKING:
    from impl.training_step.cases import TrainingStepCase


_FLOAT = 4  # bytes of a float32
_HALF = 2  # of a bfloat16 or float16


@dataclass(frozen=True)
class TrainingBytes:
    """Bytes live on one rank through a training step without any wrapper, at the end of each phase."""

    after_init: int
    before_step: int
    after_forward: int
    after_backward: int
    parameters: int
    optimizer_state: int
    embedding: int
    before_feed_forward: int
    """Of the gradients, those that exist before the last layer's: the output projection's and the final norm's."""
    peak_at_logits: int
    """When the loss is made: logits and log-probabilities, both float32, exist at once."""
    peak_at_loss: int
    """When backward begins: log-probabilities, their gradient and the logits' gradient exist at once."""
    peak_at_output: int
    """When backward leaves the output projection: its weight's gradient is there, and the one that flows on."""
    peak_at_feed_forward: int
    """When backward is in the last layer's gate: nearly all activations, and three gradients as wide as d_ff."""
    peak_at_embedding: int
    """When backward ends: every gradient is there, and still the one that flows into the embedding, and the loss's."""


def activations(size: TransformerSize, batch: int, context: int, dtype: str = "float32") -> dict[tuple[str, str], int]:
    """Bytes that forward leaves for backward, by module (all layers together) and operator, the loss included."""
    cast = dtype != "float32"
    compute = _HALF if cast else _FLOAT
    tokens = batch * context
    wide, narrow = tokens * size.d_ff, tokens * size.d_model  # elements of the two shapes that an activation has
    heads = tokens * size.heads

    def linear(inputs: int, weight: int, output: int, own_input: bool = True) -> int:
        """Copies of input and weight where they are cast, and the output where something else keeps that."""
        copies = (inputs if own_input else 0) + weight if cast else 0
        return copies * _HALF + output * compute

    norm = {"aten::mul": (1 if cast else 2) * narrow * _FLOAT, "aten::rsqrt": tokens * _FLOAT}
    square, gate = size.d_model**2, size.d_model * size.d_ff
    tables = 2 * 2 * context * size.head_dim // 2 if cast else 0  # of cosines and sines, for q and for k
    layer = {
        "attention_norm": norm,
        "attention.query": {"aten::linear": linear(narrow, square, 0)},
        "attention.key": {"aten::linear": linear(narrow, square, 0)},
        "attention.value": {"aten::linear": linear(narrow, square, narrow)},
        "attention.rotary": {"aten::stack": 2 * narrow * compute, "aten::to": tables * _HALF},
        "attention": {
            "aten::scaled_dot_product_attention": narrow * compute + heads * _FLOAT,  # log-sum-exp of each row
            "aten::flatten": narrow * compute,  # the heads side by side, as the projection wants them
        },
        "attention.output": {"aten::linear": linear(narrow, square, 0, own_input=False)},
        "": {"aten::add": 2 * narrow * _FLOAT},
        "feed_forward_norm": norm,
        "feed_forward.w1": {"aten::linear": linear(narrow, gate, wide)},
        "feed_forward.w3": {"aten::linear": linear(narrow, gate, wide)},
        "feed_forward": {"aten::silu": wide * compute, "aten::mul": wide * compute},
        "feed_forward.w2": {"aten::linear": linear(wide, gate, 0, own_input=False)},
    }
    layers = {
        (f"blocks.*.{module}".rstrip("."), operator): size.layers * nbytes
        for module, operators in layer.items()
        for operator, nbytes in operators.items()
    }
    logits = tokens * size.vocab
    head = {
        ("embedding", "aten::embedding"): narrow * _FLOAT,
        **{("norm", operator): nbytes for operator, nbytes in norm.items()},
        ("output", "aten::linear"): linear(narrow, size.vocab * size.d_model, 0),
        ("", "aten::cross_entropy_loss"): (logits + 2) * _FLOAT,  # the loss, and the number of targets in it
    }
    return {where: nbytes for where, nbytes in {**layers, **head}.items() if nbytes}


def activation_bytes(size: TransformerSize, batch: int, context: int, dtype: str = "float32") -> int:
    """Bytes that forward leaves for backward, the loss included."""
    return sum(activations(size, batch, context, dtype).values())


def training_bytes(case: TrainingStepCase) -> TrainingBytes:
    """Bytes live through one training step of that case."""
    size = SIZES[case.model]
    cast = case.dtype != "float32"
    compute = _HALF if cast else _FLOAT
    tokens = case.tokens
    parameters = _FLOAT * size.parameters
    rotary = _FLOAT * case.context * size.head_dim  # sines and cosines
    tensors = 3 + 9 * size.layers  # parameters, each with a step counter in AdamW
    after_init = parameters + rotary + 16 * tokens  # int64 tokens and targets
    optimizer_state = 2 * parameters + _FLOAT * tensors
    before_step = after_init + optimizer_state
    after_forward = before_step + activation_bytes(size, case.batch, case.context, case.dtype)
    after_backward = before_step + parameters + _FLOAT  # gradients, and the loss
    embedding = _FLOAT * size.vocab * size.d_model  # the output projection is as large
    logits = _FLOAT * tokens * size.vocab
    narrow, wide = tokens * size.d_model, tokens * size.d_ff
    flowing = _FLOAT * narrow  # the gradient that flows from layer to layer
    copied = narrow + size.vocab * size.d_model if cast else 0  # what the output projection read, in half precision
    gate = size.d_model * size.d_ff
    before_feed_forward = embedding + _FLOAT * size.d_model
    # Both norms' halves and the last sum are gone, the flow is there; the copies go as their products are done.
    left = (2 if cast else 3) * flowing + _FLOAT * tokens + _HALF * copied - flowing
    return TrainingBytes(
        after_init=after_init,
        before_step=before_step,
        after_forward=after_forward,
        after_backward=after_backward,
        parameters=parameters,
        optimizer_state=optimizer_state,
        embedding=embedding,
        before_feed_forward=before_feed_forward,
        peak_at_logits=after_forward + logits,
        peak_at_loss=after_forward + 2 * logits,
        peak_at_output=max(
            after_forward - logits + compute * (logits // _FLOAT + narrow) + compute * size.vocab * size.d_model,
            after_forward - logits + embedding + flowing - _HALF * narrow if cast else 0,
        ),
        peak_at_feed_forward=after_forward
        - logits
        + before_feed_forward
        - left
        + (_FLOAT - (_HALF if cast else 0)) * gate
        + 2 * compute * wide,
        peak_at_embedding=after_backward + flowing + _FLOAT,
    )


def training_work(case: TrainingStepCase) -> Work:
    """FLOPs and least bytes of one training step on one rank.

    6 FLOPs a token for each parameter of a matrix that multiplies (all but the embedding and the norms), and causal
    attention's seven products; bytes: weights read twice, gradients written, and AdamW's 28 a parameter. Of the seven,
    the one that the kernel computes again is not the model's own.
    """
    size = SIZES[case.model]
    matrices = size.parameters - size.vocab * size.d_model - (2 * size.layers + 1) * size.d_model
    product = case.tokens * case.context * size.d_model * size.layers  # 2 FLOPs each, for half of the pairs
    model_flops = 6 * case.tokens * matrices + 6 * product
    return Work(flops=model_flops + product, bytes_moved=40 * size.parameters, model_flops=model_flops)
