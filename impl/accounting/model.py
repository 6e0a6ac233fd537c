"""The transformer's training step on one device: FLOPs, bytes live at the end of each phase, and what forward keeps.

One AdamW step, in "bfloat16" and "float16" under autocast over float32 parameters; the bytes are those that
`impl.accounting.programs.transformer` follows. T tokens, d = d_model, f = d_ff.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

from impl.accounting.ledger import Bytes
from impl.accounting.programs.transformer import TransformerStep
from impl.accounting.strategies import COUNTS, STATE, Strategy
from impl.model.sizes import SIZES
from shardmark.api import OwnModelCase, Work

if TYPE_CHECKING:
    from impl.model.sizes import TransformerSize
    from impl.training_step.cases import TrainingStepCase


def phases(case: TrainingStepCase) -> dict[str, Bytes]:
    """Bytes live "after_init", "before_step" (of a step that is not the first), "after_forward", "after_backward"."""
    marks = TransformerStep(case, Strategy(), autocast=True).run().marks
    return {"after_init": marks["before_step"].without(STATE, COUNTS), **marks}


def activations(size: TransformerSize, batch: int, context: int, dtype: str = "float32") -> dict[tuple[str, str], int]:
    """Bytes that forward leaves for backward, by module (all layers together) and operator, the loss included."""
    from impl.training_step.cases import TrainingStepCase  # whose package imports this module

    case = TrainingStepCase("", batch, context, dtype)
    marks = TransformerStep(case, Strategy(), size=size, autocast=True).run().marks
    found: dict[tuple[str, str], int] = defaultdict(int)
    for name, nbytes in marks["after_forward"].entries.items():
        if name not in marks["before_step"].entries:
            found[_module_and_operator(name)] += nbytes
    return dict(found)


def _module_and_operator(name: str) -> tuple[str, str]:
    """Which module's operator makes a ledger's entry of that name, as the profiler reports it."""
    module, colon, what = name.partition(": ")
    if colon:
        operator = {"1 / rms(x)": "aten::rsqrt", "x / rms(x)": "aten::mul", "output": "aten::mul"}
        return module if module in ("norm", "output") else f"blocks.*.{module}", operator.get(what, "aten::linear")
    return _MADE_BY[name]


_ATTENTION, _FEED_FORWARD = "blocks.*.attention", "blocks.*.feed_forward"

_MADE_BY = {
    "embedding output": ("embedding", "aten::embedding"),
    "residual stream": ("blocks.*", "aten::add"),
    "q and k": (f"{_ATTENTION}.rotary", "aten::stack"),
    "RoPE's tables in half precision": (f"{_ATTENTION}.rotary", "aten::to"),
    "v": (f"{_ATTENTION}.value", "aten::linear"),
    "attention output": (_ATTENTION, "aten::scaled_dot_product_attention"),
    "log-sum-exp": (_ATTENTION, "aten::scaled_dot_product_attention"),
    "attention output, heads side by side": (_ATTENTION, "aten::flatten"),
    "SwiGLU gate": (f"{_FEED_FORWARD}.w1", "aten::linear"),
    "silu of the SwiGLU gate": (_FEED_FORWARD, "aten::silu"),
    "SwiGLU up-projection": (f"{_FEED_FORWARD}.w3", "aten::linear"),
    "SwiGLU product": (_FEED_FORWARD, "aten::mul"),
    "log-probabilities": ("", "aten::cross_entropy_loss"),
    "loss": ("", "aten::cross_entropy_loss"),
    "number of targets": ("", "aten::cross_entropy_loss"),
}


def training_work(case: TrainingStepCase | OwnModelCase) -> Work:
    """FLOPs and least bytes of one training step on one rank.

    6 FLOPs a token for each parameter of a matrix that multiplies (all but the embedding and the norms), and causal
    attention's seven products; bytes: weights read twice, gradients written, and AdamW's 28 a parameter. Of the seven
    products, the one that the kernel computes again is not the model's own.
    """
    if isinstance(case, OwnModelCase):
        return case.work
    size = SIZES[case.model]
    matrices = size.parameters - size.vocab * size.d_model - (2 * size.layers + 1) * size.d_model
    product = case.tokens * case.context * size.d_model * size.layers  # 2 FLOPs each, for half of the pairs
    model_flops = 6 * case.tokens * matrices + 6 * product
    return Work(flops=model_flops + product, bytes_moved=40 * size.parameters, model_flops=model_flops)
