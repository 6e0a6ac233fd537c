"""The language models that training steps are measured on: a decoder-only transformer, and a residual MLP (`mlp`).

from impl.model import SIZES, Transformer

model = Transformer(SIZES["small"], context_length=512)
logits = model(tokens)  # (batch, context) -> (batch, context, vocab)
"""

from __future__ import annotations

from impl.model.contract import Model
from impl.model.plain import PlainTransformer
from impl.model.sizes import SIZES, TransformerSize
from impl.model.transformer import Transformer

__all__ = ["SIZES", "Model", "PlainTransformer", "Transformer", "TransformerSize"]
