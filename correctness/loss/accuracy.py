"""Tolerance of a loss: error against float64 is at most twice eager's in the same dtype, or what rounding allows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from correctness.loss.mistakes import mistakes
from correctness.support.likeness import likeness, worst_element
from impl.loss import Loss, eager_loss, linear_cross_entropy

HALF_LOSS = 4
"""Roundings of the loss itself: torch's linear_cross_entropy sums half precision in half precision."""


@dataclass(frozen=True)
class Inputs:
    """hidden, weight, targets, and the loss's own gradient."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    grad: float = 3.0

    def to(self, dtype: torch.dtype) -> Inputs:
        return replace(self, hidden=self.hidden.to(dtype), weight=self.weight.to(dtype))


def random_inputs(
    tokens: int, dim: int, vocab: int, device: str, dtype: torch.dtype = torch.float32, ignored: int | None = -100
) -> Inputs:
    """Draw logits of about unit variance; the first target is the last word, and every third of the others is
    ignored."""
    hidden = torch.randn(tokens, dim, device=device)
    weight = torch.randn(vocab, dim, device=device) / dim**0.5
    targets = torch.randint(vocab, (tokens,), device=device)
    targets[:1] = vocab - 1
    if ignored is not None:
        targets[1::3] = ignored
    return Inputs(hidden, weight, targets).to(dtype)


def results(loss_of: Loss, inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    """Return loss and gradients. The inputs are not copied: a copy may have other strides."""
    hidden, weight = (x.detach().requires_grad_() for x in (inputs.hidden, inputs.weight))
    loss = loss_of(hidden, weight, inputs.targets, **options)
    gradients = torch.autograd.grad(inputs.grad * loss, (hidden, weight))
    return {"loss": loss.detach(), "grad_hidden": gradients[0], "grad_weight": gradients[1]}


def assert_as_accurate_as_eager(loss_of: Loss, inputs: Inputs, times: float = 2, **options: Any) -> None:
    """Check the loss and the gradients, their shapes and dtypes. The error may be twice eager's; if eager is exact
    by luck, twice the error that rounding explains. For the loss that is one rounding of each logit and of each term
    in the worst case. A gradient is a sum of products: in half precision one rounding of each, with random signs
    (root of the sum of squares), and one in the dtype of the sum in the worst case."""
    found = results(loss_of, inputs, **options)
    assert_accurate(found, inputs, times, half_loss=inspect.unwrap(loss_of) is linear_cross_entropy, **options)


def assert_accurate(
    found: dict[str, Tensor],
    inputs: Inputs,
    times: float = 2,
    when: str = "",
    product: torch.dtype | None = None,
    half_loss: bool = False,
    **options: Any,
) -> None:
    """Check some of the results of `inputs`; `product` is the logits' dtype: the inputs', or autocast's."""
    dtypes = {"grad_hidden": inputs.hidden.dtype, "grad_weight": inputs.weight.dtype}
    product = product or inputs.hidden.dtype
    summing = torch.promote_types(product, torch.float32)
    wide = inputs.to(torch.float64)
    exact, plain = results(eager_loss, wide, **options), results(eager_loss, inputs.to(product), **options)
    owed = rounding(wide, torch.finfo(product).eps, torch.finfo(summing).eps, options)
    for name, value in found.items():
        wanted = {dtypes[name]} if name in dtypes else {summing, torch.float64}
        expected = " or ".join(sorted(map(str, wanted)))
        assert value.dtype in wanted, f"{when}{name} is {value.dtype}, expected {expected}"
        shape = tuple(exact[name].shape)
        assert value.shape == shape, f"{when}{name} is {tuple(value.shape)}, expected {shape}"
        error, plain_error = (_largest(x.double() - exact[name]) for x in (value, plain[name]))
        allowed = times * max(plain_error, owed[name])
        if name == "loss" and half_loss:
            allowed += HALF_LOSS * torch.finfo(product).eps * exact[name].abs().item()
        ratio = error / allowed if allowed else float("inf")
        if not error <= allowed:
            known = mistakes(inputs.targets, options)
            like = likeness(
                value, exact[name], {how: partial(_result, wrong, name, wide, options) for how, wrong in known.items()}
            )
            where = worst_element(value, exact[name])
            raise AssertionError(
                f"{when}{name}: error {error:.2e}, allowed {allowed:.2e}, ratio {ratio:.2f}; {where}{like}"
            )


def _result(loss_of: Loss, name: str, inputs: Inputs, options: dict[str, Any]) -> Tensor:
    return results(loss_of, inputs, **options)[name]


def _largest(x: Tensor) -> float:
    return x.abs().max().item() if x.numel() else 0.0


def rounding(inputs: Inputs, eps: float, summing_eps: float, options: dict[str, Any]) -> dict[str, float]:
    """Return the error of each result that rounding alone explains."""
    hidden, weight, targets = inputs.hidden, inputs.weight, inputs.targets
    kept = targets != options.get("ignore_index", -100)
    if not kept.any():
        return dict.fromkeys(("loss", "grad_hidden", "grad_weight"), 0.0)
    count = int(kept.sum())
    hidden, targets = hidden[kept], targets[kept]
    smoothing, z = options.get("label_smoothing", 0.0), options.get("z_loss", 0.0)
    logits, mass = hidden @ weight.T, hidden.abs() @ weight.T.abs()  # a logit, and the sum of its absolute terms
    lse = logits.logsumexp(-1, keepdim=True)
    scale, vocab = abs(inputs.grad) / count, weight.shape[0]

    def terms(error: Tensor) -> Tensor:
        """Size of a row's gradient before its terms cancel, plus the effect of errors in the logits."""
        terms = (1 + 2 * z * lse.abs()) * (logits - lse).exp() * (2 + error) + smoothing / vocab
        return terms.scatter_add(1, targets[:, None], torch.ones_like(lse))

    def owed(of_logits: Callable[[Tensor], Tensor], other: Tensor) -> float:
        typical = (of_logits(terms(logits.abs())).square() @ other.square()).sqrt()
        # with lse's error
        worst = of_logits(terms(mass + mass.amax(1, keepdim=True) + lse.abs() + vocab**0.5)) @ other.abs()
        return scale * max(eps * typical.amax().item(), summing_eps * worst.amax().item())

    rows, of_row = hidden.unique(dim=0, return_inverse=True)

    def of_unequal(terms: Tensor) -> Tensor:
        """Transposed, those of equal rows added: errors of equal rows are equal, and do not cancel."""
        return terms.new_zeros(vocab, len(rows)).index_add(1, of_row, terms.T)

    slope = 2 + 2 * z * lse.abs().amax().item()  # of a row's loss with respect to its logits
    return {
        "loss": slope * max(eps * logits.abs().amax().item() / count**0.5, 2 * summing_eps * (2 + mass.amax().item())),
        "grad_hidden": owed(lambda terms: terms, weight),
        "grad_weight": owed(of_unequal, rows),
    }
