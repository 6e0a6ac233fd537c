"""A small language model with its training step, and the expected loss and gradients in float64."""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from impl.model.mlp import MLPLanguageModel, MLPSize
from impl.precision import PRECISIONS, Precision
from shardmark.api import Implementation

SIZE = MLPSize(dim=16, layers=2, vocab=64)
BATCH = (3, 8)

SHAPES = ((3, 8), (1, 5), (2, 9), (1, 1))
"""(batch, context) of numbered batches."""

Gradients = dict[str, Tensor]

ALL_BFLOAT16 = "all bfloat16"
_OF_STEPS = PRECISIONS | {ALL_BFLOAT16: Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16)}


@dataclass
class Setting:
    """A model, its optimizer and its step, and a batch."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    step: Any
    tokens: Tensor
    targets: Tensor


class UnscalingSGD(torch.optim.SGD):
    """SGD that unscales its gradients and skips a step that overflows itself, as fused optimizers do for a GradScaler.

    torch's own fused SGD begins with garbage if its first step is skipped: docs/pytorch-defects.md.
    """

    _step_supports_amp_scaling = True

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        given = {name: vars(self).pop(name) for name in ("found_inf", "grad_scale") if name in vars(self)}
        try:  # without the attributes, as SGD refuses them
            if bool(given.get("found_inf")):
                return None
            return self._unscaled_step(given.get("grad_scale"), closure)
        finally:
            vars(self).update(given)

    def _unscaled_step(self, scale: Tensor | None, closure: Any) -> Any:
        if scale is None:
            return super().step(closure)
        having = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        own = [p.grad for p in having]
        for p in having:
            p.grad = p.grad / scale
        result = super().step(closure)
        for p, grad in zip(having, own, strict=True):
            p.grad = grad
        return result


OPTIMIZERS = {"sgd": torch.optim.SGD, "unscaling_sgd": UnscalingSGD}


def setting(
    implementation: Implementation,
    device: str,
    precision: str = "float32",
    model: nn.Module | None = None,
    all_parameters: bool = False,
    optimizer: str = "sgd",
    **options: Any,
) -> Setting:
    """Make the setting, with an SGD, so that updates show the gradients; `lr` is 0 unless `options` set it.

    Its two param groups have the trainable parameters; with `all_parameters`, the frozen ones too.
    """
    model = (MLPLanguageModel(SIZE) if model is None else model).to(device, _OF_STEPS[precision].parameter)
    params = [p for p in model.parameters() if all_parameters or p.requires_grad]
    groups = [{"params": params[:1]}, {"params": params[1:]}]
    sgd = OPTIMIZERS[optimizer](groups, **{"lr": 0.0, **options})
    return Setting(model, sgd, made(implementation, precision, model, sgd), *batch(device))


def made(implementation: Implementation, precision: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    """Make a step of that precision."""
    return implementation.watched(model, optimizer, precision=_OF_STEPS[precision])


def batch(device: str, shape: tuple[int, int] = BATCH) -> tuple[Tensor, Tensor]:
    """Random tokens and targets, which are slices of longer rows, as `ids[:, :-1]` and `ids[:, 1:]` are."""
    rows, context = shape
    tokens, targets = torch.randint(SIZE.vocab, (2, rows, context + 1), device=device)[..., 1:]
    return tokens, targets


def numbered_batch(number: int, device: str) -> tuple[Tensor, Tensor]:
    """Tokens and targets, in every second batch slices of longer rows, as `ids[:, 1:]` is; all targets of every
    fourth are ignored, and all but two of the next one's."""
    draw = torch.Generator().manual_seed(number)
    rows, context = SHAPES[number // 3 % len(SHAPES)]
    tokens, targets = torch.randint(SIZE.vocab, (2, rows, context + number % 2), generator=draw)[..., number % 2 :]
    if number % 4 == 3:
        targets[:] = -100
    elif number % 4 == 0:
        targets[:, 2:] = -100
    return tokens.to(device), targets.to(device)


def exact(model: nn.Module, tokens: Tensor, targets: Tensor) -> tuple[float, Gradients]:
    """Mean cross-entropy and its gradients in float64."""
    wide = copy.deepcopy(model).double()
    wide.zero_grad()
    loss = cross_entropy(wide(tokens).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.item(), gradients(wide)


def gradients(model: nn.Module) -> Gradients:
    return {name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None}


def values(model: nn.Module) -> Gradients:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_loss(found: Tensor, expected: float, what: str = "the loss") -> None:
    rounding = 1e-6  # of logits of 10
    assert found.item() == expected or math.isclose(found.item(), expected, rel_tol=1e-5, abs_tol=rounding), (
        f"{what} is {found.item():.7g}, expected {expected:.7g}"
    )


def assert_gradients(found: Gradients, expected: Gradients, tolerance: float = 1e-5, what: str = "gradient") -> None:
    """Assert each parameter's gradient; the tolerance is a share of its norm."""
    for name, wanted in expected.items():
        assert name in found, f"{name} has no {what}"
        error = relative_error({name: found[name]}, {name: wanted})
        if error <= tolerance:
            continue
        if (times := _times(found[name], wanted)) is not None:
            raise AssertionError(f"{what} of {name} is {times:.3g} times the expected {what}")
        norms = f"its norm is {found[name].norm().item():.4g}, expected {wanted.norm().item():.4g}"
        raise AssertionError(f"{what} of {name}: relative error {error:.2g}, allowed {tolerance:.2g}; {norms}")


def _times(found: Tensor, expected: Tensor) -> float | None:
    """Factor between parallel gradients, other than 1; None if they are not parallel."""
    found, expected = found.double(), expected.double()
    times = ((found * expected).sum() / expected.square().sum()).item()
    parallel = (found - times * expected).norm() < 1e-3 * found.norm()
    return times if parallel and abs(times - 1) > 2e-3 else None


def relative_error(found: Gradients, expected: Gradients) -> float:
    """Relative error of all gradients together, by norm."""
    difference = torch.stack([(found[name].double() - wanted).norm() for name, wanted in expected.items()]).norm()
    return (difference / torch.stack([wanted.double().norm() for wanted in expected.values()]).norm()).item()


def assert_together(
    what: str,
    names: Sequence[str],
    found: Sequence[Tensor | None],
    expected: Sequence[Tensor | None],
    close: float,
    rounded: float = 0.0,
) -> None:
    """Fail where the relative error of all tensors together, but for `rounded`, is above `close`; norms under 1e-4
    may be rounding."""
    pairs = [(x, y) for x, y in zip(found, expected, strict=True) if x is not None and y is not None]
    if not pairs:
        return
    x, y = (torch.cat([each.flatten().double() for each in some]) for some in zip(*pairs, strict=True))
    sizes = [x.norm().item(), y.norm().item()]
    error = (x - y).norm().item()
    if max(sizes) < 1e-4 or error <= close * sizes[1] + rounded:
        return
    errors = [(a.double() - b).norm().item() if a is not None else 0.0 for a, b in zip(found, expected, strict=True)]
    worst = (names if len(errors) > 1 else [what])[max(range(len(errors)), key=errors.__getitem__)]
    raise AssertionError(
        f"{what}: off by {error:.4g}, most of it in {worst}\nfound norm {sizes[0]:.4g}, expected {sizes[1]:.4g}"
    )


def taken(before: Gradients, after: Gradients, lr: float) -> Gradients:
    """Gradients recovered from the parameters' change in an SGD step."""
    return {name: (value.double() - after[name].double()) / lr for name, value in before.items()}


def skip_where_graphs_own_gradients(implementation: Implementation) -> None:
    options = getattr(implementation.target, "options", None)
    if options and options.get("triton.cudagraphs"):
        pytest.skip("a CUDA graph gives its gradients out for one step")
