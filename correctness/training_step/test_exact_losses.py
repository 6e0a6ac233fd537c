"""The loss and its gradients given the logits, by a model whose logits are exact in any dtype; and dropout."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from correctness.support.default_dtype import default_dtype
from correctness.support.global_state import global_state_stays
from correctness.training_step.models import Table
from correctness.training_step.stepping import assert_loss, relative_error
from impl.optim import AdamW
from impl.precision import PRECISIONS
from shardmark.api import Implementation

pytestmark = pytest.mark.family("training_step")

VOCAB = 61
CLOSE = {torch.float32: 1e-5, torch.bfloat16: 0.01}
"""Relative error of gradients, by their dtype."""


def made(implementation: Implementation, precision: str, inner: nn.Module | None, device: str) -> tuple[Table, Any]:
    policy = PRECISIONS[precision]
    model = Table(VOCAB, inner).to(device, policy.parameter)
    optimizer = AdamW(model.parameters(), lr=0.0, master_weights=policy.master is not None)
    return model, implementation.watched(model, optimizer, precision=policy)


def batch(device: str, ignored: int = 3) -> tuple[Tensor, Tensor]:
    """Each token comes once."""
    tokens = torch.randperm(VOCAB, device=device)[:42].view(6, 7)
    targets = torch.randint(VOCAB, (6, 7), device=device)
    targets.view(-1)[:ignored] = -100
    return tokens, targets


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("size", [0.1, 1.0, 30.0], ids=["small", "usual", "large"])
def test_the_loss_has_float32s_accuracy_given_the_logits(
    implementation: Implementation, precision: str, size: float, device: str
) -> None:
    """With half-precision parameters the logits are in half precision, and no autocast makes the loss float32."""
    model, step = made(implementation, precision, None, device)
    with torch.no_grad():
        model.rows.weight.mul_(size)
    tokens, targets = batch(device)
    rows = model.rows.weight.detach().double().requires_grad_()
    expected = cross_entropy(rows[tokens].flatten(0, 1), targets.flatten())
    expected.backward()
    loss = step.forward(tokens, targets)
    assert_loss(loss, expected.item(), f"the loss of logits in {model.rows.weight.dtype}, up to {4 * size:g},")
    if precision == "float16":
        return  # gradients are scaled until the update
    step.backward(loss)
    grad = model.rows.weight.grad
    assert grad is not None and grad.dtype == model.rows.weight.dtype, f"the gradient is {getattr(grad, 'dtype', None)}"
    error = relative_error({"": grad}, {"": rows.grad})
    assert error < CLOSE[grad.dtype], f"the gradient's relative error is {error:.2g}, allowed {CLOSE[grad.dtype]:g}"


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("number", "default"),
    [*((n, torch.float32) for n in (259, 2051, 6003)), (259, torch.bfloat16), (2051, torch.float16)],
    ids=["259", "2051", "6003", "259-by_default_bfloat16", "2051-by_default_float16"],
)
def test_targets_are_counted_exactly(
    implementation: Implementation, precision: str, number: int, default: torch.dtype, device: str
) -> None:
    """Above 256 bfloat16 holds no odd number, and above 2048 float16 none; nor does a mean of so many stay exact. The
    mean of chunks' means is another number where chunks have unequal numbers of targets."""
    model, step = made(implementation, precision, None, device)
    tokens, targets = (torch.randint(VOCAB, (1, 2 * number), device=device) for _ in range(2))
    targets[0, :number] = -100
    rows = model.rows.weight.detach().double()
    expected = cross_entropy(rows[tokens].flatten(0, 1), targets.flatten()).item()
    with default_dtype(default):
        loss = step.forward(tokens, targets)
    assert_loss(loss, expected, f"the loss of {number} targets")


@pytest.mark.parametrize("precision", [name for name, of in PRECISIONS.items() if of.compute != torch.float16])
def test_gradients_add_up_until_the_caller_changes_them(
    implementation: Implementation, precision: str, device: str
) -> None:
    """A step that adds up in float32, in memory of its own, goes on from what the caller has made of `.grad`."""
    model, step = made(implementation, precision, None, device)
    weight, wanted = model.rows.weight, torch.zeros(VOCAB, VOCAB, dtype=torch.float64, device=device)
    changes: dict[str, Any] = {
        "no change": lambda: 1.0,
        "None": lambda: (setattr(weight, "grad", None), 0.0)[1],
        "zeros in place": lambda: (weight.grad.zero_(), 0.0)[1],
        "half in place": lambda: (weight.grad.mul_(0.5), 0.5)[1],
        "half in other memory": lambda: (setattr(weight, "grad", weight.grad * 0.5), 0.5)[1],
        "an update": lambda: (step.update(), 1.0)[1],
    }
    for change, apply in [("the start", lambda: 0.0), *changes.items(), *reversed(changes.items())]:
        share, (tokens, targets) = apply(), batch(device)
        rows = weight.detach().double().requires_grad_()
        cross_entropy(rows[tokens].flatten(0, 1), targets.flatten()).backward()
        wanted = share * wanted + rows.grad
        step.backward(step.forward(tokens, targets))
        error = relative_error({"": weight.grad}, {"": wanted})
        assert error < CLOSE[weight.dtype], f"after {change} the gradient's relative error is {error:.2g}"


@pytest.mark.parametrize("where", ["block", "model"])
def test_gradients_are_of_the_losss_own_dropout(implementation: Implementation, where: str, device: str) -> None:
    """A logit whose gradient is zero was dropped: with these zeros, loss and gradients in float64 are the step's."""
    model, step = made(implementation, "float32", nn.Dropout(0.5) if where == "block" else None, device)
    if where == "model":
        model.register_forward_hook(lambda module, inputs, logits: nn.functional.dropout(logits, 0.5, module.training))
    tokens, targets = batch(device, ignored=0)
    drawn = []
    for _ in range(2):
        torch.manual_seed(0)
        step.forward(tokens, targets)
        drawn.append(torch.rand(3, device=device))
    assert torch.equal(*drawn), "the first forward draws other random numbers than the next one from the same seed"
    losses = [step.forward(tokens, targets) for _ in range(3)]
    assert len({loss.item() for loss in losses}) == 3, "three losses of a model with dropout in training mode are equal"
    for i in (1, 0, 2):
        with global_state_stays("backward of a model with dropout"):
            step.backward(losses[i])
        assert model.rows.weight.grad is not None
        kept = model.rows.weight.grad[tokens] != 0
        rows = model.rows.weight.detach().double().requires_grad_()
        expected = cross_entropy((rows[tokens] * 2 * kept).flatten(0, 1), targets.flatten())
        expected.backward()
        what = f"with dropout and three losses that wait, backward of loss {i + 1} is of other elements dropped: it"
        assert_loss(losses[i], expected.item(), what)
        error = relative_error({"": model.rows.weight.grad}, {"": rows.grad})
        assert error < 1e-4, f"with dropout the gradient's relative error is {error:.2g}"
        model.rows.weight.grad = None


@pytest.mark.parametrize("precision", [name for name, of in PRECISIONS.items() if of.compute != torch.float16])
@pytest.mark.parametrize("last", ["softmax", "tanh", "sigmoid"])
def test_gradients_are_right_where_the_models_last_operator_saves_its_output(
    implementation: Implementation, last: str, precision: str, device: str
) -> None:
    """That output is the logits: a loss that writes over their memory changes what the model's backward reads."""
    operator = {"softmax": nn.Softmax(-1), "tanh": nn.Tanh(), "sigmoid": nn.Sigmoid()}[last]
    model, step = made(implementation, precision, operator, device)
    tokens, targets = batch(device)
    rows = model.rows.weight.detach().double().requires_grad_()
    expected = cross_entropy(operator(rows[tokens]).flatten(0, 1), targets.flatten())
    expected.backward()
    step.backward(step.forward(tokens, targets))
    grad = model.rows.weight.grad
    assert grad is not None, "the model's parameter has no gradient"
    error, allowed = relative_error({"": grad}, {"": rows.grad}), CLOSE[grad.dtype]
    assert error < allowed, f"of a model that ends in {last} the gradient's relative error is {error:.2g}"
