"""Param groups, arguments that change between steps, and several optimizers in one process."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR

from correctness.optim.training import assert_all_near, gradients, leaves, run, tensors, train
from correctness.support.contracts import Note
from impl.optim import AdamW
from shardmark.api import Implementation

pytestmark = [pytest.mark.family("optimizer"), pytest.mark.usefixtures("poisoned")]

OWN: dict[str, dict[str, Any]] = {
    "lr": {"lr": 0.3},
    "betas": {"betas": (0.5, 0.6)},
    "eps": {"eps": 0.1},
    "weight_decay": {"weight_decay": 0.9},
}


@pytest.mark.parametrize("name", OWN)
def test_param_groups_have_each_its_own_arguments(implementation: Implementation, name: str, device: str) -> None:
    start = tensors(device)
    grads = gradients(start, 3)
    halves = [leaves(start[:3]), leaves(start[3:])]
    found = run(implementation.watched([{"params": halves[0]}, {"params": halves[1], **OWN[name]}], lr=0.01), grads)
    expected = [
        *train(AdamW, start[:3], [step[:3] for step in grads], lr=0.01),
        *train(AdamW, start[3:], [step[3:] for step in grads], **{"lr": 0.01, **OWN[name]}),
    ]
    assert_all_near(found, expected)


def test_a_group_may_be_added_later(implementation: Implementation, device: str) -> None:
    """Its parameters begin with step 1; arguments that it does not have are the optimizer's defaults."""
    start = tensors(device)
    grads = gradients(start, 4)
    first, second = leaves(start[:3]), leaves(start[3:])
    optimizer = implementation.watched(first, lr=0.1, weight_decay=0.3)
    run(optimizer, [step[:3] for step in grads[:2]])
    optimizer.add_param_group({"params": second, "lr": 0.01, "betas": (0.5, 0.6)})
    found = run(optimizer, grads[2:])
    expected = [
        *train(AdamW, start[:3], [step[:3] for step in grads], lr=0.1, weight_decay=0.3),
        *train(AdamW, start[3:], [step[3:] for step in grads[2:]], lr=0.01, betas=(0.5, 0.6), weight_decay=0.3),
    ]
    assert_all_near(found, expected)


@pytest.mark.parametrize("name", OWN)
def test_arguments_may_change_between_steps(implementation: Implementation, name: str, device: str) -> None:
    """A scheduler writes lr, and OneCycleLR betas, into the group: each step reads them anew."""
    start = tensors(device)
    grads = gradients(start, 4)
    found, expected = (leaves(start) for _ in range(2))
    for target, params in ((implementation.watched, found), (AdamW, expected)):
        optimizer = target(params, lr=0.1)
        run(optimizer, grads[:2])
        optimizer.param_groups[0].update(OWN[name])
        run(optimizer, grads[2:])
    assert_all_near(found, expected)


SCHEDULERS: dict[str, Callable[[Any], LRScheduler]] = {
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=0.3, total_steps=5, cycle_momentum=True),
}


def _clip(optimizer: Any, *_: Any) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad.clamp_(-0.1, 0.3)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_and_hooks_of_steps_work(implementation: Implementation, name: str, device: str) -> None:
    """OneCycleLR writes betas too; each step's hooks run once, that before it may write gradients, and nothing warns of
    steps that a scheduler missed."""
    start = tensors(device, shapes=((3, 5), (4,)))
    grads = gradients(start, 4)
    found, expected, stepped = leaves(start), leaves(start), []
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=r".*lr_scheduler\.step")
        for target, params in ((AdamW, expected), (implementation.watched, found)):
            optimizer = target([{"params": params[:1]}, {"params": params[1:], "lr": 0.01}], lr=0.1)
            scheduler = SCHEDULERS[name](optimizer)
            optimizer.register_step_pre_hook(_clip)
            optimizer.register_step_post_hook(lambda *_: stepped.append(1))
            for count, step in enumerate(grads, 1):
                stepped.clear()
                run(optimizer, [step])
                assert len(stepped) == 1, f"the hook of step {count} ran {len(stepped)} times"
                scheduler.step()
    assert_all_near(found, expected)


def test_a_parameter_may_be_replaced_in_its_group(
    implementation: Implementation, device: str, record_property: Note
) -> None:
    """Before its first step and later, with its state; in the group's list, and by a new list."""
    start = tensors(device, shapes=((3, 5), (4,)))
    grads = gradients(start, 4)
    clips: list[dict[str, Any]] = [{"eps": 1.0, "max_grad_norm": 0.1}] * implementation.accepts("max_grad_norm")

    def trained(target: Callable[..., Any], options: dict[str, Any]) -> list[torch.Tensor]:
        optimizer = target(leaves(start), lr=0.1, **options)
        for i, step in enumerate(grads):
            (group,) = optimizer.param_groups
            old = group["params"][i % 2]
            (new,) = leaves([old])
            if i < 3:
                group["params"][i % 2] = new
            else:
                group["params"] = [*group["params"][:-1], new]
            if old in optimizer.state:
                optimizer.state[new] = optimizer.state.pop(old)
            params = run(optimizer, [step])
        return params

    for options in ({}, *clips):
        try:
            found = trained(implementation.watched, options)
        except Exception as error:
            record_property("note", f"no parameter may be replaced in its group: {type(error).__name__}")
            return
        expected = train(AdamW, start, grads, lr=0.1, **options)
        assert_all_near(found, expected, when=f"with {options}, of those that others have replaced, ")


def test_two_optimizers_at_once(implementation: Implementation, device: str) -> None:
    """Their parameters have equal shapes and their steps alternate: neither changes the other's results."""
    starts = [tensors(device) for _ in range(2)]
    grads = [gradients(start, 4) for start in starts]
    options = [{"lr": 0.1}, {"lr": 0.01, "betas": (0.5, 0.6)}]
    optimizers = [implementation.watched(leaves(x), **o) for x, o in zip(starts, options, strict=True)]
    for i in range(4):
        found = [run(optimizer, step[i : i + 1]) for optimizer, step in zip(optimizers, grads, strict=True)]
    for params, start, steps, arguments in zip(found, starts, grads, options, strict=True):
        assert_all_near(params, train(AdamW, start, steps, **arguments))


def test_an_optimizer_knows_nothing_of_those_before_it(implementation: Implementation, device: str) -> None:
    """Parameters of an optimizer that was freed may have had the same addresses and the same `id`."""
    start = tensors(device)
    grads = gradients(start, 3)
    expected = train(AdamW, start, grads, lr=0.1)
    for _ in range(4):
        assert_all_near(train(implementation.watched, start, grads, lr=0.1), expected)


def test_params_may_be_any_iterable(implementation: Implementation, device: str) -> None:
    """`model.parameters()` is a generator; a group may have one too."""
    start = tensors(device)
    grads = gradients(start, 2)
    expected = train(AdamW, start, grads)
    params = leaves(start)
    for given in (iter(params), [{"params": iter(params)}]):
        for p, x in zip(params, start, strict=True):
            p.data.copy_(x)
        assert_all_near(run(implementation.watched(given), grads), expected)


def test_a_frozen_weight_of_integers_stays(implementation: Implementation, device: str) -> None:
    """As `model.parameters()` has it where a frozen layer is quantized."""
    start, integers = tensors(device), torch.arange(-5, 6, dtype=torch.int8, device=device)
    params, before, grads = leaves(start), integers.clone(), gradients(start, 2)
    optimizer = implementation.watched([*params[:2], integers, *params[2:]], lr=0.1)
    for step in grads:
        for p, grad in zip(params, step, strict=True):
            p.grad = grad.clone()
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert torch.equal(integers, before), f"it has changed to {integers.tolist()}"
    assert_all_near(params, train(AdamW, start, grads, lr=0.1))
