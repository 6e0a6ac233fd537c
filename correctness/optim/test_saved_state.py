"""Training from a saved state equals training without a stop."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

from correctness.optim.training import assert_all_near, assert_near, gradients, leaves, run, saved, tensors, train
from correctness.support.contracts import changed_in_state, renumbered
from impl.optim import AdamW
from shardmark.api import Implementation

pytestmark = [pytest.mark.family("optimizer"), pytest.mark.usefixtures("poisoned")]

KEYS = ("step", "exp_avg", "exp_avg_sq")


def test_training_goes_back_to_a_saved_state(implementation: Implementation, device: str) -> None:
    """The state is loaded into the optimizer that saved it, after more steps."""
    start = tensors(device)
    grads = gradients(start, 4)
    optimizer = implementation.watched(leaves(start), lr=0.1)
    params = run(optimizer, grads[:2])
    state, values = saved(optimizer), [p.detach().clone() for p in params]
    run(optimizer, gradients(start, 3))
    optimizer.load_state_dict(state)
    with torch.no_grad():
        for p, value in zip(params, values, strict=True):
            p.copy_(value)
    assert_all_near(run(optimizer, grads[2:]), train(AdamW, start, grads, lr=0.1))


def test_the_ids_of_a_state_are_those_of_its_groups(implementation: Implementation, device: str) -> None:
    """They are 0, 1, 2, ... in states of torch's own; those that tools join or reorder have others."""
    start = tensors(device)
    grads = gradients(start, 4)
    first = implementation.watched(leaves(start), lr=0.1)
    second = implementation.watched(leaves(run(first, grads[:2])), lr=0.1)
    second.load_state_dict(renumbered(saved(first)))
    assert_all_near(run(second, grads[2:]), train(AdamW, start, grads, lr=0.1))


def test_loading_changes_nothing_of_what_is_loaded(implementation: Implementation, device: str) -> None:
    """A caller may load it again, into another optimizer, or save it."""
    start = tensors(device)
    first, second = (implementation.watched(leaves(start), lr=lr) for lr in (0.1, 0.2))
    run(first, gradients(start, 2))
    given = first.state_dict()
    before = copy.deepcopy(given)
    second.load_state_dict(given)
    changed = changed_in_state(before, given)
    assert not changed, f"load_state_dict changes what it is given: {changed}"


@pytest.mark.should("a loaded state is a copy of what was loaded")
def test_a_loaded_state_is_a_copy(implementation: Implementation, device: str) -> None:
    """torch's own `load_state_dict` keeps the tensors themselves: two optimizers then step on the same moments."""
    start = tensors(device)
    first, second = (implementation.watched(leaves(start)) for _ in range(2))
    run(first, gradients(start, 2))
    second.load_state_dict(given := first.state_dict())
    before = copy.deepcopy(given)
    run(second, gradients(start, 1))
    changed = changed_in_state(before, given)
    assert not changed, f"a step changes the state that was loaded before it, of another optimizer: {changed}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_loaded_state_is_the_saved_one_to_the_bit(
    implementation: Implementation, dtype: torch.dtype, device: str
) -> None:
    """Narrow parameters too, whose moments may be wider: torch's own `load_state_dict` casts state to the dtype of
    its parameter."""
    start = tensors(device, dtype)
    first = implementation.watched(leaves(start))
    second = implementation.watched(leaves(run(first, gradients(start, 3))))
    second.load_state_dict(saved(first))
    theirs = second.state_dict()["state"]
    for i, state in saved(first)["state"].items():
        for name, value in state.items():
            was, now = torch.as_tensor(value), torch.as_tensor(theirs.get(i, {}).get(name, torch.nan))
            same = was.dtype == now.dtype and torch.equal(was, now) if name != "step" else float(was) == float(now)
            assert same, (
                f"{name!r} of parameter {i}, which is {dtype}, was of {was.dtype} as saved and is of {now.dtype} once "
                f"loaded: off by {(was.double() - now.double()).abs().max():.2g}, and at most {was.abs().max():.2g}"
            )


def test_loaded_hyperparameters_replace_its_own(implementation: Implementation, device: str) -> None:
    """Training goes on with the saved state and arguments, in a new optimizer with other arguments."""
    start = tensors(device)
    grads = gradients(start, 4)
    options = {"lr": 0.1, "betas": (0.5, 0.6), "eps": 1e-3, "weight_decay": 0.5}
    first = implementation.watched(leaves(start), **options)
    halfway = run(first, grads[:2])
    second = implementation.watched(leaves(halfway))
    second.load_state_dict(saved(first))
    assert_all_near(run(second, grads[2:]), train(AdamW, start, grads, **options))


def test_a_saved_state_has_each_groups_state(implementation: Implementation, device: str) -> None:
    """State is matched by the order of parameters; some have had no gradient."""
    start = tensors(device, shapes=((3,), (3,), (3,)))
    grads = gradients(start, 4)

    def make(target: Callable[..., Any], values: Any) -> Any:
        a, b, c = leaves(values)
        return target([{"params": [a, b]}, {"params": [c], "lr": 0.3}], lr=0.1)

    def steps(optimizer: Any, some: list[Any]) -> Any:
        params = [p for group in optimizer.param_groups for p in group["params"]]
        for step in some:
            for i, (p, grad) in enumerate(zip(params, step, strict=True)):
                p.grad = None if i == 0 and step is not grads[-1] else grad.clone()
            optimizer.step()
        return params

    first = make(implementation.watched, start)
    halfway = steps(first, grads[:2])
    second = make(implementation.watched, halfway)
    second.load_state_dict(saved(first))
    assert_all_near(steps(second, grads[2:]), steps(make(AdamW, start), grads))


def test_a_state_without_steps_can_be_loaded(implementation: Implementation, device: str) -> None:
    start = tensors(device)
    grads = gradients(start, 2)
    optimizer = implementation.watched(leaves(start), lr=0.5)
    optimizer.load_state_dict(saved(implementation.watched(leaves(start), lr=0.1)))
    assert_all_near(run(optimizer, grads), train(AdamW, start, grads, lr=0.1))


@pytest.mark.should("a state of other groups is a ValueError")
def test_a_state_of_other_groups_is_a_value_error(implementation: Implementation, device: str) -> None:
    start = tensors(device)
    state = saved(implementation.watched([{"params": leaves(start[:2])}, {"params": leaves(start[2:])}]))
    for sizes in ((5,), (3, 2), (2, 2), (2, 3, 1)):
        params = leaves(tensors(device, shapes=((3,),) * sum(sizes)))
        optimizer = implementation.watched([{"params": [params.pop() for _ in range(size)]} for size in sizes])
        try:
            optimizer.load_state_dict(state)
        except ValueError:
            continue
        pytest.fail(f"a state of groups of 2 and 3 parameters was loaded into groups of {sizes}: no ValueError")


def test_torchs_adamw_goes_on_from_the_state(implementation: Implementation, device: str) -> None:
    """Moments are stored without bias correction, like torch's."""
    start = tensors(device)
    grads = gradients(start, 4)
    optimizer = implementation.watched(leaves(start), lr=0.1)
    theirs = torch.optim.AdamW(leaves(run(optimizer, grads[:2])), foreach=False)
    theirs.load_state_dict(saved(optimizer))
    assert_all_near(run(theirs, grads[2:]), train(AdamW, start, grads, lr=0.1))


def test_training_goes_on_from_the_state_of_complex_parameters(implementation: Implementation, device: str) -> None:
    """In torch's AdamW and in a new optimizer, where complex parameters are trained as torch's AdamW does: the moments
    are complex too."""
    start = [torch.randn(shape, dtype=torch.complex128, device=device) for shape in ((3, 5), (), (4,))]
    grads = [[torch.randn_like(x) for x in start] for _ in range(4)]
    expected = train(torch.optim.AdamW, start, grads, lr=0.1)
    try:
        found = train(implementation.watched, start, grads, lr=0.1)
    except Exception:
        return
    if not all(torch.allclose(x, y, rtol=1e-9) for x, y in zip(found, expected, strict=True)):
        return
    optimizer = implementation.watched(leaves(start), lr=0.1)
    halfway = run(optimizer, grads[:2])
    for name, target in {"torch's AdamW": torch.optim.AdamW, "a new optimizer": implementation.watched}.items():
        other = target(leaves(halfway))
        try:
            other.load_state_dict(saved(optimizer))
            found = run(other, grads[2:])
        except Exception as error:
            pytest.fail(f"{name} does not go on from the state of complex parameters: {type(error).__name__}: {error}")
        pairs = ([torch.view_as_real(x.detach()) for x in params] for params in (found, expected))
        assert_all_near(*pairs, when=f"in {name} that goes on, of complex numbers, ")


def test_it_goes_on_from_the_state_of_torchs_adamw(
    implementation: Implementation, device: str, record_property: Callable[[str, object], None]
) -> None:
    start = tensors(device)
    grads = gradients(start, 4)
    theirs = torch.optim.AdamW(leaves(start), lr=0.1)
    halfway = run(theirs, grads[:2])
    optimizer = implementation.watched(leaves(halfway))
    try:
        optimizer.load_state_dict(saved(theirs))
        found = run(optimizer, grads[2:])
    except Exception as error:
        record_property("note", f"it does not go on from the state of torch's AdamW: {type(error).__name__}: {error}")
        return
    for i, (x, y) in enumerate(zip(found, train(AdamW, start, grads, lr=0.1), strict=True)):
        if y.numel():  # a step count that is now a float32 tensor may round the bias corrections
            assert_near(x.detach(), y, 1e-4, f"parameter {i}")


def test_the_state_dict_is_of_now(implementation: Implementation, device: str) -> None:
    """It has the moments and step counts after each step; a copy of an earlier one does not change."""
    start = tensors(device, shapes=((3, 5), (4,)))
    grads = gradients(start, 5)
    optimizer, expected = implementation.watched(leaves(start)), AdamW(leaves(start))
    for step in grads:
        run(optimizer, [step])
        run(expected, [step])
        state, theirs = (copy.deepcopy(x.state_dict()["state"]) for x in (optimizer, expected))
        for i in theirs:
            missing = [key for key in KEYS if key not in state.get(i, {})]
            assert not missing, f"the state of parameter {i} has no {' and no '.join(missing)}"
            assert float(state[i]["step"]) == float(theirs[i]["step"]), f"step of parameter {i}: {state[i]['step']}"
            for name in KEYS[1:]:
                assert_near(state[i][name].double(), theirs[i][name], 1e-10, f"{name} of parameter {i}")
