"""Mistakes that losses are known for, each as a right loss with one step changed."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from impl.loss import eager_loss


def mistakes(targets: Tensor, options: dict[str, Any]) -> dict[str, Callable[..., Tensor]]:
    """The mistakes that make a difference there, each a function of (hidden, weight, targets) and the options."""
    ignored = options.get("ignore_index", -100)
    count, smoothing = int((targets != ignored).sum()), options.get("label_smoothing", 0.0)

    def times(factor: float) -> Callable[..., Tensor]:
        return lambda *inputs, **given: factor * eager_loss(*inputs, **given)

    def without(option: str) -> Callable[..., Tensor]:
        return lambda *inputs, **given: eager_loss(*inputs, **(given | {option: 0.0}))

    def over_the_others(hidden: Tensor, weight: Tensor, targets: Tensor, **given: Any) -> Tensor:
        share = smoothing * len(weight) / max(1, len(weight) - 1)
        return eager_loss(hidden, weight, targets, **(given | {"label_smoothing": share}))

    def of_all(hidden: Tensor, weight: Tensor, targets: Tensor, **given: Any) -> Tensor:
        shown = targets.masked_fill(targets == ignored, 0)
        return cross_entropy(hidden @ weight.T, shown)

    found: dict[str, Callable[..., Tensor]] = {
        "of a sum over the targets in place of their mean": times(count),
        "of a mean over ignored targets too": times(count / max(1, targets.numel())),
        "that counts ignored targets as words": of_all,
        "in base 2": times(1 / torch.log(torch.tensor(2.0, dtype=torch.float64)).item()),
    }
    if smoothing:
        found["without label smoothing"] = without("label_smoothing")
        found["whose label smoothing leaves the target out"] = over_the_others
    if options.get("z_loss"):
        found["without z-loss"] = without("z_loss")
    return found
