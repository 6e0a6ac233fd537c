"""Calls of layers are independent: nothing is shared, changed, or held longer than needed."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from correctness.layers.accuracy import assert_accurate
from correctness.layers.operations import Inputs, call, gradients, leaves_of, random_inputs, results
from correctness.support.contracts import (
    Note,
    assert_freed_at_once,
    assert_near,
    assert_unchanged,
    gradient_of_gradient,
    growth,
    is_ours,
    left_by,
)
from correctness.support.global_state import global_state_stays
from impl.layers import OPERATIONS, EagerLayers
from shardmark.api import Implementation

pytestmark = [pytest.mark.family("layers"), pytest.mark.usefixtures("poisoned")]

EACH = pytest.mark.parametrize("operation", OPERATIONS)


@EACH
def test_leaves_arguments_and_gradients_as_they_are(
    implementation: Implementation, operation: str, device: str
) -> None:
    """A backward that writes over the gradient it is given changes what another use of the result gets."""
    inputs = random_inputs(operation, 7, 24, device)
    given = inputs.tensors | inputs.grads
    before = {name: x.clone() for name, x in given.items()}
    with global_state_stays("forward or backward"):
        results(implementation.watched, inputs)
    assert_unchanged(before, given, "after forward and backward")


@EACH
def test_leaves_results_of_other_operations_as_they_are(
    implementation: Implementation, operation: str, device: str
) -> None:
    """Another operation may have saved its result for its own backward, as exp does."""
    inputs = random_inputs(operation, 7, 24, device)
    given = {name: x.clone() for name, x in leaves_of(inputs).items()}
    gradients(call(implementation.watched, inputs, given), given, inputs)
    assert_unchanged(inputs.tensors, given, "after forward and backward")


@EACH
@pytest.mark.parametrize("mode", ["gradients", "no_grad", "inference_mode"])
def test_results_are_no_views_of_arguments(
    implementation: Implementation, mode: str, operation: str, device: str
) -> None:
    inputs = random_inputs(operation, 7, 24, device)
    with {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(mode, torch.enable_grad)():
        found = call(implementation.watched, inputs)
    kept = {name: x.clone() for name, x in found.items()}
    for x in inputs.tensors.values():
        x.zero_()
    assert_unchanged(kept, found, "after the arguments were overwritten")


@EACH
@pytest.mark.parametrize("first_backward", [0, 1], ids=["in_order", "in_reverse"])
def test_two_forwards_before_either_backward(
    implementation: Implementation, first_backward: int, operation: str, device: str
) -> None:
    """Two layers of one size: what the first keeps for backward is its own."""
    calls = [random_inputs(operation, 7, 24, device) for _ in range(2)]
    leaves = [leaves_of(inputs) for inputs in calls]
    found = [call(implementation.watched, inputs, each) for inputs, each in zip(calls, leaves, strict=True)]
    for i in (first_backward, 1 - first_backward):
        mine = {name: x.detach() for name, x in found[i].items()} | gradients(found[i], leaves[i], calls[i])
        assert_accurate(mine, calls[i], when=f"of two calls, the {'first' if i == 0 else 'second'}: ")


@EACH
def test_results_stay_while_other_calls_run(implementation: Implementation, operation: str, device: str) -> None:
    def trained_and_evaluated() -> dict[str, Tensor]:
        inputs = random_inputs(operation, 7, 24, device)
        with torch.no_grad():
            evaluated = call(implementation.watched, inputs)
        return results(implementation.watched, inputs) | {f"{name}, evaluated": x for name, x in evaluated.items()}

    first = trained_and_evaluated()
    before = {name: x.clone() for name, x in first.items()}
    trained_and_evaluated()
    assert_unchanged(before, first, "while a second call ran, of the first")


@EACH
def test_uses_of_one_argument_add_up(implementation: Implementation, operation: str, device: str) -> None:
    """Two calls share their arguments, of which the first has a third use, as the residual stream has."""
    inputs = random_inputs(operation, 7, 24, device)

    def of(layers: object, inputs: Inputs) -> dict[str, Tensor]:
        leaves = leaves_of(inputs)
        results = call(layers, inputs, leaves)
        again = call(layers, inputs, leaves)
        first = next(iter(leaves.values()))
        loss = sum((2 * x * inputs.grads[name]).sum() for name, x in results.items()) + first.square().sum()
        loss = loss + sum((x * again[name]).sum() for name, x in results.items())
        wanted = {name: x for name, x in leaves.items() if x.requires_grad}
        return dict(zip(wanted, torch.autograd.grad(loss, [*wanted.values()]), strict=True))

    assert_near(of(implementation.watched, inputs), of(EagerLayers, inputs.to(torch.float64)), "of several uses", 1e-5)


@EACH
def test_calls_of_other_sizes_between(implementation: Implementation, operation: str, device: str) -> None:
    """A buffer or an option of an earlier call must not be used for another one."""
    for rows, dim, eps in ((7, 24, 1e-5), (3, 24, 1e-2), (7, 40, 1e-5), (7, 24, 1e-3), (24, 7, 1e-5), (7, 24, 1e-5)):
        inputs = random_inputs(operation, rows, dim, device)
        inputs = Inputs(operation, inputs.tensors, inputs.grads, eps)
        found = results(implementation.watched, inputs)
        assert_accurate(found, inputs, when=f"of {rows} rows, {dim} columns, eps {eps}, after other calls: ")


@EACH
def test_trains_on_what_it_was_first_evaluated_on(implementation: Implementation, operation: str, device: str) -> None:
    """Sizes that no other test has: tensors cached under inference_mode cannot be saved for backward."""
    inputs = random_inputs(operation, 11, 26, device)
    with torch.inference_mode():
        call(implementation.watched, inputs)
    assert_accurate(results(implementation.watched, inputs), inputs, when="on sizes that were evaluated first: ")


@EACH
@pytest.mark.parametrize(
    ("mode", "dtype"),
    [
        ("gradients", torch.float32),
        ("no_grad", torch.float32),
        ("no_grad", torch.bfloat16),
        ("inference_mode", torch.bfloat16),
    ],
    ids=str,
)
def test_the_same_tensors_changed_in_place_give_other_results(
    implementation: Implementation, mode: str, dtype: torch.dtype, operation: str, device: str
) -> None:
    """Weights change in place between steps; a change by `.data` is in no tensor's version."""
    inputs = random_inputs(operation, 3, 24, device, dtype)
    leaves = leaves_of(inputs)
    with {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(mode, torch.enable_grad)():
        call(implementation.watched, inputs, leaves)
        for x in leaves.values():
            x.data.mul_(-0.5)
        found = call(implementation.watched, inputs, leaves)
    given = gradients(found, leaves, inputs) if mode == "gradients" else {}
    found = {name: x.detach() for name, x in found.items()} | given
    assert_accurate(found, inputs, when=f"{mode}, after a change in place: ")


@EACH
def test_a_checkpointed_layer_is_as_accurate(implementation: Implementation, operation: str, device: str) -> None:
    """Forward runs again in backward, and what it saves is taken from there."""
    inputs = random_inputs(operation, 7, 24, device)
    leaves = leaves_of(inputs)
    found = checkpoint(partial(call, implementation.watched, inputs), leaves, use_reentrant=False)
    assert_accurate(gradients(found, leaves, inputs), inputs, when="checkpointed: ")


def _penalty_gradients(layers: object, inputs: Inputs, needed: list[str]) -> dict[str, Tensor]:
    """Gradients of a loss that penalizes the gradients of the arguments `needed`; the loss is squared, so that its own
    gradient is no constant."""
    leaves = leaves_of(inputs, needed)
    found = call(layers, inputs, leaves)
    loss = sum((x * inputs.grads[name]).sum() for name, x in found.items()).square()
    grads = torch.autograd.grad(loss, [leaves[name] for name in needed], create_graph=True)
    (loss + sum(x.square().sum() for x in grads)).backward()
    assert all(leaves[name].grad is not None for name in needed), f"one of {', '.join(needed)} has no gradient"
    return {f"grad_{name}": leaves[name].grad for name in needed}


@EACH
def test_a_second_derivative_is_right_or_a_clear_error(
    implementation: Implementation, operation: str, device: str
) -> None:
    """The penalty is of all arguments, or of each alone, as if the others were frozen."""
    inputs = random_inputs(operation, 5, 8, device)
    wording = r"double backward|derivative for \S+ is not implemented|does not require grad"
    for needed in (inputs.learned, *([name] for name in inputs.learned)):
        twice = partial(_penalty_gradients, needed=needed)
        found = gradient_of_gradient(implementation, lambda twice=twice: twice(implementation.watched, inputs), wording)
        if found is not None:
            wanted = twice(EagerLayers, inputs.to(torch.float64))
            assert_near(found, wanted, f"of {' and '.join(needed)} differentiated twice")


@EACH
def test_a_second_backward_pass_is_right_or_an_error(
    implementation: Implementation, operation: str, device: str
) -> None:
    inputs = random_inputs(operation, 7, 24, device)
    leaves = leaves_of(inputs)
    found = call(implementation.watched, inputs, leaves)
    assert_accurate(gradients(found, leaves, inputs, retain_graph=True), inputs, when="of a first backward pass: ")
    try:
        again = gradients(found, leaves, inputs)
    except RuntimeError:
        assert not is_ours(implementation), "ours keep what a second pass needs"
    else:
        assert_accurate(again, inputs, when="of a second backward pass: ")


@EACH
def test_a_backward_after_a_change_in_place_is_right_or_an_error(
    implementation: Implementation, operation: str, device: str
) -> None:
    """A block that adds to the residual stream, which is an argument or a result, in place: autograd sees it of what
    `save_for_backward` has, and of nothing that is an attribute of ctx."""
    drawn = random_inputs(operation, 7, 24, device)
    for changed in (*drawn.tensors, *drawn.grads):
        inputs = random_inputs(operation, 7, 24, device)
        tensors = {name: x.clone() for name, x in inputs.tensors.items()}
        leaves = {name: x.requires_grad_(name in inputs.learned) for name, x in tensors.items()}
        with torch.compiler.set_stance("force_eager"):
            found = call(implementation.watched, inputs, leaves)
        with torch.no_grad():
            x = (tensors | found)[changed]
            x.copy_(x.flip(-1) + 1)
        try:
            given = gradients(found, leaves, inputs)
        except RuntimeError:
            continue
        assert_accurate(given, inputs, when=f"{changed} changed before backward: ")


@pytest.mark.long
@EACH
def test_calls_leave_nothing_behind(implementation: Implementation, operation: str, device: str) -> None:
    def trained_and_evaluated(inputs: Inputs) -> None:
        results(implementation.watched, inputs)
        with torch.no_grad():
            call(implementation.watched, inputs)

    inputs = random_inputs(operation, 5, 128, device)
    left = growth(lambda: results(implementation.watched, inputs), device)
    assert left < 1000, f"four calls, whose results are gone, leave {left:,} bytes behind"
    left = growth(lambda: call(implementation.watched, inputs, leaves_of(inputs)), device)
    assert left < 1000, f"four forwards without a backward, whose results are gone, leave {left:,} bytes behind"
    small, large = (partial(trained_and_evaluated, random_inputs(operation, n, 512, device)) for n in (2, 20))
    left = left_by(small, large, device)
    assert left < 10_000, f"a call of 20 rows, whose results are gone, leaves {left:,} bytes behind"


@EACH
def test_what_a_call_saves_is_freed_without_the_collector(
    implementation: Implementation, operation: str, device: str
) -> None:
    inputs = random_inputs(operation, 5, 128, device)
    assert_freed_at_once(lambda: results(implementation.watched, inputs), device)


@pytest.mark.should("equal calls give equal bits")
@EACH
def test_is_deterministic(implementation: Implementation, operation: str, device: str, record_property: Note) -> None:
    inputs = random_inputs(operation, 9, 24, device)
    first, second = (results(implementation.watched, inputs) for _ in range(2))
    differ = [name for name in first if not torch.equal(first[name], second[name])]
    if differ:
        assert not is_ours(implementation), f"{', '.join(differ)} of two equal calls differ"
        record_property("note", f"{', '.join(differ)} of two equal calls differ in their last bits")
