"""The contract of the loss, the check that a target meets it, and the family."""

from __future__ import annotations

import math
from typing import Any, Protocol

import torch
from torch import Tensor

from impl.loss.accounting import eager_peak
from shardmark.api import Family, Race, Refusable, RegistryError, Unsupported, add_family, check_signature, dtype_name


class Loss(Protocol):
    """`loss(hidden, weight, targets, *, ...) -> scalar`, differentiable in hidden and weight.

    hidden: (tokens, dim), weight: (vocab, dim), the output projection, of any strides, both of one dtype: float64,
    float32, bfloat16 or float16; targets: (tokens) int64. The logits are hidden weightᵀ, in the inputs' dtype as a
    Linear's are, and the loss is their cross entropy, the mean over the targets that are not `ignore_index`, which may
    be any integer, a word of the vocabulary as well. `label_smoothing`, from 0 to 1, is that of torch's cross_entropy
    (Szegedy et al., "Rethinking the Inception Architecture for Computer Vision", 2015, section 7), over the whole
    vocabulary. `z_loss` adds z_loss * the mean of logsumexp(logits)² over the same targets (Chowdhery et al., "PaLM",
    2022, section 5).

    Must:

    - Loss and gradients are as accurate as eager's: at most twice the error, against float64, also where all logits
      share a large offset. Steps after the logits are in float32 or more, and so is the loss; gradients have their
      inputs' dtypes. Under autocast hidden and weight may each be float32 or of autocast's dtype.
    - Calls are independent: no input changes, nothing that a call returned changes later, and other calls may come
      before one and between its forward and its backward. The loss is the same without gradients, also in
      `torch.inference_mode()`, and torch's default dtype changes nothing.
      Backward may run in another thread. A loss's gradient that is not finite, or too large, makes gradients that are
      not finite.
    - In a backward pass the caller's hooks on inputs run once, of whole gradients.
    - A second derivative, of one input alone too, a second backward pass, or one after an input or the loss has changed
      in place, is right or raises an error.
    - A NaN in a token whose target counts makes the loss NaN. Calls leave nothing behind.
    - What it does not take it refuses by `shardmark.api.Unsupported`, a ValueError: whole dtypes, label smoothing,
      z-loss, devices.

    Should: where every target is ignored, loss and gradients are 0 (torch's cross_entropy divides zero by zero, and one
    NaN on one rank makes every parameter NaN); ValueError for shapes, dtypes, devices and options that do not go
    together and, on CPU, for targets out of range; equal calls give equal bits; nothing is computed for gradients that
    nobody asks for.

    The suite's own check the range of targets on CUDA by `torch._assert_async`, so that the host need not wait.
    """

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
    ) -> Tensor: ...


MAY_REFUSE = (
    Refusable("dtypes", lambda hidden, weight, targets, **_: dtype_name(product_dtype(hidden, weight)), elsewhere=True),
    Refusable("label_smoothing", lambda *_, label_smoothing=0.0, **__: "label_smoothing" if label_smoothing else None),
    Refusable("z_loss", lambda *_, z_loss=0.0, **__: "z_loss" if z_loss else None),
    Refusable("devices", lambda hidden, weight, targets, **_: hidden.device.type, elsewhere=True),
)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def check_inputs(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, label_smoothing: float, z_loss: float
) -> None:
    """Raise ValueError, in one line, unless everything goes together as the contract says."""
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1] or targets.shape != hidden.shape[:1]:
        raise ValueError(
            "loss takes hidden (tokens, dim), weight (vocab, dim) and targets (tokens), "
            f"got hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)}, targets {tuple(targets.shape)}"
        )
    if 0 in weight.shape:
        raise ValueError(f"loss over nothing: weight {tuple(weight.shape)}")
    if not hidden.device == weight.device == targets.device:
        raise ValueError(
            "loss takes hidden, weight and targets on one device, "
            f"got {hidden.device}, {weight.device}, {targets.device}"
        )
    dtypes = {hidden.dtype, weight.dtype}
    mixed = len(dtypes) > 1 and not (torch.is_autocast_enabled(hidden.device.type) and torch.float64 not in dtypes)
    if mixed or not dtypes <= set(DTYPES):
        raise ValueError(
            "loss takes hidden and weight of one floating dtype (float64, float32, bfloat16, float16), "
            f"got {hidden.dtype}, {weight.dtype}"
        )
    if targets.dtype != torch.int64:
        raise ValueError(f"loss takes targets of torch.int64, got {targets.dtype}")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"label_smoothing is from 0 to 1, got {label_smoothing}")
    if not 0 <= z_loss < math.inf:
        raise ValueError(f"z_loss is 0 or more and finite, got {z_loss}")
    _check_range(targets, weight.shape[0], ignore_index)


def _check_range(targets: Tensor, vocab: int, ignore_index: int) -> None:
    """On CPU raise ValueError that names a target out of range; on CUDA assert the range on the device."""
    in_range = ((targets >= 0) & (targets < vocab)) | (targets == ignore_index)
    if targets.device.type != "cpu":
        message = f"loss: a target is out of range: neither in [0, {vocab}) nor {ignore_index}"
        torch._assert_async(in_range.all(), message)
    elif not in_range.all():
        at = int(in_range.int().argmin())
        raise ValueError(
            f"loss takes targets in [0, {vocab}), the vocabulary, or {ignore_index}, which is ignored; "
            f"targets[{at}] is {int(targets[at])}"
        )


def product_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    """Return the dtype of the products of hidden and weight: autocast's if it is on, else the inputs'."""
    device = hidden.device.type
    if torch.is_autocast_enabled(device) and torch.float64 not in (hidden.dtype, weight.dtype):
        return torch.get_autocast_dtype(device)
    return hidden.dtype


def statistics_dtype(product: torch.dtype) -> torch.dtype:
    """Return the dtype of sums over the vocabulary and over tokens: float32 or wider."""
    return torch.promote_types(product, torch.float32)


SIGNATURE = "(hidden, weight, targets, *, ignore_index=-100, label_smoothing=0.0, z_loss=0.0)"


def _check(target: Any, device: str) -> None:
    """Call the target on a tiny input, and run backward: the loss must be right to 0.1, and differentiable."""
    if not callable(target):
        raise RegistryError(f"{target!r} is not callable; a loss is loss{SIGNATURE}")
    check_signature(target, SIGNATURE, None, None, None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0)
    try:
        hidden, weight, loss, wanted = _tiny_call(target, device, torch.float32)
    except Unsupported:  # a fused kernel may take half precision only
        hidden, weight, loss, wanted = _tiny_call(target, device, torch.bfloat16)
    if not isinstance(loss, Tensor) or loss.ndim != 0:
        found = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else repr(loss)
        raise RegistryError(f"it returned {found}, and not a scalar tensor")
    if not abs(loss.item() - wanted) <= 0.1:
        raise RegistryError(f"it returned {loss.item():.4f} where the cross entropy is {wanted:.4f}")
    loss.backward()
    if hidden.grad is None or weight.grad is None:
        raise RegistryError("its loss is not differentiable in hidden and weight")


def _tiny_call(target: Any, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Any, float]:
    hidden, weight = (torch.randn(n, 16, device=device).div(2).to(dtype).requires_grad_() for n in (6, 32))
    targets = torch.tensor([3, -100, 0, 31, 7, -100], device=device)
    wanted = torch.nn.functional.cross_entropy((hidden.detach() @ weight.detach().T).float(), targets)
    loss = target(hidden, weight, targets, ignore_index=-100, label_smoothing=0.0, z_loss=0.0)
    return hidden, weight, loss, wanted.item()


FAMILY = add_family(
    Family(
        "loss",
        Loss,
        reference="eager",
        check=_check,
        may_refuse=MAY_REFUSE,
        memory=eager_peak,
        time=Race("eager", budget=1.5),  # a user's own loss may compute the logits twice: 4/3 of the FLOPs
    )
)
