"""Train a few tensors with an optimizer, compare the results, and compile the fused AdamW for a chip."""

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from correctness.engine.examples import BESIDE_LAUNCHES
from correctness.optim.mistakes import mistakes
from correctness.support.likeness import likeness
from impl.interpreting import requires_triton
from impl.optim import AdamW
from shardmark.api import Implementation

SHAPES: tuple[tuple[int, ...], ...] = ((3, 5), (), (0, 4), (1030,), (7, 1, 30))
"""Odd sizes, no dims, no elements, a little more than a block of the fused kernel."""


def interpreted(implementation: Implementation, device: str) -> bool:
    """True if a step takes milliseconds for each tensor."""
    return requires_triton in implementation.requires and device == "cpu"


def counts_beside_launches(implementation: Implementation, device: str) -> tuple[int, ...]:
    """Numbers of tensors around what one launch, or one bucket, may take; fewer numbers where they are interpreted."""
    return (33, 31, 32, 65, 260) if interpreted(implementation, device) else BESIDE_LAUNCHES


ARGUMENTS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "language_model": {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1},
    "no_decay": {"lr": 1e-2, "weight_decay": 0.0},
    "no_memory": {"lr": 1e-2, "betas": (0.0, 0.0)},
    "large_eps": {"lr": 1e-2, "eps": 0.5},
}
"""Arguments of AdamW; each name says what is unusual about them."""


def tensors(
    device: str, dtype: torch.dtype = torch.float64, shapes: Sequence[tuple[int, ...]] = SHAPES
) -> list[Tensor]:
    """Random tensors of those shapes."""
    return [torch.randn(shape, dtype=torch.float64).to(device, dtype) for shape in shapes]


def gradients(like: Sequence[Tensor], steps: int) -> list[list[Tensor]]:
    """Random gradients for that many steps."""
    return [[torch.randn(x.shape, dtype=torch.float64).to(x) for x in like] for _ in range(steps)]


def leaves(values: Sequence[Tensor], dtype: torch.dtype | None = None) -> list[Tensor]:
    """Copies that require gradients."""
    return [x.detach().clone().to(dtype or x.dtype).requires_grad_() for x in values]


def run(optimizer: torch.optim.Optimizer, grads: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Take one step for each list of gradients; the order is the parameters'. Returns the parameters."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    for step in grads:
        optimizer.zero_grad()
        for p, grad in zip(params, step, strict=True):
            p.grad = grad.clone().to(p.dtype)
        optimizer.step()
    return params


def train(target: Any, start: Sequence[Tensor], grads: Sequence[Sequence[Tensor]], **options: Any) -> list[Tensor]:
    """Return copies of `start` after one step for each list of gradients."""
    return [p.detach() for p in run(target(leaves(start), **options), grads)]


def saved(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's state dict, as from a file."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file)


class ClipThenAdamW(AdamW):
    """Reference of `max_grad_norm`: `clip_grad_norm_` on copies of the gradients, then a step if the norm is finite."""

    def __init__(self, params: Any, *, max_grad_norm: float | None = None, **options: Any) -> None:
        options.pop("master_weights", None)  # float64 parameters are their own
        super().__init__(params, **options)
        self.most, self.norm = max_grad_norm, None

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "most": self.most, "norm": None}

    def step(self, closure: Any = None) -> Any:
        result = None if closure is None else closure()
        having = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        own = [p.grad for p in having]
        self.norm = None
        if self.most is not None and having:
            for p in having:
                p.grad = p.grad.clone()
            self.norm = torch.nn.utils.clip_grad_norm_(having, self.most)
        if self.norm is None or self.norm.isfinite():
            super().step()
        for p, grad in zip(having, own, strict=True):
            p.grad = grad
        return result


def assert_same(found: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    """Assert bitwise equality, NaN included."""
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a.detach(), b.detach(), rtol=0, atol=0, equal_nan=True)


def assert_as_accurate_as_plain(
    target: Any, start: Sequence[Tensor], grads: Sequence[Sequence[Tensor]], **options: Any
) -> None:
    """Assert that the error is at most twice that of `AdamW` in the same dtype, or twice what rounding explains.

    In a narrower dtype than float64 that is one rounding of the parameter, for where `AdamW` is exact by luck. In
    float64, the reference's own dtype, it is for each step one rounding of the parameter and one of the bias
    corrections, which are differences of 1 and a power, so 1 / (1 - beta) scales it; or a billionth of lr, which
    another order of the operations may cost and a detour through float32 exceeds.
    """
    wide = [[g.double() for g in step] for step in grads]
    exact = train(AdamW, [x.double() for x in start], wide, **options)
    plain = train(AdamW, start, grads, **options)
    found = train(target, start, grads, **options)
    lr, betas = options.get("lr", 1e-3), options.get("betas", (0.9, 0.999))
    for i, (x, same_dtype, reference) in enumerate(zip(found, plain, exact, strict=True)):
        assert x.dtype == same_dtype.dtype, f"parameter {i} was {same_dtype.dtype}, and is {x.dtype} after the steps"
        assert x.shape == same_dtype.shape, f"parameter {i}'s shape was {tuple(same_dtype.shape)}: {tuple(x.shape)}"
        if not x.numel():
            continue
        rounding = torch.finfo(x.dtype).eps * reference.abs().max().item()
        if x.dtype == torch.float64:
            rounding = len(grads) * max(rounding + torch.finfo(x.dtype).eps * lr / (1 - max(betas)), 1e-9 * lr)
        plain_error = (same_dtype.double() - reference).abs().max().item()
        known = partial(mistakes, start[i], [step[i] for step in grads], options)
        what = f"parameter {i} of shape {tuple(x.shape)}"
        assert_near(x.double(), reference, 2 * max(plain_error, rounding), what, known)


def assert_near(
    found: Tensor,
    expected: Tensor,
    allowed: float,
    what: str,
    known: Callable[[], Mapping[str, Callable[[], Tensor]]] = dict,
) -> None:
    """Assert that no element's error exceeds `allowed`, and that NaN is where NaN is expected. The error names the one
    of the `known` mistakes that has this result."""
    assert found.shape == expected.shape, f"{what}: its shape is {tuple(found.shape)}, expected {tuple(expected.shape)}"
    wrong = ~torch.isclose(found.detach().to(expected), expected.detach(), rtol=0, atol=allowed, equal_nan=True)
    if wrong.any():
        error = torch.where(wrong, (found - expected).abs(), -1).nan_to_num(torch.inf)
        at = tuple(x.item() for x in torch.unravel_index(error.argmax(), error.shape))
        raise AssertionError(
            f"{what}: found {found[at].item():.9g} at {list(at)}, expected {expected[at].item():.9g}: "
            f"error {error[at].item():.1e}, allowed {allowed:.1e}, in {wrong.sum().item()} of {wrong.numel()} elements"
            f"{likeness(found, expected, known())}"
        )


def assert_all_near(found: Sequence[Tensor], expected: Sequence[Tensor], rtol: float = 1e-10, when: str = "") -> None:
    """Assert that float64 parameters differ by no more than a few roundings."""
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        if y.numel():
            what = f"{when}parameter {i} of shape {tuple(y.shape)}"
            assert_near(x.detach(), y.detach(), rtol * (1 + y.abs().max().item()), what)


def compile_kernels(dtype: torch.dtype, master: bool, chip: int, configuration: tuple[int, int, int]) -> list[Any]:
    """Return the `KernelReport` of each kernel of a clipped step; runs in a process without Triton's interpreter."""
    from impl.optim import multi_tensor
    from shardmark.meter.aot import compile_only

    state = torch.float32 if master else dtype
    p, *moments = (torch.empty(64, dtype=kind) for kind in (dtype, state, state, state))
    operands = multi_tensor.Operands([], [], [])
    operands.add(p, [p, *moments[: 3 if master else 2]], torch.zeros(()), master, 0)
    table = multi_tensor.Table(operands, p.device, multi_tensor.Configuration(*configuration))
    table.fill(operands)
    table.set([1.0, 1e-3, 0.9, 0.999, 1e-8, 1e-2])
    with compile_only(chip) as reports:
        table.run(True, None, None)
    return reports
