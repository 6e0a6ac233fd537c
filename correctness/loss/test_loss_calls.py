"""Calls of a loss are independent: nothing is shared, changed, or held longer than needed."""

import re
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.loss.accuracy import Inputs, random_inputs, results
from correctness.support.contracts import (
    Note,
    assert_freed_at_once,
    assert_near,
    assert_unchanged,
    gradient_of_gradient,
    growth,
    held_by,
    is_ours,
    left_by,
)
from correctness.support.global_state import global_state_stays
from impl.loss import Loss, eager_loss
from shardmark.api import Implementation, Unsupported

pytestmark = [pytest.mark.family("loss"), pytest.mark.usefixtures("poisoned")]


def _tensors(inputs: Inputs) -> dict[str, Tensor]:
    return {"hidden": inputs.hidden, "weight": inputs.weight, "targets": inputs.targets}


def _exact(inputs: Inputs, **options: Any) -> dict[str, Tensor]:
    return results(eager_loss, inputs.to(torch.float64), **options)


def test_leaves_its_inputs_as_they_are(implementation: Implementation, device: str) -> None:
    inputs = random_inputs(40, 16, 31, device)
    before = {name: x.clone() for name, x in _tensors(inputs).items()}
    with global_state_stays("forward or backward"):
        results(implementation.watched, inputs)
    assert_unchanged(before, _tensors(inputs), "after forward and backward")
    hidden, weight = given = [x.detach().requires_grad_().clone() for x in (inputs.hidden, inputs.weight)]
    torch.autograd.grad(implementation.watched(hidden, weight, inputs.targets), given)
    now = {"hidden": hidden, "weight": weight}  # of other operations, which may have saved them for their own backward
    assert_unchanged({name: before[name] for name in now}, now, "after forward and backward of results")


@pytest.mark.parametrize("first_backward", [0, 1], ids=["in_order", "in_reverse"])
def test_two_forwards_before_either_backward(implementation: Implementation, first_backward: int, device: str) -> None:
    """Two heads or two batches: equal shapes, different values and ignored targets."""
    calls = [(random_inputs(40, 16, 31, device), -100), (random_inputs(40, 16, 31, device, ignored=5), 5)]
    calls[1][0].targets[20:] = 5
    leaves, losses = [], []
    for inputs, ignored in calls:
        hidden, weight = (x.detach().requires_grad_() for x in (inputs.hidden, inputs.weight))
        leaves.append((hidden, weight))
        losses.append(implementation.watched(hidden, weight, inputs.targets, ignore_index=ignored))
    for i in (first_backward, 1 - first_backward):
        inputs, ignored = calls[i]
        gradients = torch.autograd.grad(inputs.grad * losses[i], leaves[i])
        found = {"loss": losses[i], **dict(zip(("grad_hidden", "grad_weight"), gradients, strict=True))}
        wanted = _exact(inputs, ignore_index=ignored)
        assert_near(found, wanted, f"of two calls, the {'first' if i == 0 else 'second'}", share=1e-5)


@pytest.mark.parametrize("with_gradients", [True, False], ids=["gradients", "no_gradients"])
def test_results_stay_while_other_calls_run(implementation: Implementation, with_gradients: bool, device: str) -> None:
    def call() -> dict[str, Tensor]:
        inputs = random_inputs(40, 16, 31, device)
        if with_gradients:
            return results(implementation.watched, inputs)
        with torch.no_grad():
            return {"loss": implementation.watched(inputs.hidden, inputs.weight, inputs.targets)}

    first = call()
    before = {name: x.clone() for name, x in first.items()}
    call()
    assert_unchanged(before, first, "while a second call ran, of the first")


def test_two_losses_of_one_weight_add_up(implementation: Implementation, device: str) -> None:
    """Each loss has its own factor, and the weight has a second use, like a weight tied to an embedding."""
    first, second = (random_inputs(40, 16, 31, device) for _ in range(2))

    def gradients(loss_of: Loss, dtype: torch.dtype) -> dict[str, Tensor]:
        inputs = first.hidden, first.weight, second.hidden
        hidden, weight, other = leaves = [x.to(dtype).detach().requires_grad_() for x in inputs]
        loss = 2 * loss_of(hidden, weight, first.targets) + 5 * loss_of(other, weight, second.targets)
        loss = loss + loss_of(hidden, weight, second.targets) ** 2 + weight[:40].square().sum()
        found = torch.autograd.grad(loss, leaves)
        return dict(zip(("grad_hidden", "grad_weight", "gradient of the other hidden"), found, strict=True))

    wanted = gradients(eager_loss, torch.float64)
    assert_near(gradients(implementation.watched, torch.float32), wanted, "of three losses' sum", share=1e-5)


SEQUENCE: list[tuple[int, int, torch.dtype, dict[str, Any]]] = [  # tokens, vocab, dtype, options
    (12, 31, torch.float32, {}),
    (9, 31, torch.float32, {"label_smoothing": 0.3}),
    (12, 40, torch.float32, {}),
    (12, 31, torch.bfloat16, {}),
    (12, 31, torch.float32, {"z_loss": 0.1}),
    (31, 12, torch.float32, {"ignore_index": 2}),
    (12, 31, torch.float64, {}),
    (12, 31, torch.float32, {}),
]


def test_calls_of_other_sizes_and_options_between(implementation: Implementation, device: str) -> None:
    """A buffer or option cached by an earlier call must not be used for another call."""
    ran = 0
    for tokens, vocab, dtype, options in SEQUENCE:
        inputs = random_inputs(tokens, 16, vocab, device, dtype)
        inputs.targets[inputs.targets < 0] = options.get("ignore_index", -100)
        try:
            found = results(implementation.watched, inputs, **options)
        except Unsupported:
            continue
        when = f"{tokens} tokens, {vocab} words, {dtype}, {options or 'no options'}, after other calls"
        assert_near(found, _exact(inputs, **options), when, share=0.1 if dtype == torch.bfloat16 else 1e-4)
        ran += 1
    if not ran:
        pytest.skip("takes none of these sizes and options")


@pytest.mark.parametrize("mode", ["gradients", "no_grad", "inference_mode", "autocast"])
def test_the_same_tensors_changed_in_place_give_other_results(
    implementation: Implementation, mode: str, device: str
) -> None:
    """Parameters and token buffers change in place between calls; under autocast a cast of the weight may be kept."""
    inputs, trains = random_inputs(40, 16, 31, device), mode in ("gradients", "autocast")
    tensors = [x.requires_grad_(trains) for x in (inputs.hidden, inputs.weight)]
    autocast = partial(torch.autocast, device, dtype=torch.bfloat16, cache_enabled=False)
    modes = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "autocast": autocast}
    with modes.get(mode, torch.enable_grad)():
        implementation.watched(*tensors, inputs.targets)
        for x in tensors:
            x.data.mul_(-0.5)
        inputs.targets.copy_(inputs.targets.roll(1))
        loss = implementation.watched(*tensors, inputs.targets)
    wanted, found = _exact(inputs), {"loss": loss.detach()}
    if trains:
        gradients = torch.autograd.grad(inputs.grad * loss, tensors)
        found |= dict(zip(("grad_hidden", "grad_weight"), gradients, strict=True))
    share = 0.03 if mode == "autocast" else 1e-5
    assert_near(found, {name: wanted[name] for name in found}, f"{mode}, after a change in place", share)


def test_trains_on_what_it_was_first_evaluated_on(implementation: Implementation, device: str) -> None:
    """Sizes that no other test has: tensors cached under inference_mode cannot be saved for backward."""
    inputs = random_inputs(43, 12, 37, device)
    with torch.inference_mode():
        implementation.watched(inputs.hidden, inputs.weight, inputs.targets)
    found = results(implementation.watched, inputs)
    assert_near(found, _exact(inputs), "trained on sizes that were evaluated first")


def _penalty_gradients(loss_of: Loss, inputs: Inputs, needed: str, **options: Any) -> dict[str, Tensor]:
    """Gradients of a loss that penalizes the gradients of what is needed. The loss is squared, so that its own gradient
    is no constant, and all that is needed gets a gradient: `once_differentiable` raises only then."""
    given = {"hidden": inputs.hidden, "weight": inputs.weight}
    given = {name: x.detach().requires_grad_(name in needed) for name, x in given.items()}
    loss = loss_of(*given.values(), inputs.targets, **options).square()
    leaves = {name: x for name, x in given.items() if x.requires_grad}
    gradients = torch.autograd.grad(loss, [*leaves.values()], create_graph=True)
    (loss + sum(x.square().sum() for x in gradients)).backward()
    assert all(x.grad is not None for x in leaves.values()), f"one of {needed} has no gradient"
    return {f"grad_{name}": x.grad for name, x in leaves.items()}


@pytest.mark.compiled_every_time("plain")
@pytest.mark.parametrize(
    ("options", "needed"),
    [
        ({}, "hidden and weight"),
        ({"label_smoothing": 0.2}, "hidden and weight"),
        ({"z_loss": 0.1}, "hidden and weight"),
        ({}, "hidden"),
        ({}, "weight"),
    ],
    ids=["plain", "smoothed", "z_loss", "hidden_alone", "weight_alone"],
)
def test_a_second_derivative_is_right_or_a_clear_error(
    implementation: Implementation, options: dict[str, float], needed: str, device: str
) -> None:
    inputs = random_inputs(20, 8, 13, device)
    wording = r"double backward|derivative for \S+ is not implemented|does not require grad"
    twice = partial(_penalty_gradients, needed=needed, **options)
    found = gradient_of_gradient(implementation, lambda: twice(implementation.watched, inputs), wording)
    if found is not None:
        assert_near(found, twice(eager_loss, inputs.to(torch.float64)), "differentiated twice")


def test_a_second_backward_pass_is_right_or_a_clear_error(implementation: Implementation, device: str) -> None:
    inputs = random_inputs(20, 8, 13, device)
    hidden, weight = (x.detach().requires_grad_() for x in (inputs.hidden, inputs.weight))
    loss = inputs.grad * implementation.watched(hidden, weight, inputs.targets)
    loss.backward(retain_graph=True)
    wanted = _exact(inputs)
    try:
        loss.backward()
    except RuntimeError as error:
        if is_ours(implementation) and not re.search("second|twice", str(error)):
            pytest.fail(f"no word of a second pass in {error!r}")
        passes = 1
    else:
        passes = 2
    assert hidden.grad is not None, "hidden has no gradient"
    assert weight.grad is not None, "weight has no gradient"
    found = {"grad_hidden": hidden.grad / passes, "grad_weight": weight.grad / passes}
    del wanted["loss"]
    assert_near(found, wanted, "of two backward passes", share=1e-5)


@pytest.mark.parametrize("changed", ["hidden", "weight", "targets", "loss"])
def test_a_backward_after_a_change_in_place_is_right_or_an_error(
    implementation: Implementation, changed: str, device: str
) -> None:
    """An optimizer steps while a loss waits, or a loader writes the next batch: autograd sees it of what
    `save_for_backward` has, and of nothing that is an attribute of ctx. The compiler saves views that hide it, so the
    implementation's own code is judged."""
    inputs = random_inputs(40, 16, 31, device)
    tensors = {name: x.detach().clone() for name, x in _tensors(inputs).items()}
    leaves = [tensors[name].requires_grad_() for name in ("hidden", "weight")]
    with torch.compiler.set_stance("force_eager"):
        loss = implementation.watched(*leaves, tensors["targets"])
    with torch.no_grad():
        x = (tensors | {"loss": loss})[changed]
        x.copy_(x.roll(1, 0) if x.ndim else -x)
    try:
        gradients = torch.autograd.grad(inputs.grad * loss, leaves)
    except RuntimeError:
        return
    wanted = _exact(inputs)
    del wanted["loss"]
    assert_near(dict(zip(wanted, gradients, strict=True)), wanted, f"{changed} changed before backward", share=1e-5)


def _called(loss_of: Loss, inputs: Inputs, how: str, **options: Any) -> object:
    if how == "gradients":
        return results(loss_of, inputs, **options)
    with torch.set_grad_enabled(how == "no_backward"):
        leaves = (x.detach().requires_grad_() for x in (inputs.hidden, inputs.weight))
        return loss_of(*leaves, inputs.targets, **options)


HOW = pytest.mark.parametrize("how", ["gradients", "no_backward", "no_grad"])


@pytest.mark.long
@HOW
def test_calls_leave_nothing_behind(implementation: Implementation, how: str, device: str) -> None:
    """A backward that never comes must not be the one that frees what forward keeps."""
    inputs = random_inputs(128 if how == "gradients" else 32, 16, 64, device)
    left = growth(lambda: _called(implementation.watched, inputs, how), device)
    assert left < 1000, f"four calls, whose results are gone, leave {left:,} bytes behind"


@pytest.mark.long
@pytest.mark.parametrize(
    "option", ["", *(pytest.param(each, marks=pytest.mark.judged) for each in ("label_smoothing", "z_loss"))]
)
@HOW
def test_a_large_call_leaves_nothing_behind(implementation: Implementation, how: str, option: str, device: str) -> None:
    """A buffer that is kept for the next call does not grow with calls, and is as lost."""
    small, large = random_inputs(16, 8, 32, device), random_inputs(300, 8, 600, device)
    options = {option: 0.1} if option else {}
    calls = [partial(_called, implementation.watched, x, how, **options) for x in (small, large)]
    left = left_by(*calls, device)
    assert left < 10_000, f"a call of 300 tokens and 600 words, whose results are gone, leaves {left:,} bytes behind"


def test_a_loss_holds_little_once_its_backward_has_run(implementation: Implementation, device: str) -> None:
    """A list of losses for a plot is kept by many a training script."""
    inputs = random_inputs(300, 8, 600, device)
    hidden, weight = inputs.hidden.requires_grad_(), inputs.weight.requires_grad_()

    def call() -> Tensor:
        loss = implementation.watched(hidden, weight, inputs.targets)
        loss.backward()
        hidden.grad = weight.grad = None
        return loss

    call()
    held = held_by(call, device)
    assert held < 10_000, f"a loss of 300 tokens and 600 words, whose backward has run, holds {held:,} bytes"


def test_each_gradient_has_memory_of_its_own(implementation: Implementation, device: str) -> None:
    """The weight's stays until the optimizer's step, and a view would keep the hidden states' with it."""
    inputs = random_inputs(128, 16, 64, device)
    for name, x in results(implementation.watched, inputs).items():
        holds = x.untyped_storage().nbytes()
        assert holds < 2 * x.nbytes + 1000, f"{name} of {x.nbytes:,} bytes keeps {holds:,} bytes alive"


def test_what_a_call_saves_is_freed_without_the_collector(implementation: Implementation, device: str) -> None:
    inputs = random_inputs(128, 16, 64, device)
    assert_freed_at_once(lambda: results(implementation.watched, inputs), device)


@pytest.mark.should("equal calls give equal bits")
def test_is_deterministic(implementation: Implementation, device: str, record_property: Note) -> None:
    inputs = random_inputs(40, 24, 97, device)
    first, second = (results(implementation.watched, inputs) for _ in range(2))
    differ = [name for name in first if not torch.equal(first[name], second[name])]
    if differ:
        assert not is_ours(implementation), f"{', '.join(differ)} of two equal calls differ"
        record_property("note", f"{', '.join(differ)} of two equal calls differ in their last bits")
