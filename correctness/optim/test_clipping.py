"""The option `max_grad_norm`: a step with the gradients that `clip_grad_norm_` would have made."""

import copy

import pytest
import torch

from correctness.optim.training import (
    assert_all_near,
    assert_near,
    assert_same,
    counts_beside_launches,
    gradients,
    interpreted,
    leaves,
    run,
    tensors,
    train,
)
from impl.optim import AdamW
from shardmark.api import Implementation

pytestmark = [pytest.mark.family("optimizer", option="max_grad_norm"), pytest.mark.usefixtures("poisoned")]


def test_clipping_leaves_the_gradients_as_they_are(implementation: Implementation, device: str) -> None:
    start = tensors(device)
    grads = gradients(start, 2)
    found = run(implementation.watched(leaves(start), max_grad_norm=0.1), grads)
    for p, grad in zip(found, grads[-1], strict=True):
        assert torch.equal(p.grad, grad), f"step() changed the .grad of a parameter of shape {tuple(p.shape)}"


@pytest.mark.parametrize("max_norm", [0.1, pytest.param(1e6, marks=pytest.mark.sweep)], ids=["clips", "leaves"])
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
    optimizer = implementation.watched(leaves(start), lr=1e-2, eps=1.0, max_grad_norm=max_norm)
    found = run(optimizer, grads)
    # Sums of squares in another order, and roots of them: a few roundings of the norm, and so of each update.
    eps = torch.finfo(dtype).eps
    assert_near(optimizer.grad_norm, norms[-1], 8 * eps * norms[-1].item(), "grad_norm")
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x.detach(), y, rtol=4 * eps, atol=4 * 1e-2 * 8 * eps)


def test_the_norm_is_of_all_groups_together(implementation: Implementation, device: str) -> None:
    start = tensors(device)
    (grads,) = gradients(start, 1)
    params = leaves(start)
    optimizer = implementation.watched([{"params": params[:3]}, {"params": params[3:]}], eps=1.0, max_grad_norm=0.1)
    run(optimizer, [grads])
    norm = torch.cat([g.flatten() for g in grads]).norm()
    assert_near(optimizer.grad_norm.double(), norm, 1e-10 * norm.item(), "grad_norm, of the gradients of two groups")
    assert_all_near(params, train(AdamW, start, [[g * 0.1 / (norm + 1e-6) for g in grads]], eps=1.0))


def test_the_norm_of_a_sparse_gradient_is_that_of_what_it_stands_for(
    implementation: Implementation, device: str
) -> None:
    """A token that occurs several times in a batch has several rows, and their sum is its gradient. Or an error."""
    start = tensors(device, shapes=((6, 4), (5,)))
    rows, dense = tensors(device, shapes=((5, 4), (5,)))
    at = torch.tensor([[1, 3, 1, 1, 4]], device=device)
    found = leaves(start)
    try:
        optimizer = implementation.watched(found, eps=1.0, max_grad_norm=0.1)
        for _ in range(2):
            sparse = torch.sparse_coo_tensor(at, rows, size=(6, 4), check_invariants=True)
            found[0].grad, found[1].grad = sparse, dense.clone()
            optimizer.step()
    except Exception:
        return
    grads = [torch.zeros_like(start[0]).index_add(0, at[0], rows), dense]
    norm = torch.cat([g.flatten() for g in grads]).norm()
    assert_near(optimizer.grad_norm.double(), norm, 1e-10 * norm.item(), "grad_norm, of a sparse and a dense gradient")
    expected = train(AdamW, start, [grads] * 2, eps=1.0, max_grad_norm=0.1)
    assert_all_near(found, expected, when="clipped, with a sparse gradient: ")


def test_the_norm_of_a_complex_gradient_is_of_both_its_parts(implementation: Implementation, device: str) -> None:
    """Or complex parameters are an error."""
    start = [torch.randn(6, dtype=torch.complex128, device=device), *tensors(device, shapes=((5,),))]
    grads = [torch.randn_like(x) for x in start]
    try:
        optimizer = implementation.watched(leaves(start), max_grad_norm=0.1)
        run(optimizer, [grads])
    except Exception:
        return
    norm = torch.cat([torch.view_as_real(grads[0]).flatten(), grads[1]]).norm()
    assert_near(optimizer.grad_norm.double(), norm, 1e-10 * norm.item(), "grad_norm, of a complex and a real gradient")


@pytest.mark.parametrize("kind", ["large", "mixed"])
def test_the_norm_is_of_all_there_is(implementation: Implementation, kind: str, device: str) -> None:
    """The norm covers all dtypes, and more elements than one launch takes."""
    if kind == "large":
        start = tensors(device, torch.float32, [(33_001 if interpreted(implementation, device) else 300_001,)])
    else:
        start = [x for dtype in (torch.float32, torch.bfloat16) for x in tensors(device, dtype, [(40,)])]
    (grads,) = gradients(start, 1)
    optimizer = implementation.watched(leaves(start), max_grad_norm=1.0)
    run(optimizer, [grads])
    norm = torch.cat([g.double().flatten() for g in grads]).norm()
    assert_near(optimizer.grad_norm.double(), norm, 1e-5 * norm.item(), f"grad_norm of {len(grads)} gradients")


def test_no_gradient_is_left_of_any_number(implementation: Implementation, device: str) -> None:
    """Neither the norm nor the update leaves out a gradient."""
    for count in counts_beside_launches(implementation, device):
        params = leaves(tensors(device, shapes=[(1,)] * count))
        before = torch.cat(params).detach()
        optimizer = implementation.watched(params, lr=0.1, weight_decay=0.0, max_grad_norm=1.0)
        run(optimizer, [[torch.ones_like(p) for p in params]])
        norm = torch.tensor(count, dtype=torch.float64, device=device).sqrt()
        assert_near(optimizer.grad_norm.double(), norm, 1e-5 * norm.item(), f"grad_norm of {count} gradients of one")
        assert_near(before - torch.cat(params), torch.full_like(before, 0.1), 1e-5, f"the step of {count} parameters")


def test_each_steps_own_norm_counts(implementation: Implementation, device: str) -> None:
    """Large, small, then large gradients; some are None."""
    start = tensors(device)
    grads = gradients(start, 3)
    grads[1] = [g * 1e-3 for g in grads[1]]
    found = leaves(start)
    optimizer = implementation.watched(found, eps=1.0, max_grad_norm=1.0)
    expected, clipped = leaves(start), []
    peer = AdamW(expected, eps=1.0)
    for i, step in enumerate(grads):
        some = [k for k in range(len(step)) if (k + i) % 2]
        for k, (p, q, grad) in enumerate(zip(found, expected, step, strict=True)):
            p.grad, q.grad = (grad.clone(), grad.clone()) if k in some else (None, None)
        clipped.append(torch.nn.utils.clip_grad_norm_(expected, 1.0))
        optimizer.step()
        peer.step()
        assert_near(optimizer.grad_norm.double(), clipped[-1], 1e-9, f"grad_norm of step {i + 1}")
    assert_all_near(found, expected)


def test_a_step_without_gradients_clips_nothing(implementation: Implementation, device: str) -> None:
    start = tensors(device)
    optimizer = implementation.watched(leaves(start), max_grad_norm=1.0)
    optimizer.step()
    assert_same(optimizer.param_groups[0]["params"], start)


@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 1.0), (torch.float16, 200.0)], ids=str)
def test_the_norm_of_half_precision_is_not_rounded_to_it(
    implementation: Implementation, dtype: torch.dtype, size: float, device: str
) -> None:
    """The sum of squares would be inf in float16."""
    start = tensors(device, dtype, ((100,), (300,)))
    grads = [[g * size for g in step] for step in gradients(start, 1)]
    optimizer = implementation.watched(leaves(start), max_grad_norm=1.0)
    run(optimizer, grads)
    expected = torch.cat([g.double() for g in grads[0]]).norm()
    allowed = 8 * torch.finfo(torch.float32).eps * expected.item()
    assert_near(optimizer.grad_norm.double(), expected, allowed, f"grad_norm of {dtype} gradients")


@pytest.mark.parametrize("bad", [torch.inf, pytest.param(-torch.inf, marks=pytest.mark.sweep), torch.nan])
def test_a_norm_that_is_not_finite_skips_the_step(implementation: Implementation, bad: float, device: str) -> None:
    start = tensors(device)
    grads = gradients(start, 4)
    broken = copy.deepcopy(grads)
    broken.insert(2, gradients(start, 1)[0])
    broken[2][3][7] = bad
    optimizer = implementation.watched(leaves(start), max_grad_norm=1.0)
    before = [p.detach().clone() for p in run(optimizer, broken[:2])]
    found = run(optimizer, broken[2:3])
    for i, (p, value) in enumerate(zip(found, before, strict=True)):
        assert torch.equal(p.detach(), value), f"a gradient is {bad}, and the step changes parameter {i}"
    norm = optimizer.grad_norm.item()
    assert not torch.tensor(norm).isfinite() and norm != -torch.inf, f"a gradient is {bad}, and grad_norm {norm}"
    counts = {float(state["step"]) for state in optimizer.state.values() if "step" in state}
    assert counts == {2}, f"after two steps and one that is skipped the state counts {counts}"
    assert_all_near(run(optimizer, broken[3:]), train(AdamW, start, grads, max_grad_norm=1.0))


def test_master_weights_are_updated_with_clipped_gradients(implementation: Implementation, device: str) -> None:
    """The gradients are scaled in float32, and not rounded again."""
    if not implementation.accepts("master_weights"):
        pytest.skip(f"{implementation} has no option master_weights")
    start = tensors(device, torch.bfloat16)
    grads = gradients(start, 3)
    options = {"lr": 1e-2, "eps": 1.0, "max_grad_norm": 0.5}
    optimizer = implementation.watched(leaves(start), master_weights=True, **options)
    found = run(optimizer, grads)
    expected = train(AdamW, [x.double() for x in start], [[g.double() for g in step] for step in grads], **options)
    for i, (p, y) in enumerate(zip(found, expected, strict=True)):
        if p.numel():
            assert_near(
                optimizer.state[p]["master_weight"].double(), y, 1e-6 * (1 + y.abs().max().item()), f"parameter {i}"
            )
