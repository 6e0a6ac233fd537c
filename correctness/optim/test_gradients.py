"""Gradients of a step: zero, None, not finite, of any layout; and parameters that change in place."""

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.optim.training import assert_all_near, assert_same, gradients, leaves, run, tensors, train
from impl.optim import AdamW
from shardmark.api import Implementation

pytestmark = [pytest.mark.family("optimizer"), pytest.mark.usefixtures("poisoned")]

MISREAD = pytest.mark.xfail(
    reason="torch's fused AdamW misreads gradients of other strides on CPU: docs/pytorch-defects.md", strict=False
)


def _steps_of(optimizer: Any, p: Tensor) -> float:
    """Step count in the parameter's state, 0 without a state."""
    return float(optimizer.state.get(p, {}).get("step", 0))


def test_a_zero_gradient_is_a_gradient(implementation: Implementation, device: str) -> None:
    """A zero gradient still decays the weight and applies the first moment."""
    start = tensors(device)
    grads = gradients(start, 3)
    grads[1:2] = [[torch.zeros_like(x) for x in start]]
    found = train(implementation.watched, start, grads, lr=0.1)
    assert_all_near(found, train(AdamW, start, grads, lr=0.1), when="after a step in which all gradients are 0: ")


@pytest.mark.parametrize("rows", ["first", pytest.param("all_but_last", marks=pytest.mark.sweep)])
def test_zeros_in_a_gradient_are_gradients(implementation: Implementation, rows: str, device: str) -> None:
    """Rows of an embedding whose tokens are not in the batch have zero gradients."""
    start = tensors(device, shapes=((6, 5), (7,), (4, 3, 2)))
    grads = gradients(start, 4)
    for step in grads[1:3]:
        for grad in step:
            (grad[:1] if rows == "first" else grad[:-1]).zero_()
    found = train(implementation.watched, start, grads, lr=0.1)
    assert_all_near(found, train(AdamW, start, grads, lr=0.1), when=f"after gradients whose {rows} rows are 0: ")


def test_a_parameter_without_a_gradient_does_not_change(implementation: Implementation, device: str) -> None:
    """Its moments do not change either: a frozen layer does not decay."""
    without, with_grad = params = [torch.ones(5, device=device, requires_grad=True) for _ in range(2)]
    optimizer = implementation.watched(params, lr=0.1)
    optimizer.step()  # no gradient at all
    for frozen, moving in ((without, with_grad), (with_grad, without)):
        before, steps = frozen.detach().clone(), _steps_of(optimizer, frozen)
        for _ in range(2):
            frozen.grad, moving.grad = None, torch.ones_like(moving)
            optimizer.step()
        assert torch.equal(frozen.detach(), before), (
            f"a parameter whose .grad is None changed from {before} to {frozen}"
        )
        assert _steps_of(optimizer, frozen) == steps, "the step count of a parameter whose .grad is None went on"
        assert frozen.grad is None, "a .grad that was None is not any more"
        assert _steps_of(optimizer, moving) == 2, (
            "the step count of a parameter with a gradient is not that of its steps"
        )


def test_each_parameter_counts_its_own_steps(implementation: Implementation, device: str) -> None:
    """Bias corrections count the steps in which the parameter had a gradient."""
    start = tensors(device, shapes=((3,), (4,), (5,)))
    grads = gradients(start, 4)
    found, expected = (leaves(start) for _ in range(2))
    for target, params in ((implementation.watched, found), (AdamW, expected)):
        optimizer = target(params, lr=0.1)
        for i, step in enumerate(grads):
            for k, (p, grad) in enumerate(zip(params, step, strict=True)):
                p.grad = grad.clone() if (i + k) % (k + 1) == 0 else None
            optimizer.step()
    assert_all_near(found, expected)


def test_gradients_are_not_written(implementation: Implementation, device: str) -> None:
    start = tensors(device)
    grads = gradients(start, 3)
    for p, grad in zip(run(implementation.watched(leaves(start), weight_decay=0.5), grads), grads[-1], strict=True):
        assert torch.equal(p.grad, grad), f"step() changed the .grad of a parameter of shape {tuple(p.shape)}"


def test_gradients_may_be_overwritten_after_the_step(implementation: Implementation, device: str) -> None:
    """`zero_grad(set_to_none=False)` zeroes in place, so moments must not share the gradients' memory."""
    start = tensors(device)
    grads = gradients(start, 4)
    optimizer = implementation.watched(params := leaves(start))
    for p in params:
        p.grad = torch.zeros_like(p)
    for step in grads:
        for p, grad in zip(params, step, strict=True):
            p.grad.copy_(grad)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    assert_all_near(params, train(AdamW, start, grads))


@pytest.mark.parametrize("bad", [torch.inf, pytest.param(-torch.inf, marks=pytest.mark.sweep), torch.nan])
def test_what_is_not_finite_reaches_its_own_element_alone(
    implementation: Implementation, bad: float, device: str
) -> None:
    start = tensors(device, torch.float32)
    grads = gradients(start, 2)
    good = train(implementation.watched, start, grads)
    grads[0][3][7] = bad
    optimizer = implementation.watched(leaves(start))
    found = run(optimizer, grads)
    assert found[3][7].isnan(), f"the gradient was {bad}, and the parameter is {found[3][7].item()}"
    with torch.no_grad():
        found[3][7] = good[3][7]
    assert_same(found, good)
    for name in ("exp_avg", "exp_avg_sq"):
        moment = optimizer.state[found[3]][name][7]
        assert not moment.isfinite(), f"the gradient was {bad}, and {name} is {moment.item()}"


def test_parameters_are_updated_in_place(implementation: Implementation, device: str) -> None:
    """Views of a parameter (a bucket, a tied weight, a shard) see its update."""
    start = tensors(device)
    grads = gradients(start, 2)
    params = leaves(start)
    views = [p.detach() for p in params]
    run(implementation.watched(params), grads)
    assert_all_near(views, train(AdamW, start, grads))


def test_parameters_data_may_be_replaced(implementation: Implementation, device: str) -> None:
    """The tensor that held the parameter's old data is not written."""
    start = tensors(device)
    grads = gradients(start, 5)
    optimizer = implementation.watched(leaves(start))
    params = run(optimizer, grads[:2])
    kept = []
    for step in grads[2:]:
        for p in params:
            kept.append((p.data, p.data.clone()))
            p.data = p.data.clone()
        run(optimizer, [step])
    assert all(torch.equal(old, value) for old, value in kept), "step() wrote to data that the parameter had before"
    assert_all_near(params, train(AdamW, start, grads))


def test_parameters_may_get_their_memory_later(implementation: Implementation, device: str) -> None:
    """Without memory, as sharded ones are at times, all have the address 0, and here one shape."""
    start = tensors(device, shapes=((3, 5), (3, 5), (3, 5)))
    grads = gradients(start, 3)
    params = leaves(start)
    for p in params:
        p.untyped_storage().resize_(0)
    optimizer = implementation.watched(params)
    for p, value in zip(params, start, strict=True):
        p.data = value.clone()
    assert_all_near(run(optimizer, grads), train(AdamW, start, grads))


def test_a_model_may_be_cast_after_its_optimizer_was_made(implementation: Implementation, device: str) -> None:
    """Or the step is an error."""
    start = tensors(device)
    grads = gradients(start, 3)
    params = leaves([x.float() for x in start])
    optimizer = implementation.watched(params, lr=0.3)
    for p, value in zip(params, start, strict=True):
        p.data = value.clone()
    try:
        found = run(optimizer, grads)
    except Exception:
        return
    assert_all_near(found, train(AdamW, start, grads, lr=0.3))


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t().contiguous().t(),
    "columns_apart": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "odd_offset": lambda x: torch.cat([x.new_ones(1), x.flatten(), x.new_ones(3)])[1:-3].view(x.shape),
}


PAIRS = [(own, grad) for own in ("contiguous", *LAYOUTS) for grad in ("contiguous", *LAYOUTS)]


@pytest.mark.parametrize(
    ("layout", "grad_layout"),
    [
        pytest.param(*pair, marks=[] if "contiguous" in pair or len(set(pair)) == 1 else pytest.mark.sweep)
        for pair in PAIRS
    ],
)
def test_any_layout_of_parameters_and_gradients(
    implementation: Implementation, layout: str, grad_layout: str, device: str, request: pytest.FixtureRequest
) -> None:
    kinds = {"contiguous" if kind == "odd_offset" else kind for kind in (layout, grad_layout)}
    if implementation.name == "torch_fused" and (len(kinds) > 1 or "columns_apart" in kinds):
        request.applymarker(MISREAD)
    start = tensors(device, torch.float64, ((30, 40), (3, 5)))
    grads = gradients(start, 3)
    lay = LAYOUTS.get(layout, lambda x: x)
    params = [lay(x.clone()).detach().requires_grad_() for x in start]
    beside = [_beside(p) for p in params]
    optimizer = implementation.watched(params)
    for step in grads:
        for p, g in zip(params, step, strict=True):
            p.grad = LAYOUTS.get(grad_layout, lambda x: x)(g.clone())
        optimizer.step()
    assert_all_near(params, train(AdamW, start, grads))
    for p, before in zip(params, beside, strict=True):
        assert torch.equal(_beside(p), before), "the step wrote to memory between or beside a parameter's elements"


def _beside(p: Tensor) -> Tensor:
    """A copy of the storage of `p`, with zeros in place of its own elements."""
    storage = p.new_empty(0, requires_grad=False).set_(p.detach().untyped_storage()).clone()
    storage.as_strided(p.shape, p.stride(), p.storage_offset()).zero_()
    return storage


def test_gradients_are_freed_after_the_step(implementation: Implementation, device: str) -> None:
    """`zero_grad(set_to_none=True)` frees their memory: nothing else refers to them, nor to a closure's loss."""
    params = leaves(tensors(device, shapes=((3, 5), (40,))))
    optimizer, kept = implementation.watched(params), []

    def closure() -> Tensor:
        loss = torch.stack([p.sum() for p in params]).sum()
        loss.backward()
        kept.extend(map(weakref.ref, [loss, *[p.grad for p in params]]))
        return loss

    for _ in range(3):
        optimizer.step(closure)
        optimizer.zero_grad(set_to_none=True)
    gc.collect()
    alive = sum(each() is not None for each in kept)
    assert not alive, f"{alive} of {len(kept)} gradients and losses stay in memory after the step and zero_grad()"


def test_a_gradient_may_be_expanded(
    implementation: Implementation, device: str, request: pytest.FixtureRequest
) -> None:
    """As the gradient of a sum: one element in memory."""
    if implementation.name == "torch_fused":
        request.applymarker(MISREAD)
    start = tensors(device, shapes=((3, 5), (40,)))
    params = leaves(start)
    optimizer = implementation.watched(params)
    for _ in range(2):
        for p in params:
            p.grad = p.new_ones(()).expand(p.shape)
        optimizer.step()
    assert_all_near(params, train(AdamW, start, [[torch.ones_like(x) for x in start]] * 2))


def test_a_closure_is_evaluated_with_gradients(implementation: Implementation, device: str) -> None:
    x = torch.ones(5, device=device, requires_grad=True)
    optimizer = implementation.watched([x], lr=0.1, weight_decay=0.0)
    calls = 0

    def closure() -> Tensor:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = (x * x).sum()
        assert loss.requires_grad, "step() evaluates its closure without gradients"
        loss.backward()
        return loss

    loss = optimizer.step(closure)
    assert isinstance(loss, Tensor), f"step(closure) returns {loss}, and not the closure's result"
    assert loss.item() == 5, f"step(closure) returns {loss.item()}, and the closure 5"
    assert calls == 1, f"step(closure) evaluates it {calls} times"
    assert not x.eq(1).all(), "parameters are unchanged by step(closure), whose closure makes their gradients"
    assert_all_near([x.double()], [torch.full_like(x, 0.9).double()], rtol=1e-6, when="after step(closure): ")


@pytest.mark.should("step(closure) enables gradients where they are disabled")
def test_a_closure_may_come_with_gradients_disabled(implementation: Implementation, device: str) -> None:
    x = torch.ones(5, device=device, requires_grad=True)
    optimizer = implementation.watched([x])
    with torch.no_grad():
        optimizer.step(lambda: x.sum().backward())


def test_a_step_needs_no_no_grad(implementation: Implementation, device: str) -> None:
    x = torch.ones(5, device=device, requires_grad=True)
    optimizer = implementation.watched([x])
    x.sum().backward()
    assert optimizer.step() is None, "step() without a closure returns something"
    assert x.requires_grad and x.is_leaf, "after step() the parameter is no leaf that requires a gradient"


@pytest.mark.parametrize("by", ["step", "the_caller"])
def test_gradient_scaler_unscales_and_skips(implementation: Implementation, by: str, device: str) -> None:
    """With each option too, and where the caller unscales before the step, as for clipping. The first step is skipped,
    and weights are loaded after it."""
    every = {"max_grad_norm": 0.1, "master_weights": True}
    for options in ({}, *({name: value} for name, value in every.items() if implementation.accepts(name))):
        start = tensors(device, torch.bfloat16 if "master_weights" in options else torch.float32)
        grads = gradients(start, 3)
        scaled, plain = (
            implementation.watched([{"params": x[:2]}, {"params": x[2:], "eps": 0.5}], eps=1.0, **options)
            for x in (leaves([torch.zeros_like(x) for x in start]), leaves(start))
        )
        scaler = torch.amp.GradScaler(device, init_scale=2048.0)
        params = [p for group in scaled.param_groups for p in group["params"]]
        for i, step in enumerate([grads[0], *grads[:2], grads[0], grads[2]]):
            scaled.zero_grad()
            loss = sum((p * g).sum() for p, g in zip(params, step, strict=True)) * (torch.inf if i in (0, 3) else 1)
            scaler.scale(loss).backward()
            if by == "the_caller":
                scaler.unscale_(scaled)
            scaler.step(scaled)
            scaler.update()
            if i == 0:
                with torch.no_grad():
                    for p, x in zip(params, start, strict=True):
                        p.copy_(x)
        assert scaler.get_scale() == 512
        counts = {_steps_of(scaled, p) for p in params}
        assert counts == {3}, f"of 5 steps the scaler skips two, and with {options} the state counts {counts}"
        assert_same(params, run(plain, grads))  # scaled by powers of two: exact
        if "max_grad_norm" in options:
            assert_same([scaled.grad_norm], [plain.grad_norm])
