"""The option `master_weights`: float32 copies of half-precision parameters."""

import pytest
import torch

from correctness.optim.training import (
    assert_near,
    assert_same,
    counts_beside_launches,
    gradients,
    leaves,
    run,
    saved,
    tensors,
    train,
)
from impl.optim import AdamW
from impl.optim.base import MASTER
from shardmark.api import Implementation

pytestmark = [pytest.mark.family("optimizer", option="master_weights"), pytest.mark.usefixtures("poisoned")]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_master_weights_are_float32_training_rounded(
    implementation: Implementation, dtype: torch.dtype, device: str
) -> None:
    start = tensors(device, dtype)
    grads = gradients(start, 5)
    exact = train(AdamW, [x.double() for x in start], [[g.double() for g in step] for step in grads])
    optimizer = implementation.watched(leaves(start), master_weights=True)
    found = run(optimizer, grads)
    for i, (p, y) in enumerate(zip(found, exact, strict=True)):
        state = optimizer.state[p]
        assert MASTER in state, f"the state of parameter {i} has no {MASTER!r}, but {', '.join(state)}"
        if p.numel():
            allowed = 1e-6 * (1 + y.abs().max().item())
            assert_near(state[MASTER].double(), y, allowed, f"the master weight of parameter {i}")
        assert torch.equal(p.detach(), state[MASTER].to(dtype)), f"parameter {i} is not its master weight, rounded"
    for p in found:
        for name in ("exp_avg", "exp_avg_sq", MASTER):
            kind = optimizer.state[p][name].dtype
            assert kind == torch.float32, f"{name} of a parameter in {dtype} is in {kind}, and not in float32"


def test_small_updates_add_up_in_master_weights_alone(implementation: Implementation, device: str) -> None:
    start = [torch.ones(40, device=device, dtype=torch.bfloat16)]
    grads = [[torch.ones_like(start[0])]] * 10
    arguments = {"lr": 1e-3, "weight_decay": 0.0}  # less than half the distance from 1 to the next bfloat16
    (lost,), (kept,) = (
        train(implementation.watched, start, grads, master_weights=master, **arguments) for master in (False, True)
    )
    assert lost.eq(1).all(), "without master weights an update of 1e-3 is lost in bfloat16, and here it is not"
    assert kept.eq(torch.tensor(0.99).bfloat16()).all(), f"ten updates of 1e-3 lead from 1 to {kept[0].item()}"


def test_master_weights_round_to_nearest_and_ties_to_even(implementation: Implementation, device: str) -> None:
    ties = 1 + torch.arange(64, device=device) / 256  # bfloat16 has 128 values from 1 to 2
    optimizer = implementation.watched(leaves([ties.bfloat16()]), lr=0.0, master_weights=True)
    grads = gradients([ties.bfloat16()], 2)
    (p,) = run(optimizer, grads[:1])
    optimizer.state[p][MASTER].copy_(ties)
    assert_same(run(optimizer, grads[1:]), [ties.bfloat16()])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_what_is_not_finite_is_rounded_too(implementation: Implementation, dtype: torch.dtype, device: str) -> None:
    """A NaN stays one whatever its bits: GPUs give 0x7fffffff, which becomes -0 where integers are added to round. A
    number beyond the dtype becomes infinite, and a gradient that is NaN reaches its own element."""
    start = [torch.ones(6, device=device, dtype=dtype)]
    optimizer = implementation.watched(leaves(start), lr=0.0, master_weights=True)
    (p,) = run(optimizer, [[torch.zeros_like(start[0])]])
    master = optimizer.state[p][MASTER]
    master.copy_(torch.tensor([1.0, torch.nan, torch.nan, 7e4, -3.4e38, 1.0]))
    master.view(torch.int32)[1] = 0x7FFFFFFF
    grad = torch.zeros_like(start[0])
    grad[0] = torch.nan
    expected = master.to(dtype)
    expected[0] = torch.nan
    assert_same(run(optimizer, [[grad]]), [expected])


def test_no_master_weight_is_left_of_any_number(implementation: Implementation, device: str) -> None:
    for count in counts_beside_launches(implementation, device):
        start = tensors(device, torch.bfloat16, [(1,)] * count)
        found = train(implementation.watched, start, gradients(start, 1), lr=10.0, master_weights=True)
        still = [i for i, (x, y) in enumerate(zip(start, found, strict=True)) if torch.equal(x, y)]
        assert not still, (
            f"of {count} parameters of one element, a step leaves {len(still)}, the first of them {still[0]}"
        )


def test_float32_parameters_have_no_master_weights(implementation: Implementation, device: str) -> None:
    start = tensors(device, torch.float32)
    optimizer = implementation.watched(leaves(start), master_weights=True)
    run(optimizer, gradients(start, 1))
    assert not any(MASTER in state for state in optimizer.state.values())


def test_training_goes_on_from_saved_master_weights(implementation: Implementation, device: str) -> None:
    """Bitwise equal; torch's `load_state_dict` would round master weights to the parameters' dtype."""
    start = tensors(device, torch.bfloat16)
    grads = gradients(start, 6)
    first = implementation.watched(leaves(start), lr=1e-2, master_weights=True)
    halfway = run(first, grads[:3])
    second = implementation.watched(leaves(halfway), master_weights=True)
    second.load_state_dict(saved(first))
    assert_same(run(second, grads[3:]), train(implementation.watched, start, grads, lr=1e-2, master_weights=True))
