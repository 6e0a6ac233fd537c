"""The fused AdamW's kernels and its table: right at each configuration in the interpreter."""

import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

pytest.importorskip("triton", exc_type=ImportError)

from correctness.optim.training import assert_as_accurate_as_plain, assert_same, gradients, leaves, run, tensors, train
from correctness.support.kernel_faults import every_fourth, with_fault
from impl.optim import AdamW, FusedAdamW, multi_tensor, triton_kernels
from impl.optim.multi_tensor import CONFIGURATIONS, Configuration
from shardmark.api import Unsupported, family

SMALL = Configuration(block=16, chunk=32, warps=4)


@pytest.fixture
def fused(device: str, monkeypatch: pytest.MonkeyPatch, poisoned: None) -> Callable[[Configuration], Any]:
    """The fused optimizer, where it runs, with a configuration."""
    if reason := family("optimizer").implementations["fused_triton"].unavailable_reason(device):
        pytest.skip(reason)

    def configured(configuration: Configuration) -> Any:
        monkeypatch.setattr(FusedAdamW, "configuration", configuration)
        return FusedAdamW

    return configured


def _around(configuration: Configuration) -> tuple[tuple[int, ...], ...]:
    """Sizes around those of its block and its chunk."""
    block, chunk, _ = configuration
    return ((1,), (block - 1,), (block,), (block + 1,), (chunk,), (chunk + 1,), (2, chunk + block))


@pytest.mark.parametrize(
    "configuration", [SMALL, *(pytest.param(c, marks=pytest.mark.sweep) for c in CONFIGURATIONS)], ids=str
)
@pytest.mark.parametrize("clip", [None, 1.0], ids=["whole", "clipped"])
def test_each_configuration_is_as_accurate_as_plain(
    configuration: Configuration, clip: float | None, fused: Callable[[Configuration], Any], device: str
) -> None:
    for dtype in (torch.float64, torch.float32):
        start = tensors(device, dtype, _around(configuration))
        grads = gradients(start, 3)
        assert_as_accurate_as_plain(fused(configuration), start, grads, lr=1e-2, max_grad_norm=clip)


@pytest.mark.parametrize("tensors_at_all", [1, 255, 256, 257])
def test_any_number_of_tensors(tensors_at_all: int, fused: Callable[[Configuration], Any], device: str) -> None:
    """Numbers around what `prepare` takes in one iteration; empty tensors are cheap to interpret."""
    start = [torch.ones(1 if i == tensors_at_all - 1 else 0, device=device) for i in range(tensors_at_all)]
    optimizer = fused(SMALL)(leaves(start), max_grad_norm=1.0)
    run(optimizer, gradients(start, 2))
    assert all(state["step"] == 2 for state in optimizer.state.values())


def test_more_partial_sums_than_are_taken_at_once(fused: Callable[[Configuration], Any], device: str) -> None:
    start = tensors(device, torch.float64, ((4097,),))
    grads = gradients(start, 1)
    optimizer = fused(Configuration(block=1, chunk=1, warps=1))(leaves(start), max_grad_norm=1.0)
    optimizer._table = table = multi_tensor.Table(*_operands(optimizer, grads), optimizer.configuration)
    assert table.programs == 4097
    table.fill(_operands(optimizer, grads)[0])
    table.set(optimizer._hyperparameters())
    table.partials = grads[0][0].square()
    table._norms = lambda: table.partials
    table.launches = []  # `prepare` alone
    torch.testing.assert_close(table.run(True, None, None), grads[0][0].norm(), rtol=1e-13, atol=0)


def _operands(optimizer: Any, grads: Any) -> tuple[Any, torch.device]:
    (p,) = optimizer.param_groups[0]["params"]
    p.grad = grads[0][0]
    return optimizer._operands()[0], p.device


FAULTS = {  # text in the kernels' source, and its faulty replacement
    "last block skipped": ("else:\n            _update_block(", "elif start < 0:\n            _update_block("),
    "chunk a block short": ("tl.minimum(begin + CHUNK,", "tl.minimum(begin + CHUNK - 16,"),
    "chunk not told apart": (".to(tl.int64) * CHUNK", ".to(tl.int64) * 0"),
    "norm of whole blocks alone": ("mask=offsets < end, other=0)", "mask=offsets < 0, other=0)"),
    "not clipped": ("factor *= tl.minimum", "factor *= tl.maximum"),
    "norm not rooted": ("tl.sqrt(tl.sum(sums))", "tl.sum(sums)"),
    "no decay": ("* decay", ""),
    "first moment not corrected": ("lr / (1 - tl.exp(step * tl.log(beta1)))", "lr"),
    "second moment not corrected": ("1 / tl.sqrt(1 - tl.exp(step * tl.log(beta2)))", "1 / tl.sqrt(step)"),
    "moments swapped": ("_store(first_moment, m,", "_store(first_moment, v,"),
    "eps forgotten": ("correction + eps)", "correction)"),
    "skipped step counted": ("+ tl.where(proceed, 1.0, 0.0)\n", "+ 1.0\n"),
    "second moment not written": ("_store(second_moment, v,", "_store(second_moment, beta2,"),
    "weight not written": ("_store(weight, w,", "_store(grad, w,"),
}  # fmt: skip


@pytest.mark.parametrize("fault", [None, *every_fourth(FAULTS)])
def test_a_planted_fault_is_caught(
    fault: str | None,
    fused: Callable[[Configuration], Any],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    device: str,
) -> None:
    start = tensors(device, torch.float64, ((15,), (33,), (70,)))
    grads = gradients(start, 3)
    grads[1][0][0] = torch.inf  # a step that is skipped
    if fault is not None:
        monkeypatch.setattr(multi_tensor, "triton_kernels", with_fault(triton_kernels, tmp_path, *FAULTS[fault]))
    with nullcontext() if fault is None else pytest.raises(AssertionError, match="error"):
        assert_as_accurate_as_plain(fused(SMALL), start, grads, lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=1.0)


@pytest.mark.parametrize(
    ("dtypes", "launches"),
    [([torch.float32] * 5, 1), ([torch.float32, torch.float64, torch.bfloat16, torch.float32], 3)],
    ids=["one_dtype", "three_dtypes"],
)
def test_tensors_of_one_kind_take_one_launch_and_one_table(
    dtypes: list[torch.dtype], launches: int, fused: Callable[[Configuration], Any], device: str
) -> None:
    """Whatever their param groups. New gradients change addresses, and nothing else."""
    start = [torch.randn(40, device=device).to(dtype) for dtype in dtypes]
    optimizer = fused(SMALL)([{"params": leaves(start[:2]), "lr": 0.1}, {"params": leaves(start[2:])}])
    run(optimizer, gradients(start, 1))
    table = optimizer._table
    assert len(table.launches) == launches
    run(optimizer, gradients(start, 2))
    assert optimizer._table is table


def test_new_gradients_are_sent_into_the_table_that_is_there(
    fused: Callable[[Configuration], Any], device: str
) -> None:
    """A new table would free the old one, which a kernel on another stream may still read."""
    start = tensors(device, torch.float32)
    grads = gradients(start, 3)
    optimizer = fused(SMALL)(leaves(start))
    kept = run(optimizer, grads[:1])
    table, old = optimizer._table.table, [p.grad for p in kept]
    optimizer._operands = lambda: pytest.fail("the table is made again")
    run(optimizer, grads[1:])
    assert optimizer._table.table is table and all(p.grad is not g for p, g in zip(kept, old, strict=True))
    assert_same(kept, train(fused(SMALL), start, grads))


def test_dense_tensors_of_equal_strides_are_not_copied(fused: Callable[[Configuration], Any], device: str) -> None:
    """The kernels read them as they lie, whatever the strides; a copy would be dense in another order."""
    start = [x.mT for x in tensors(device, torch.float32, ((6, 17), (3, 2, 5)))]
    optimizer = fused(SMALL)(leaves(start))
    (params,) = (group["params"] for group in optimizer.param_groups)
    for p in params:
        p.grad = torch.randn_like(p)
        assert p.stride() == p.grad.stride() and not p.is_contiguous()
    operands, copied = optimizer._operands()
    assert not copied and [x.data_ptr() for x in operands.gradients] == [p.grad.data_ptr() for p in params]


@pytest.mark.parametrize("change", ["misaligned", "strided", "another parameter's", "fewer", "dtype"])
def test_other_gradients_are_seen(change: str, fused: Callable[[Configuration], Any], device: str) -> None:
    """A gradient may change in more than its address, and may lie where another's was."""
    start = [torch.randn(4, 4, device=device) for _ in range(2)]
    found = []
    for target in (fused(SMALL), AdamW):
        torch.manual_seed(0)
        optimizer = target(leaves(start), lr=0.1)
        first, second = run(optimizer, gradients(start, 2))
        if change == "misaligned":
            first.grad = torch.randn(17).to(device)[1:].view(4, 4)
        elif change == "strided":
            first.grad = first.grad.t()
        elif change == "another parameter's":
            second.grad = None
            optimizer.step()
            first.grad, second.grad = None, first.grad  # the same number and addresses as before
        elif change == "fewer":
            first.grad = None
        else:
            first.grad_dtype = None
            first.grad = first.grad.data.view(torch.bfloat16)[:, :4].contiguous()
        optimizer.step()
        found.append([first.detach(), second.detach()])
        if change == "misaligned" and target is not AdamW:  # the interpreter gives the same results
            assert sorted(kind[-1] for kind in optimizer._table.kinds) == [False, True]
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_the_host_does_nothing_for_each_tensor_but_in_c(fused: Callable[[Configuration], Any], device: str) -> None:
    """A step over hundreds of tensors takes 3 ms on a fast device: Python calls per tensor would take longer."""

    def calls(tensors_at_all: int, moves: bool) -> int:
        start = [torch.ones(4, device=device)] * tensors_at_all
        optimizer = fused(SMALL)(leaves(start))
        params = run(optimizer, gradients(start, 2))
        optimizer._table.run = lambda *_: None
        for p in params if moves else ():
            p.grad = torch.ones_like(p)
        count = 0

        def profile(frame: FrameType, event: str, _: Any) -> None:
            nonlocal count
            count += event == "call"

        sys.setprofile(profile)
        try:
            optimizer.step()
        finally:
            sys.setprofile(None)
        return count

    for moves in (False, True):
        assert calls(3, moves) == calls(30, moves)


def test_a_captured_step_is_one_line_and_changes_nothing(
    fused: Callable[[Configuration], Any], device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = tensors(device, torch.float32)
    optimizer = fused(SMALL)(leaves(start))
    params = run(optimizer, gradients(start, 1))
    before = [p.detach().clone() for p in params]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(Unsupported, match=r"^fused_triton is not captured in a CUDA graph: .*$"):
        optimizer.step(lambda: pytest.fail("the closure is evaluated"))
    assert_same(params, before)


def test_a_step_waits_for_nothing(fused: Callable[[Configuration], Any], device: str) -> None:
    if device != "cuda":
        pytest.skip("on CUDA, torch tells of what waits for the device")
    start = tensors(device, torch.float32)
    optimizer = fused(CONFIGURATIONS[0])(leaves(start), max_grad_norm=1.0)
    run(optimizer, gradients(start, 1))
    for p in optimizer.param_groups[0]["params"]:
        p.grad = torch.randn_like(p)
    torch.cuda.set_sync_debug_mode("error")
    try:
        optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
