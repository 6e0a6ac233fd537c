"""Arguments and errors that every AdamW here shares, and float32 optimizer state for master weights.

torch's `load_state_dict` casts all state to the parameter's dtype, in which master weights and their moments would lose
half their bits.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Real
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
FLOATS = (torch.float64, torch.float32, *HALF)
MASTER = "master_weight"


class MasterWeights(torch.optim.Optimizer):
    """Float32 state for half-precision parameters, in an optimizer that has the option `master_weights`.

    Set the attribute `master_weights` before `torch.optim.Optimizer.__init__`.
    """

    master_weights: bool
    steps_on_device: bool
    """True if step counts are on the parameters' device; otherwise they are on CPU."""

    def has_master(self, p: Tensor) -> bool:
        """Return True if `p` has a float32 master weight."""
        return self.master_weights and p.dtype in HALF

    def state_of(self, p: Tensor) -> dict[str, Any]:
        """Return the state of `p`, and allocate what is missing, for example after loading another optimizer's
        state."""
        state = self.state[p]
        if "exp_avg" not in state:
            dtype = self._state_dtype(p)
            state["step"] = torch.zeros((), dtype=torch.float32, device=self._step_device(p))
            state["exp_avg"] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
        if MASTER not in state and self.has_master(p):
            state[MASTER] = p.detach().to(torch.float32, memory_format=torch.preserve_format)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but loads copies, which share nothing with the saved optimizer, and in other dtypes: float32
        with master weights, otherwise the parameter's."""
        final: dict[str, Any] = {}
        hooks = (
            self.register_load_state_dict_pre_hook(lambda _, loaded: final.update(loaded)),  # after all other hooks
            self.register_load_state_dict_post_hook(lambda _: self._load_uncast(final), prepend=True),
        )
        try:
            super().load_state_dict(state_dict)
        finally:
            for hook in hooks:
                hook.remove()

    def _load_uncast(self, loaded: dict[str, Any]) -> None:
        """Replace the state that torch cast to the parameters' dtype by copies of the loaded state in the right
        dtypes."""
        params = [p for group in self.param_groups for p in group["params"]]
        ids = [i for group in loaded["param_groups"] for i in group["params"]]
        for p, i in zip(params, ids, strict=True):
            for name, value in loaded["state"].get(i, {}).items():
                if not isinstance(value, Tensor):
                    continue
                if name == "step":
                    self.state[p][name] = value.to(self._step_device(p), torch.float32, copy=True)
                elif value.is_floating_point():
                    dtype = torch.float32 if name == MASTER else self._state_dtype(p)
                    self.state[p][name] = value.to(p.device, dtype, copy=True)

    def _state_dtype(self, p: Tensor) -> torch.dtype:
        return torch.float32 if self.has_master(p) else p.dtype

    def _step_device(self, p: Tensor) -> torch.device:
        return p.device if self.steps_on_device else torch.device("cpu")

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "master_weights": self.master_weights}


class AdamWBase(MasterWeights):
    """Checks AdamW's arguments and parameters; subclasses add `step`. Contract: `impl.optim.Optimizer`."""

    steps_on_device = False

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        max_grad_norm: float | None = None,
        master_weights: bool = False,
    ) -> None:
        if max_grad_norm is not None and not (isinstance(max_grad_norm, Real) and max_grad_norm > 0):
            raise ValueError(f"max_grad_norm is a positive number or None, got {max_grad_norm!r}")
        self.max_grad_norm = max_grad_norm
        self.master_weights = master_weights
        self.grad_norm: Tensor | None = None
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; ValueError, in one line and with nothing added, for wrong arguments or parameters."""
        super().add_param_group(param_group)
        try:
            self._check(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    def _check(self, group: dict[str, Any]) -> None:
        for name in ("lr", "eps", "weight_decay"):
            if not (isinstance(group[name], Real) and group[name] >= 0):
                raise ValueError(f"{name} is a number from 0 on, got {group[name]!r}")
        betas = group["betas"]
        if not (isinstance(betas, (tuple, list)) and len(betas) == 2 and all(_is_beta(beta) for beta in betas)):
            raise ValueError(f"betas are two numbers from 0 to below 1, got {betas!r}")
        first = next((p for g in self.param_groups for p in g["params"]), None)
        for p in group["params"]:
            if p.dtype not in FLOATS and (p.is_floating_point() or p.is_complex()):  # integers have no gradients
                raise ValueError(f"AdamW takes float64, float32, bfloat16 and float16 parameters, got {p.dtype}")
            if first is not None and p.device != first.device:
                raise ValueError(f"AdamW takes parameters on one device, got {first.device} and {p.device}")

    def evaluate(self, closure: Callable[[], Any] | None) -> Any:
        """Call the closure with gradients enabled, and return its result."""
        if closure is None:
            return None
        with torch.enable_grad():
            return closure()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "max_grad_norm": self.max_grad_norm, "grad_norm": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        for group in state["param_groups"]:  # arguments that torch's AdamW has and ours lacks
            if group.get("amsgrad") or group.get("maximize"):
                raise ValueError("the state is of AdamW with amsgrad or maximize, which are not supported here")
        super().__setstate__(state)


def _is_beta(x: Any) -> bool:
    return isinstance(x, Real) and 0 <= float(x) < 1


def dense_gradient(p: Tensor) -> Tensor:
    """Return the gradient of `p`; ValueError if it is sparse."""
    grad = p.grad
    assert grad is not None  # callers skip parameters without a gradient
    if grad.layout is not torch.strided:
        raise ValueError(f"AdamW takes dense gradients, got {grad.layout} of shape {tuple(grad.shape)}")
    return grad
