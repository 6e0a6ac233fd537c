"""The contract of the language model, the check that a target meets it, and the family."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from shardmark.api import Family, RegistryError, add_family


class Model(Protocol):
    """`Model(size, *, context_length)` is a `torch.nn.Module` from tokens to logits.

    Called on int64 tokens (batch, context), of any strides, with context up to `context_length`, it returns logits
    (batch, context, vocab).

    Must:

    - The logits are those of `impl.model.PlainTransformer` with the model's current weights, however they were changed
      or given by `torch.func.functional_call`, in any dtype and as accurate: of a long context errors are on average at
      most 1.5 times that model's in half precision, and 4 times in float32, in which angles may be computed. They have
      the parameters' dtype; under autocast they may have autocast's. A model may be made and called while torch's
      default dtype is any of these; made in float64 it computes in float64 throughout.
    - Each call is independent of earlier calls: with tokens of any shape, in training and evaluation mode, with and
      without autograd, in `torch.inference_mode()` too. It changes neither tokens nor weights nor the results of
      another call.
    - It trains, under autocast too: from its own initial weights, drawn independently, every parameter gets a
      gradient, whichever others are frozen. Calls' backwards run in any order.
    - A second derivative, a second backward pass, or one after a weight has changed in place, is right or raises an
      error; the last is not asked of what `torch.compile` makes.
    - Its `state_dict` has `Transformer`'s names and shapes and no others, so that weights of one load into another.

    Should: ValueError for a longer context and, on CPU, for token ids that the vocabulary does not have (on CUDA a
    check would make the host wait); an empty batch is no error; a model that was made on the meta device is whole once
    `to_empty` and `load_state_dict` have run.

    Not asked: weights that were tied after the model was made.
    """

    def __call__(self, tokens: Tensor) -> Tensor: ...


def _check(target: Any, device: str) -> None:
    from impl.model import SIZES, Transformer  # not at the top: that would be circular

    size = SIZES["tiny"]
    model = target(size, context_length=8).to(device)
    expected = {name: x.shape for name, x in Transformer(size, context_length=8).named_parameters()}
    found = {name: x.shape for name, x in model.named_parameters()}
    for name in expected | found:
        if expected.get(name) != found.get(name):
            raise RegistryError(f"its parameter {name!r} is {found.get(name)} and not {expected.get(name)}")
    logits = model(torch.zeros(2, 8, dtype=torch.int64, device=device))
    if logits.shape != (2, 8, size.vocab):
        raise RegistryError(f"tokens (2, 8) gave logits {tuple(logits.shape)} and not {(2, 8, size.vocab)}")


FAMILY = add_family(Family("model", Model, reference="plain", check=_check))
