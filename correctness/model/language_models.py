"""The implementation and the reference model with equal weights, tokens for them, and a comparison of logits."""

from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call

from correctness.support.likeness import CLOSE as LIKE
from impl.model import PlainTransformer, TransformerSize
from shardmark.api import Implementation

SIZE = TransformerSize(d_model=24, d_ff=40, layers=3, heads=2, vocab=50)
CONTEXT = 16
CLOSE = 1e-7
"""Tolerance for logits: float32 anywhere inside exceeds it, and a wrong formula by far."""


def models(
    implementation: Implementation, device: str, size: TransformerSize = SIZE, context_length: int = CONTEXT
) -> tuple[nn.Module, nn.Module]:
    """Make the implementation and the reference with equal weights; weights of norms are random too."""
    plain = PlainTransformer(size, context_length=context_length).to(device)
    with torch.no_grad():
        for name, p in plain.named_parameters():
            if "norm" in name:
                p.normal_(1.0, 0.3)
    model = implementation.watched(size, context_length=context_length).to(device)
    copy_weights(plain, model)
    return model, plain


@torch.no_grad()
def copy_weights(source: nn.Module, target: nn.Module) -> None:
    weights = dict(source.named_parameters())
    for name, p in target.named_parameters():
        p.copy_(weights[name])


def draw(device: str, batch: int = 2, context: int = 13, size: TransformerSize = SIZE) -> Tensor:
    """Draw random tokens, including the first and last of the vocabulary if there is room."""
    tokens = torch.randint(size.vocab, (batch, context), device=device)
    if tokens.numel():
        tokens[0, 0], tokens[-1, -1] = 0, size.vocab - 1
    return tokens


def assert_logits(
    found: Tensor,
    expected: Tensor,
    tolerance: float = 1e-5,
    where: str = "",
    why: Callable[[], str] = str,
) -> None:
    """Compare logits; the tolerance is a share of the largest logit. The error ends with what `why` says of them."""
    assert found.shape == expected.shape, f"logits{where} of shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    if not expected.numel():
        return
    error = (found.double() - expected.double()).abs()
    scale = expected.double().abs().max().item()
    if not error.max().item() <= tolerance * scale:  # catches NaN too
        worst = tuple(int(i) for i in torch.unravel_index(error.nan_to_num(torch.inf).argmax(), error.shape))
        sequence, position, token = worst
        first = int((~(error <= tolerance * scale)).any(-1).any(0).nonzero()[0])
        raise AssertionError(
            f"the logit{where} of token {token} at position {position} of sequence {sequence} is "
            f"{found[worst].item():.9g}, expected {expected[worst].item():.9g}; "
            f"the first position that differs is {first}{why()}"
        )


def stale_weights(found: Tensor, model: nn.Module, tokens: Tensor, earlier: Mapping[str, Mapping[str, Tensor]]) -> str:
    """Say which parameters' earlier values, by the change before which they had them, give the logits `found`; "" if
    none do. Parameters of one name in all layers are stale together; each kind is taken for stale that brings the
    logits nearer to those found."""
    kinds: dict[str, list[str]] = defaultdict(list)
    for name, _ in model.named_parameters():
        kinds[".".join(part for part in name.split(".") if not part.isdigit())].append(name)
    fresh = model(tokens)
    for change, old in earlier.items():

        def off(stale: set[str], old: Mapping[str, Tensor] = old) -> float:
            given = {name: old[name] for kind in stale for name in kinds[kind]}
            return (functional_call(model, given, (tokens,)) - found.double()).norm().item()

        stale: set[str] = set()
        for _ in range(2):  # as the effect of one depends on the others
            for kind in kinds:
                stale = min(stale | {kind}, stale - {kind}, key=off)
        if stale and off(stale) <= LIKE * (fresh - found.double()).norm().item():
            which = "all weights" if len(stale) == len(kinds) else ", ".join(kind for kind in kinds if kind in stale)
            return f"; it is that of stale weights: of {which} before {change}"
    return ""
