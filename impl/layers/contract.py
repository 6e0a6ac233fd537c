"""The contract of the layers, the check that a target meets it, and the family."""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor

from impl.layers.accounting import eager_peak
from shardmark.api import Family, Race, Refusable, RegistryError, Unsupported, add_family, dtypes_in, made_once

OPERATIONS = {"rms_norm": 2, "add_rms_norm": 3, "swiglu": 2, "rotary": 4}
"""The contract's functions, and the number of tensors that each takes."""


class Layers(Protocol):
    """An object with these functions, or a class of which one is made without arguments, for all calls.

    Tensors have any strides, each its own, and one dtype: float64, float32, bfloat16 or float16. `weight`, `cos` and
    `sin` may be float32 where the others are bfloat16 or float16. `eps` is 0 or more. Leading dims may be any, or
    empty; the last has one element or more. Results have the dtype and the shape of `x`, of `gate`, of `q` and of `k`,
    and are differentiable in every argument but `cos` and `sin`.

    Must:

    - Results and gradients are as accurate as eager's: each element is off by at most twice what one rounding of each
      factor and of each result to the inputs' dtype, and of sums in float32, allows. The mean of the squares, its root
      and the sum of weight's gradient over rows are in float32 or wider.
    - A row of zeros is normed to zeros if eps is not 0, and of float16 every finite row is normed, also where squares
      would overflow.
    - Calls are independent: no argument and no gradient that backward is given changes, nothing that a call returned
      changes later, and other calls, in `torch.inference_mode()` too, may come before one and between its forward and
      its backward, which may run in another thread. Neither autocast nor torch's default dtype changes anything.
    - In a backward pass the caller's hooks on arguments run once, of whole gradients.
    - A second derivative, of one argument alone too, a second backward pass, or one after an argument or a result has
      changed in place, is right or raises an error. Calls leave nothing behind.
    - A result's gradient that is not finite, or too large, makes gradients that are not finite, as in eager.
    - What it does not take it refuses by `shardmark.api.Unsupported`, a ValueError: whole operations, dtypes, devices.
      A function that is missing is an operation that is refused.

    Should: ValueError for shapes, dtypes and devices that do not go together; equal calls give equal bits; gradients in
    float16 are finite where eager's are.
    """

    def rms_norm(self, x: Tensor, weight: Tensor, *, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last dim: x (..., dim), weight (dim).

        Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
        """
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual), as each half of a pre-norm block begins: x and residual (..., dim).

        The sum is rounded to x's dtype; the norm may be that of the sum before it is rounded.
        """
        ...

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """gate * sigmoid(gate) * up: gate and up (..., dim). Shazeer, "GLU Variants Improve Transformer", 2020."""
        ...

    def rotary(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """q and k with each pair (x[2i], x[2i+1]) of position t rotated by the angle whose cosine is cos[t, i].

        q (batch, heads, seq, head_dim), k alike with any number of heads, cos and sin (seq, head_dim / 2). The pairs
        are neighbours, as in Su et al., "RoFormer", 2021; Hugging Face pairs x[i] with x[i + head_dim / 2].
        """
        ...


def statistics_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of sums and of a mean's root: float32 or wider."""
    return torch.promote_types(x.dtype, torch.float32)


DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_norm(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> None:
    """Raise ValueError, in one line, unless the arguments of a norm go together as the contract says."""
    if (
        x.ndim < 1
        or not x.shape[-1]
        or weight.shape != x.shape[-1:]
        or (residual is not None and residual.shape != x.shape)
    ):
        among = f"x {tuple(x.shape)}" + (f", residual {tuple(residual.shape)}" if residual is not None else "")
        raise ValueError(
            f"a norm takes x (..., dim), its residual alike and weight (dim), got {among}, weight {tuple(weight.shape)}"
        )
    _check_together((x,) if residual is None else (x, residual), (weight,))


def check_gated(gate: Tensor, up: Tensor) -> None:
    """Raise ValueError, in one line, unless gate and up are alike."""
    if gate.shape != up.shape or gate.ndim < 1 or not gate.shape[-1]:
        raise ValueError(f"swiglu takes gate and up (..., dim), got gate {tuple(gate.shape)}, up {tuple(up.shape)}")
    _check_together((gate, up), ())


def check_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Raise ValueError, in one line, unless q, k and the tables go together as the contract says."""
    fit = q.ndim == k.ndim == 4 and (q.shape[0], *q.shape[2:]) == (k.shape[0], *k.shape[2:])
    if not fit or not q.shape[3] or q.shape[3] % 2 or not cos.shape == sin.shape == (q.shape[2], q.shape[3] // 2):
        raise ValueError(
            "rotary takes q and k (batch, heads, seq, head_dim) and tables (seq, head_dim / 2), got "
            f"q {tuple(q.shape)}, k {tuple(k.shape)}, cos {tuple(cos.shape)}, sin {tuple(sin.shape)}"
        )
    _check_together((q, k), (cos, sin))


def _check_together(alike: tuple[Tensor, ...], wider: tuple[Tensor, ...]) -> None:
    """Check devices and dtypes; those of `wider` may be float32 where the others are half precision."""
    devices = {x.device for x in (*alike, *wider)}
    if len(devices) > 1:
        raise ValueError(f"layers take tensors on one device, got {', '.join(sorted(map(str, devices)))}")
    dtypes, also = {x.dtype for x in alike}, {x.dtype for x in wider}
    half = dtypes <= {torch.bfloat16, torch.float16}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES) or not also <= dtypes | ({torch.float32} if half else set()):
        got = ", ".join(str(x.dtype) for x in (*alike, *wider))
        raise ValueError(
            f"layers take one floating dtype, and weight, cos and sin may be float32 beside half, got {got}"
        )


def adapted(target: Any) -> Any:
    """The object's functions; one that it lacks refuses its calls. All calls are of one object, so that what it keeps
    is seen."""
    owner = made_once(target) if inspect.isclass(target) else target
    return SimpleNamespace(**{name: getattr(owner, name, None) or _lacking(name) for name in OPERATIONS})


def _lacking(name: str) -> Any:
    def refuse(*tensors: Tensor, **options: Any) -> Any:
        raise Unsupported(f"it has no {name}")

    return refuse


def operation_of(*tensors: Tensor, **options: Any) -> str:
    """The operation of a call, by its arguments: a norm has `eps`."""
    if "eps" in options:
        return "rms_norm" if len(tensors) == 2 else "add_rms_norm"
    return "swiglu" if len(tensors) == 2 else "rotary"


def _check(target: Any, device: str) -> None:
    """Call each function that there is on ones: the results must be right to 0.1, and differentiable."""
    owner = made_once(target) if inspect.isclass(target) else target
    found = [name for name in OPERATIONS if getattr(owner, name, None) is not None]
    if not found:
        raise RegistryError(f"it has none of the functions {', '.join(OPERATIONS)}")
    for name in found:
        _check_operation(name, getattr(owner, name), device)


def _check_operation(name: str, function: Any, device: str) -> None:
    options = {"eps": 1e-5} if "norm" in name else {}
    try:
        inspect.signature(function).bind(*[None] * OPERATIONS[name], **options)
    except (TypeError, ValueError) as error:
        given = f"{OPERATIONS[name]} tensors{' and eps' * bool(options)}"
        raise RegistryError(f"{name} is not called with {given}: {error}") from None
    for dtype in (torch.float32, torch.bfloat16):  # a fused kernel may take half precision only
        shapes = _TINY[name]
        tensors = [torch.ones(shape, device=device, dtype=dtype).requires_grad_(shape != _TABLE) for shape in shapes]
        try:
            results = function(*tensors, **options)
        except Unsupported:
            continue
        _check_results(name, results, shapes[0])
        return


_TABLE = (3, 8)
_TINY: dict[str, tuple[tuple[int, ...], ...]] = {
    "rms_norm": ((3, 16), (16,)),
    "add_rms_norm": ((3, 16), (3, 16), (16,)),
    "swiglu": ((3, 16), (3, 16)),
    "rotary": ((1, 2, 3, 16), (1, 2, 3, 16), _TABLE, _TABLE),
}
_WANTED = {"rms_norm": (1.0,), "add_rms_norm": (1.0, 2.0), "swiglu": (0.7311,), "rotary": (0.0, 0.0)}
"""First element of each result of ones."""


def _check_results(name: str, results: Any, shape: tuple[int, ...]) -> None:
    wanted = _WANTED[name]
    if len(wanted) == 1:
        results = [results]
    elif not isinstance(results, tuple | list) or len(results) != len(wanted):
        raise RegistryError(f"{name} returned {type(results).__name__}, and not {len(wanted)} tensors")
    for result, value in zip(results, wanted, strict=True):
        if not isinstance(result, Tensor) or result.shape != shape:
            found = f"a tensor {tuple(result.shape)}" if isinstance(result, Tensor) else repr(result)
            raise RegistryError(f"{name} returned {found}, expected {shape}")
        if not abs(result.detach().flatten()[0].item() - value) <= 0.1:
            raise RegistryError(f"{name} of ones begins with {result.flatten()[0].item():.4f}, expected {value:.4f}")
        if not result.requires_grad:
            raise RegistryError(f"the result of {name} is not differentiable")


FAMILY = add_family(
    Family(
        "layers",
        Layers,
        reference="eager",
        check=_check,
        memory=eager_peak,
        time=Race("eager", budget=1.5),  # a user's own layers may compute some of forward again
        adapt=adapted,
        methods=tuple(OPERATIONS),
        may_refuse=(
            Refusable("operations", operation_of),
            Refusable("dtypes", lambda *tensors, **_: dtypes_in(tensors), elsewhere=True),
            Refusable("devices", lambda *tensors, **_: tensors[0].device.type, elsewhere=True),
        ),
    )
)
