"""Mistakes that implementations of AdamW are known for, each as a right AdamW with one step changed."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import Tensor

UNDERSTOOD = {"lr", "betas", "eps", "weight_decay"}


def mistakes(start: Tensor, grads: Sequence[Tensor], options: dict[str, Any]) -> dict[str, Callable[[], Tensor]]:
    """The parameter after a step for each of the gradients, all in float64, by mistake; none with other options than
    the formula's own."""
    if not options.keys() <= UNDERSTOOD:
        return {}
    beta1, beta2 = options.get("betas", (0.9, 0.999))
    adamw = partial(_adamw, start, grads, **options)
    found = {
        "without bias corrections": partial(adamw, corrects=(False, False)),
        "without the bias correction of the first moment": partial(adamw, corrects=(False, True)),
        "without the bias correction of the second moment": partial(adamw, corrects=(True, False)),
        "with bias corrections of the step after": partial(adamw, counted_from=2),
        "with betas exchanged": partial(adamw, betas=(beta2, beta1)),
        "with eps inside of the root": partial(adamw, eps_is="inside"),
        "with eps added before the bias correction": partial(adamw, eps_is="before"),
        "without eps": partial(adamw, eps=0.0),
    }
    if options.get("weight_decay", 0.01):
        found |= {
            "without weight decay": partial(adamw, weight_decay=0.0),
            "with weight decay in the gradient, as Adam's L2": partial(adamw, decay="gradient"),
            "with weight decay after the update": partial(adamw, decay="after"),
            "with weight decay that lr does not scale": partial(adamw, decay="unscaled"),
        }
    return found


def _adamw(
    start: Tensor,
    grads: Sequence[Tensor],
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.01,
    corrects: tuple[bool, bool] = (True, True),
    counted_from: int = 1,
    eps_is: str = "outside",
    decay: str = "before",
) -> Tensor:
    x, m, v = start.double(), 0 * start.double(), 0 * start.double()
    for t, given in enumerate(grads, counted_from):
        grad = given.double() + (weight_decay * x if decay == "gradient" else 0)
        if decay in ("before", "unscaled"):
            x = x * (1 - weight_decay * (1 if decay == "unscaled" else lr))
        m, v = (beta * old + (1 - beta) * new for beta, old, new in zip(betas, (m, v), (grad, grad**2), strict=True))
        first, second = (1 - beta**t if on else 1.0 for beta, on in zip(betas, corrects, strict=True))
        root = (v / second).sqrt()
        divisor = {"outside": root + eps, "inside": (v / second + eps).sqrt(), "before": (v.sqrt() + eps) / second**0.5}
        x = x - lr * (m / first) / divisor[eps_is]
        if decay == "after":
            x = x * (1 - lr * weight_decay)
    return x
