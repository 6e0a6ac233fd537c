"""Our own AdamWs beyond their contract: equal bits, error messages, and state that the caller changes."""

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.optim.training import (
    ARGUMENTS,
    assert_all_near,
    assert_same,
    gradients,
    leaves,
    run,
    saved,
    tensors,
    train,
)
from impl.optim import AdamW, TorchForeach, TorchForLoop, TorchFused
from shardmark.api import Implementation, family

pytestmark = pytest.mark.usefixtures("poisoned")

ALL = family("optimizer").implementations
CLIPPING = ("plain", "fused_triton")


def _runs(name: str, device: str) -> Implementation:
    if reason := ALL[name].unavailable_reason(device):
        pytest.skip(reason)
    return ALL[name]


@pytest.fixture(params=ALL)
def ours(request: pytest.FixtureRequest, device: str) -> Implementation:
    """Each registered implementation that runs here."""
    return _runs(request.param, device)


@pytest.fixture(params=CLIPPING)
def clipping(request: pytest.FixtureRequest, device: str) -> Implementation:
    """Each subclass of `AdamWBase`, which has its options and errors."""
    return _runs(request.param, device)


@pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_plain_is_torchs_for_loop_to_the_bit(dtype: torch.dtype, arguments: dict[str, Any], device: str) -> None:
    start = tensors(device, dtype)
    grads = gradients(start, 30)
    theirs = run(torch.optim.AdamW(leaves(start), foreach=False, fused=False, **arguments), grads)
    assert_same(train(AdamW, start, grads, **arguments), theirs)


def test_training_goes_on_from_a_saved_state_to_the_bit(ours: Implementation, device: str) -> None:
    start = tensors(device, torch.float32)
    grads = gradients(start, 6)
    first = ours.target(leaves(start), lr=1e-2)
    halfway = run(first, grads[:3])
    second = ours.target(leaves(halfway))
    second.load_state_dict(saved(first))
    assert_same(run(second, grads[3:]), train(ours.target, start, grads, lr=1e-2))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["copy", "pickle"])
def test_a_copy_keeps_options_and_state(clipping: Implementation, copied: Callable[[Any], Any], device: str) -> None:
    start = tensors(device, torch.bfloat16)
    grads = gradients(start, 4)
    options = {"max_grad_norm": 0.5, "master_weights": True}
    optimizer = clipping.target(leaves(start), **options)
    run(optimizer, grads[:2])
    assert_same(run(copied(optimizer), grads[2:]), train(clipping.target, start, grads, **options))


def test_state_of_another_algorithm_is_one_line_and_changes_nothing(clipping: Implementation, device: str) -> None:
    start = tensors(device, torch.float32)
    theirs = torch.optim.AdamW(leaves(start), amsgrad=True)
    run(theirs, gradients(start, 1))
    optimizer = clipping.target(leaves(start))
    with pytest.raises(ValueError, match=r"^the state is of AdamW with amsgrad or maximize, .*$"):
        optimizer.load_state_dict(theirs.state_dict())
    assert not optimizer.state


def test_state_may_be_replaced_between_steps(ours: Implementation, device: str) -> None:
    """A caller may move state away and back, by new tensors or new data; a step does not write to the old ones."""
    start = tensors(device, torch.float64)
    grads = gradients(start, 4)
    optimizer = ours.target(leaves(start))
    params = run(optimizer, grads[:1])
    kept = []
    for i, step in enumerate(grads[1:]):
        for p, g in zip(params, step, strict=True):
            p.grad.copy_(g)  # the gradient's address stays
            for name in ("exp_avg", "exp_avg_sq") if i == 2 else ("exp_avg",) if i else ("exp_avg_sq",):
                old = optimizer.state[p][name]
                kept.append((old.data, old.data.clone()))
                if i < 2:
                    optimizer.state[p][name] = old.clone()
                else:
                    old.data = old.data.clone()
        optimizer.step()
    assert all(torch.equal(old, value) for old, value in kept)
    assert_all_near(params, train(AdamW, start, grads))


def test_removed_state_is_freed(ours: Implementation, device: str) -> None:
    start = tensors(device, torch.float32)
    optimizer = ours.target(leaves(start))
    run(optimizer, gradients(start, 2))
    moment = weakref.ref(next(iter(optimizer.state.values()))["exp_avg"])
    optimizer.state.clear()
    assert moment() is None


@pytest.mark.parametrize("what", ["gradient", "moment"])
def test_a_tensor_may_be_transposed_in_place(ours: Implementation, what: str, device: str) -> None:
    """The same address does not mean the same strides."""
    if ours.name == "torch_fused":
        pytest.skip("torch's fused AdamW takes dense gradients laid out as their parameters; on CPU it misreads others")
    start = tensors(device, torch.float64, ((6, 6),))
    grads = gradients(start, 1)
    found = []
    for target in (ours.target, AdamW):
        optimizer = target(leaves(start))
        (p,) = run(optimizer, grads)
        if what == "gradient":
            p.grad = p.grad.t()
        else:
            optimizer.state[p]["exp_avg"] = optimizer.state[p]["exp_avg"].t()
        optimizer.step()
        found.append(p.detach())
    torch.testing.assert_close(*found, rtol=1e-13, atol=1e-13)


def test_what_torch_pins_stays_pinned_when_state_is_loaded(ours: Implementation, device: str) -> None:
    if not hasattr(ours.target, "kind"):
        pytest.skip(f"{ours} is not one of torch's")
    start = tensors(device, torch.float32)
    for other in (TorchForLoop, TorchForeach, TorchFused):
        theirs, optimizer = other(leaves(start)), ours.target(leaves(start))
        run(theirs, gradients(start, 1))
        optimizer.load_state_dict(saved(theirs))
        assert optimizer.param_groups[0].items() >= ours.target.kind.items()


OPTIONS = {"float32": (torch.float32, {}), "master": (torch.bfloat16, {"master_weights": True})}


@pytest.mark.parametrize("kind", OPTIONS)
def test_a_loaded_state_is_a_copy(ours: Implementation, kind: str, device: str) -> None:
    """Steps of the optimizer that loads a state change nothing in the optimizer that saved it."""
    dtype, options = OPTIONS[kind]
    start = tensors(device, dtype)
    grads = gradients(start, 3)
    first, second = (ours.target(leaves(start), **options) for _ in range(2))
    run(first, grads[:1])
    before = copy.deepcopy(first.state_dict()["state"])
    second.load_state_dict(first.state_dict())
    run(second, grads[1:])
    for i, state in first.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(value, before[i][name]), f"{name} of parameter {i} is changed by another optimizer"


def test_step_counts_load_in_any_dtype(ours: Implementation, device: str) -> None:
    """torch makes step counts in its default dtype, which may be float64."""
    start = tensors(device, torch.float32)
    grads = gradients(start, 4)
    first = ours.target(leaves(start))
    second = ours.target(leaves(run(first, grads[:2])))
    loaded = saved(first)
    for state in loaded["state"].values():
        state["step"] = state["step"].double()
    second.load_state_dict(loaded)
    assert_same(run(second, grads[2:]), train(ours.target, start, grads))


def test_a_scaled_gradient_is_clipped_by_its_own_norm(device: str) -> None:
    fused = family("optimizer").implementations["fused_triton"]
    if reason := fused.unavailable_reason(device):
        pytest.skip(reason)
    start = tensors(device, torch.float32)
    grads = gradients(start, 1)
    expected = fused.target(leaves(start), max_grad_norm=0.1)
    run(expected, grads)
    scaled = fused.target(leaves(start), max_grad_norm=0.1)
    scaled.grad_scale, scaled.found_inf = (torch.tensor(x, device=device) for x in (64.0, 0.0))
    run(scaled, [[g * 64 for g in step] for step in grads])
    assert_same([scaled.grad_norm], [expected.grad_norm])
    assert_same(scaled.param_groups[0]["params"], expected.param_groups[0]["params"])


def _parameter(**options: Any) -> list[Tensor]:
    return [torch.ones(3, requires_grad=True, **options)]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "lr": ({"lr": -1.0}, "lr is a number from 0 on, got -1.0"),
    "nan": ({"lr": torch.nan}, "lr is a number from 0 on, got nan"),
    "no lr": ({"lr": None}, "lr is a number from 0 on, got None"),
    "a tensor": ({"lr": torch.ones(())}, r"lr is a number from 0 on, got tensor\(1.\)"),
    "eps": ({"eps": -1.0}, "eps is a number"),
    "eps's type": ({"eps": "x"}, "eps is a number from 0 on, got 'x'"),
    "decay": ({"weight_decay": -1.0}, "weight_decay is a number"),
    "decay's type": ({"weight_decay": [0.1]}, "weight_decay is a number"),
    "beta1": ({"betas": (1.0, 0.9)}, "betas are two numbers"),
    "beta2": ({"betas": (0.9, -0.1)}, "betas are two numbers"),
    "one beta": ({"betas": 0.9}, "betas are two numbers .*, got 0.9"),
    "betas' type": ({"betas": (0.9, "x")}, "betas are two numbers"),
    "norm": ({"max_grad_norm": 0.0}, "max_grad_norm is a positive number"),
    "norm's type": ({"max_grad_norm": "1"}, "max_grad_norm is a positive number or None, got '1'"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_are_one_line(clipping: Implementation, what: str, device: str) -> None:
    arguments, says = BAD[what]
    with pytest.raises(ValueError, match=rf"^[^\n]*{says}[^\n]*$"):
        clipping.target(_parameter(device=device), **arguments)


def test_bad_parameters_are_one_line(clipping: Implementation, device: str) -> None:
    both = [*_parameter(device=device), *_parameter(device="meta")]
    for params, says in (
        ([], "empty parameter list"),
        (_parameter(dtype=torch.complex64, device=device), "got torch.complex64"),
        (both, "AdamW takes parameters on one device, got .* and meta"),
    ):
        with pytest.raises(ValueError, match=rf"^[^\n]*{says}[^\n]*$"):
            clipping.target(params)


def test_a_bad_group_is_not_added(clipping: Implementation, device: str) -> None:
    optimizer = clipping.target(_parameter(device=device))
    with pytest.raises(ValueError, match="lr is a number"):
        optimizer.add_param_group({"params": _parameter(device=device), "lr": -1.0})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}], ids=["plain", "clipped"])
def test_a_sparse_gradient_is_one_line(clipping: Implementation, options: dict[str, Any], device: str) -> None:
    (p,) = _parameter(device=device)
    p.grad = torch.ones_like(p).to_sparse()
    with pytest.raises(ValueError, match=r"AdamW takes dense gradients, got torch.sparse_coo of shape \(3,\)"):
        clipping.target([p], **options).step()
