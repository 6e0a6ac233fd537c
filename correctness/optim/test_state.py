"""What a real optimizer meets: saved state, param groups, schedulers, closures, odd layouts, tensors that move."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.support.optimizing import assert_same, gradients, leaves, run, tensors, train
from impl.optim import AdamW, TorchForeach, TorchForLoop, TorchFused
from shardmark.registry import Implementation

pytestmark = [pytest.mark.family("optimizer"), pytest.mark.usefixtures("poisoned")]

OPTIONS = {"float32": (torch.float32, {}), "master": (torch.bfloat16, {"master_weights": True})}


def _saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.family("optimizer", option="master_weights")
@pytest.mark.parametrize("kind", OPTIONS)
def test_training_goes_on_from_a_saved_state_to_the_bit(implementation: Implementation, kind: str, device: str) -> None:
    dtype, options = OPTIONS[kind]
    start = tensors(device, dtype)
    grads = gradients(start, 6)
    first = implementation.target(leaves(start), lr=1e-2, **options)
    halfway = run(first, grads[:3])
    second = implementation.target(leaves(halfway), **options)
    second.load_state_dict(_saved(first))
    assert_same(run(second, grads[3:]), train(implementation.target, start, grads, lr=1e-2, **options))


@pytest.mark.family("optimizer", option="master_weights")
def test_state_goes_to_torchs_adamw_and_back(implementation: Implementation, device: str) -> None:
    start = tensors(device, torch.float32)
    grads = gradients(start, 6)
    optimizer = implementation.target(leaves(start))
    theirs = torch.optim.AdamW(leaves(run(optimizer, grads[:2])), foreach=False)
    theirs.load_state_dict(_saved(optimizer))
    back = implementation.target(leaves(run(theirs, grads[2:4])))
    back.load_state_dict(_saved(theirs))
    found = run(back, grads[4:])
    assert all(state["step"] == 6 for state in back.state.values())
    expected = train(AdamW, start, grads)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.detach(), y, rtol=20 * torch.finfo(torch.float32).eps, atol=1e-7)


@pytest.mark.family("optimizer", option="max_grad_norm")
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_a_copy_keeps_options_and_state(
    implementation: Implementation, copied: Callable[[Any], Any], device: str
) -> None:
    start = tensors(device, torch.bfloat16)
    grads = gradients(start, 4)
    options = {"max_grad_norm": 0.5, "master_weights": True}
    optimizer = implementation.target(leaves(start), **options)
    run(optimizer, grads[:2])
    assert_same(run(copied(optimizer), grads[2:]), train(implementation.target, start, grads, **options))


@pytest.mark.family("optimizer", option="max_grad_norm")
def test_state_of_another_algorithm_is_one_line_and_changes_nothing(
    implementation: Implementation, device: str
) -> None:
    start = tensors(device, torch.float32)
    theirs = torch.optim.AdamW(leaves(start), amsgrad=True)
    run(theirs, gradients(start, 1))
    optimizer = implementation.target(leaves(start))
    with pytest.raises(ValueError, match=r"^the state is of AdamW with amsgrad or maximize, .*$"):
        optimizer.load_state_dict(theirs.state_dict())
    assert not optimizer.state


# What a real optimizer meets


def test_param_groups_have_each_its_own_arguments(implementation: Implementation, device: str) -> None:
    start = tensors(device, torch.float64)
    grads = gradients(start, 4)
    halves = [start[:3], start[3:]]
    own = [{"lr": 1e-2, "weight_decay": 0.0}, {"lr": 1e-3, "betas": (0.5, 0.6), "eps": 1e-3}]
    first, second = (leaves(half) for half in halves)
    optimizer = implementation.target([{"params": first, **own[0]}], lr=1.0, weight_decay=0.3)
    run(optimizer, [step[:3] for step in grads[:2]])
    optimizer.add_param_group({"params": second, **own[1]})
    found = run(optimizer, grads[2:])
    expected = [
        *train(AdamW, halves[0], [step[:3] for step in grads], **own[0]),
        *train(AdamW, halves[1], [step[3:] for step in grads[2:]], **own[1], **{"weight_decay": 0.3}),
    ]
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.detach(), y, rtol=1e-13, atol=1e-13)


def test_a_scheduler_is_followed(implementation: Implementation, device: str) -> None:
    start = tensors(device, torch.float64)
    grads = gradients(start, 4)
    found, expected = (leaves(start) for _ in range(2))
    for target, params in ((implementation.target, found), (AdamW, expected)):
        optimizer = target(params, lr=0.1)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.1)
        for step in grads:
            run(optimizer, [step])
            schedule.step()
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.detach(), y.detach(), rtol=1e-13, atol=1e-13)


def test_a_closure_is_evaluated_with_gradients(implementation: Implementation, device: str) -> None:
    x = torch.ones(5, device=device, requires_grad=True)
    optimizer = implementation.target([x], lr=0.1, weight_decay=0.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (x * x).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 5
    torch.testing.assert_close(x.detach(), torch.full_like(x, 0.9))


def test_parameters_without_a_gradient_are_left_alone(implementation: Implementation, device: str) -> None:
    with_grad, without = (torch.ones(5, device=device, requires_grad=True) for _ in range(2))
    optimizer = implementation.target([without, with_grad], lr=0.1)
    optimizer.step()  # no gradient at all
    for i in range(3):
        without.grad = torch.ones_like(without) if i == 1 else None
        with_grad.grad = torch.ones_like(with_grad)
        if i == 0:
            optimizer.step()
            assert without.eq(1).all() and not optimizer.state.get(without)
        else:
            optimizer.step()
    before = with_grad.detach().clone()
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.step()  # nothing again, twice
    assert torch.equal(with_grad.detach(), before)
    assert optimizer.state[with_grad]["step"] == 3 and optimizer.state[without]["step"] == 1
    once = train(AdamW, [torch.ones(5, device=device)], [[torch.ones(5, device=device)]], lr=0.1)
    torch.testing.assert_close(without.detach(), once[0])


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "columns_apart": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "odd_offset": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
}


@pytest.mark.parametrize("grad_layout", ["contiguous", *LAYOUTS])
@pytest.mark.parametrize("layout", ["contiguous", *LAYOUTS])
def test_any_layout_of_parameters_and_gradients(
    implementation: Implementation, layout: str, grad_layout: str, device: str
) -> None:
    kinds = {"contiguous" if kind == "odd_offset" else kind for kind in (layout, grad_layout)}
    if implementation.name == "torch_fused" and (len(kinds) > 1 or "columns_apart" in kinds):
        pytest.skip("torch's fused AdamW takes dense gradients laid out as their parameters; on CPU it misreads others")
    start = tensors(device, torch.float64, ((30, 40), (3, 5)))
    grads = gradients(start, 3)
    expected = train(AdamW, start, grads)
    lay = LAYOUTS.get(layout, lambda x: x)
    params = [lay(x.clone()).detach().requires_grad_() for x in start]
    optimizer = implementation.target(params)
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = LAYOUTS.get(grad_layout, lambda x: x)(g.clone())
        optimizer.step()
    for x, y in zip(params, expected, strict=True):
        torch.testing.assert_close(x.detach(), y, rtol=1e-13, atol=1e-13)


def test_state_may_be_replaced_between_steps(implementation: Implementation, device: str) -> None:
    """As by who moves it away and back, tensors or their data; the old ones are not written any more."""
    start = tensors(device, torch.float64)
    grads = gradients(start, 4)
    optimizer = implementation.target(leaves(start))
    params = run(optimizer, grads[:1])
    kept = []
    for i, step in enumerate(grads[1:]):
        for p, g in zip(params, step, strict=True):
            p.grad.copy_(g)  # where it was
            for name in ("exp_avg", "exp_avg_sq") if i == 2 else ("exp_avg",) if i else ("exp_avg_sq",):
                old = optimizer.state[p][name]
                kept.append((old.data, old.data.clone()))
                if i < 2:
                    optimizer.state[p][name] = old.clone()
                else:
                    old.data = old.data.clone()
        optimizer.step()
    assert all(torch.equal(old, value) for old, value in kept)
    for x, y in zip(params, train(AdamW, start, grads), strict=True):
        torch.testing.assert_close(x.detach(), y, rtol=1e-13, atol=1e-13)


def test_state_that_is_taken_away_is_let_go(implementation: Implementation, device: str) -> None:
    start = tensors(device, torch.float32)
    optimizer = implementation.target(leaves(start))
    run(optimizer, gradients(start, 2))
    moment = weakref.ref(next(iter(optimizer.state.values()))["exp_avg"])
    optimizer.state.clear()
    assert moment() is None


@pytest.mark.parametrize("what", ["gradient", "moment"])
def test_a_tensor_may_be_transposed_in_place(implementation: Implementation, what: str, device: str) -> None:
    """The same address does not mean the same strides."""
    if implementation.name == "torch_fused":
        pytest.skip("torch's fused AdamW takes dense gradients laid out as their parameters; on CPU it misreads others")
    start = tensors(device, torch.float64, ((6, 6),))
    grads = gradients(start, 1)
    found = []
    for target in (implementation.target, AdamW):
        optimizer = target(leaves(start))
        (p,) = run(optimizer, grads)
        if what == "gradient":
            p.grad = p.grad.t()
        else:
            optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].t()
        optimizer.step()
        found.append(p.detach())
    torch.testing.assert_close(*found, rtol=1e-13, atol=1e-13)


def test_what_torch_pins_stays_pinned_when_state_is_loaded(implementation: Implementation, device: str) -> None:
    if not hasattr(implementation.target, "kind"):
        pytest.skip(f"{implementation} is not one of torch's")
    start = tensors(device, torch.float32)
    for other in (TorchForLoop, TorchForeach, TorchFused):
        theirs, optimizer = other(leaves(start)), implementation.target(leaves(start))
        run(theirs, gradients(start, 1))
        optimizer.load_state_dict(_saved(theirs))
        assert optimizer.param_groups[0].items() >= implementation.target.kind.items()


@pytest.mark.family("optimizer", option="master_weights")
def test_step_counts_load_in_any_dtype(implementation: Implementation, device: str) -> None:
    """torch makes them in its default dtype, which may be float64."""
    start = tensors(device, torch.float32)
    grads = gradients(start, 4)
    first = implementation.target(leaves(start))
    second = implementation.target(leaves(run(first, grads[:2])))
    saved = _saved(first)
    for state in saved["state"].values():
        state["step"] = state["step"].double()
    second.load_state_dict(saved)
    assert_same(run(second, grads[2:]), train(implementation.target, start, grads))


def test_gradients_and_parameters_may_move(implementation: Implementation, device: str) -> None:
    """New gradients each step, as after `zero_grad`, and parameters whose data is replaced."""
    start = tensors(device, torch.float64)
    grads = gradients(start, 5)
    optimizer = implementation.target(leaves(start))
    params = run(optimizer, grads[:2])
    kept = []
    for step in grads[2:]:
        for p in params:
            kept.append((p.data, p.data.clone()))
            p.data = p.data.clone()
        run(optimizer, [step])
    assert all(torch.equal(old, value) for old, value in kept)  # what was replaced is not written any more
    for x, y in zip(params, train(AdamW, start, grads), strict=True):
        torch.testing.assert_close(x.detach(), y, rtol=1e-13, atol=1e-13)
