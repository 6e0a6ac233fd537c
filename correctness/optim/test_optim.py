"""Every AdamW against the plain one, and that against torch's for-loop to the bit; clipping; errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.support.optimizing import (
    assert_as_accurate_as_plain,
    assert_same,
    gradients,
    leaves,
    run,
    tensors,
    train,
)
from impl.optim import AdamW
from impl.optim.base import MASTER
from shardmark.registry import Implementation, RegistryError, check_contract, family, resolve

pytestmark = [pytest.mark.family("optimizer"), pytest.mark.usefixtures("poisoned")]

ARGUMENTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "language_model": {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1},
    "no_decay": {"lr": 1e-2, "weight_decay": 0.0},
    "no_memory": {"lr": 1e-2, "betas": (0.0, 0.0)},
    "large_eps": {"lr": 1e-2, "eps": 0.5},
}
each_argument = pytest.mark.parametrize("arguments", ARGUMENTS.values(), ids=ARGUMENTS)


@each_argument
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_plain_is_torchs_for_loop_to_the_bit(dtype: torch.dtype, arguments: dict[str, Any], device: str) -> None:
    start = tensors(device, dtype)
    grads = gradients(start, 30)
    theirs = run(torch.optim.AdamW(leaves(start), foreach=False, fused=False, **arguments), grads)
    assert_same(train(AdamW, start, grads, **arguments), theirs)


@each_argument
def test_as_accurate_as_plain(implementation: Implementation, arguments: dict[str, Any], device: str) -> None:
    start = tensors(device)
    assert_as_accurate_as_plain(implementation.target, start, gradients(start, 5), **arguments)


@pytest.mark.parametrize(("dtype", "steps"), [(torch.float32, 20), (torch.bfloat16, 2)], ids=str)
def test_as_accurate_as_plain_in_its_dtype(
    implementation: Implementation, dtype: torch.dtype, steps: int, device: str
) -> None:
    start = tensors(device, dtype, ((3, 5), (130,)))
    grads = gradients(start, steps)
    assert_as_accurate_as_plain(implementation.target, start, grads, **ARGUMENTS["language_model"])


@pytest.mark.family("optimizer", option="master_weights")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_master_weights_are_float32_training_rounded(
    implementation: Implementation, dtype: torch.dtype, device: str
) -> None:
    """To the bit: half-precision gradients are exact in float32, and the rest is float32's."""
    start = tensors(device, dtype)
    grads = gradients(start, 5)
    wide = train(implementation.target, [x.float() for x in start], [[g.float() for g in step] for step in grads])
    optimizer = implementation.target(leaves(start), master_weights=True)
    found = run(optimizer, grads)
    assert_same(found, [x.to(dtype) for x in wide])
    assert_same([optimizer.state[p][MASTER] for p in found], wide)
    for p in found:
        assert all(optimizer.state[p][name].dtype == torch.float32 for name in ("exp_avg", "exp_avg_sq", MASTER))


@pytest.mark.family("optimizer", option="master_weights")
def test_small_updates_add_up_in_master_weights_alone(implementation: Implementation, device: str) -> None:
    start = [torch.ones(40, device=device, dtype=torch.bfloat16)]
    grads = [[torch.ones_like(start[0])]] * 10
    arguments = {"lr": 1e-3, "weight_decay": 0.0}  # 1e-3 is less than half of what bfloat16 tells from 1
    (lost,), (kept,) = (
        train(implementation.target, start, grads, master_weights=master, **arguments) for master in (False, True)
    )
    assert lost.eq(1).all() and kept.eq(torch.tensor(0.99).bfloat16()).all()


@pytest.mark.family("optimizer", option="master_weights")
def test_master_weights_round_to_nearest_and_ties_to_even(implementation: Implementation, device: str) -> None:
    ties = 1 + torch.arange(64, device=device) / 256  # bfloat16 has 128 values from 1 to 2
    optimizer = implementation.target(leaves([ties.bfloat16()]), lr=0.0, master_weights=True)
    grads = gradients([ties.bfloat16()], 2)
    (p,) = run(optimizer, grads[:1])
    optimizer.state[p][MASTER].copy_(ties)
    assert_same(run(optimizer, grads[1:]), [ties.bfloat16()])


@pytest.mark.family("optimizer", option="master_weights")
def test_float32_parameters_have_no_master_weights(implementation: Implementation, device: str) -> None:
    start = tensors(device, torch.float32)
    optimizer = implementation.target(leaves(start), master_weights=True)
    run(optimizer, gradients(start, 1))
    assert not any(MASTER in state for state in optimizer.state.values())


# Clipping


@pytest.mark.family("optimizer", option="max_grad_norm")
@pytest.mark.parametrize("max_norm", [0.1, 1e6], ids=["clips", "leaves"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_clipping_is_clip_grad_norm_and_a_step(
    implementation: Implementation, dtype: torch.dtype, max_norm: float, device: str
) -> None:
    start = tensors(device, dtype)
    grads = gradients(start, 4)
    clipped = copy.deepcopy(grads)
    norms = []
    for step in clipped:
        like = leaves(step)
        for p, grad in zip(like, step, strict=True):
            p.grad = grad  # scaled where it lies
        norms.append(torch.nn.utils.clip_grad_norm_(like, max_norm))
    expected = train(AdamW, start, clipped, lr=1e-2, eps=1.0)  # an eps that lets the gradients' size be seen
    optimizer = implementation.target(leaves(start), lr=1e-2, eps=1.0, max_grad_norm=max_norm)
    found = run(optimizer, grads)
    # Sums of squares in another order, and roots of them: a few roundings of the norm, and so of each update.
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(optimizer.grad_norm, norms[-1], rtol=8 * eps, atol=0)
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.detach(), y, rtol=4 * eps, atol=4 * 1e-2 * 8 * eps)
    assert_same([p.grad for p in found], grads[-1])  # as they were


@pytest.mark.family("optimizer", option="max_grad_norm")
def test_the_norm_of_half_precision_is_not_rounded_to_it(implementation: Implementation, device: str) -> None:
    start = tensors(device, torch.bfloat16, ((100,), (300,)))
    grads = gradients(start, 1)
    optimizer = implementation.target(leaves(start), max_grad_norm=1.0)
    run(optimizer, grads)
    expected = torch.cat([g.double() for g in grads[0]]).norm().float()
    torch.testing.assert_close(optimizer.grad_norm, expected, rtol=8 * torch.finfo(torch.float32).eps, atol=0)


@pytest.mark.family("optimizer", option="max_grad_norm")
@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_a_norm_that_is_not_finite_skips_the_step(implementation: Implementation, bad: float, device: str) -> None:
    start = tensors(device, torch.float32)
    grads = gradients(start, 4)
    broken = copy.deepcopy(grads)
    broken.insert(2, gradients(start, 1)[0])
    broken[2][3][7] = bad
    optimizer = implementation.target(leaves(start), max_grad_norm=1.0)
    before = [p.detach().clone() for p in run(optimizer, broken[:2])]
    assert_same(run(optimizer, broken[2:3]), before)
    assert not optimizer.grad_norm.isfinite() and not optimizer.grad_norm.eq(-torch.inf)
    assert all(state["step"] == 2 for state in optimizer.state.values())
    assert_same(run(optimizer, broken[3:]), train(implementation.target, start, grads, max_grad_norm=1.0))


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_without_clipping_what_is_not_finite_reaches_its_own_element_alone(
    implementation: Implementation, bad: float, device: str
) -> None:
    start = tensors(device, torch.float32)
    grads = gradients(start, 2)
    good = train(implementation.target, start, grads)
    grads[0][3][7] = bad
    optimizer = implementation.target(leaves(start))
    found = run(optimizer, grads)
    assert found[3][7].isnan()
    with torch.no_grad():
        found[3][7] = good[3][7]
    assert_same(found, good)
    assert all(not optimizer.state[found[3]][name][7].isfinite() for name in ("exp_avg", "exp_avg_sq"))


def test_gradient_scaler_unscales_and_skips(implementation: Implementation, device: str) -> None:
    start = tensors(device, torch.float32)
    grads = gradients(start, 3)
    optimizer = implementation.target(leaves(start))
    scaler = torch.amp.GradScaler(device, init_scale=1024.0)
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for i, step in enumerate([*grads[:2], grads[0], grads[2]]):
        optimizer.zero_grad()
        loss = sum((p * g).sum() for p, g in zip(params, step, strict=True)) * (torch.inf if i == 2 else 1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 512
    assert all(state["step"] == 3 for state in optimizer.state.values())
    assert_same(params, train(implementation.target, start, grads))  # scaled by powers of two: exact


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


# Errors


def _parameter(**options: Any) -> list[Tensor]:
    return [torch.ones(3, requires_grad=True, **options)]


BAD: dict[str, tuple[Callable[[str], tuple[Any, dict[str, Any]]], str]] = {
    "lr": (lambda device: (_parameter(device=device), {"lr": -1.0}), "lr is a number from 0 on, got -1.0"),
    "nan": (lambda device: (_parameter(device=device), {"lr": torch.nan}), "lr is a number from 0 on, got nan"),
    "eps": (lambda device: (_parameter(device=device), {"eps": -1.0}), "eps is a number"),
    "decay": (lambda device: (_parameter(device=device), {"weight_decay": -1.0}), "weight_decay is a number"),
    "beta1": (lambda device: (_parameter(device=device), {"betas": (1.0, 0.9)}), "betas are two numbers"),
    "beta2": (lambda device: (_parameter(device=device), {"betas": (0.9, -0.1)}), "betas are two numbers"),
    "norm": (lambda device: (_parameter(device=device), {"max_grad_norm": 0.0}), "max_grad_norm is a positive number"),
    "no lr": (lambda device: (_parameter(device=device), {"lr": None}), "lr is a number from 0 on, got None"),
    "eps's type": (lambda device: (_parameter(device=device), {"eps": "x"}), "eps is a number from 0 on, got 'x'"),
    "decay's type": (lambda device: (_parameter(device=device), {"weight_decay": [0.1]}), "weight_decay is a number"),
    "one beta": (lambda device: (_parameter(device=device), {"betas": 0.9}), "betas are two numbers .*, got 0.9"),
    "betas' type": (lambda device: (_parameter(device=device), {"betas": (0.9, "x")}), "betas are two numbers"),
    "a tensor": (
        lambda device: (_parameter(device=device), {"lr": torch.ones(())}),
        r"lr is a number from 0 on, got tensor\(1.\)",
    ),
    "norm's type": (
        lambda device: (_parameter(device=device), {"max_grad_norm": "1"}),
        "max_grad_norm is a positive number or None, got '1'",
    ),
    "nothing": (lambda device: ([], {}), "empty parameter list"),
    "complex": (lambda device: (_parameter(dtype=torch.complex64, device=device), {}), "got torch.complex64"),
    "devices": (
        lambda device: ([*_parameter(device=device), *_parameter(device="meta")], {}),
        "AdamW takes parameters on one device, got .* and meta",
    ),
}


@pytest.mark.family("optimizer", option="max_grad_norm")
@pytest.mark.parametrize("what", BAD)
def test_bad_arguments_are_one_line(implementation: Implementation, what: str, device: str) -> None:
    make, says = BAD[what]
    params, options = make(device)
    with pytest.raises(ValueError, match=says) as raised:
        implementation.target(params, **options)
    assert "\n" not in str(raised.value)


@pytest.mark.family("optimizer", option="max_grad_norm")
def test_a_bad_group_is_not_added(implementation: Implementation, device: str) -> None:
    optimizer = implementation.target(_parameter(device=device))
    with pytest.raises(ValueError, match="lr is a number"):
        optimizer.add_param_group({"params": _parameter(device=device), "lr": -1.0})
    assert len(optimizer.param_groups) == 1


@pytest.mark.family("optimizer", option="max_grad_norm")
@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 1.0}], ids=["plain", "clipped"])
def test_a_sparse_gradient_is_one_line(implementation: Implementation, options: dict[str, Any], device: str) -> None:
    (p,) = _parameter(device=device)
    p.grad = torch.ones_like(p).to_sparse()
    with pytest.raises(ValueError, match=r"AdamW takes dense gradients, got torch.sparse_coo of shape \(3,\)"):
        implementation.target([p], **options).step()


@pytest.mark.parametrize(
    ("attribute", "says"),
    [("a_function", "is not a class of torch.optim.Optimizer"), ("Sgd", "two steps from 1 down x² led to")],
)
def test_what_is_not_adamw_is_told(attribute: str, says: str, tmp_path: Any, device: str) -> None:
    mine = tmp_path / f"mine_{attribute}.py"
    mine.write_text(
        "import torch\ndef a_function(params): pass\n"
        "class Sgd(torch.optim.SGD):\n"
        "    def __init__(self, params, lr, betas, eps, weight_decay): super().__init__(params, lr)\n"
    )
    with pytest.raises(RegistryError, match=says):
        check_contract(resolve("optimizer", f"{mine}:{attribute}"), device)
