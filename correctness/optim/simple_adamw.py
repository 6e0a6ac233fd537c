"""A right AdamW with a method for each part; each planted defect changes one."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

State = dict[str, Any]


class Simple(torch.optim.Optimizer):
    """AdamW without options."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        if not (min(lr, eps, weight_decay) >= 0 and all(0 <= beta < 1 for beta in betas)):
            raise ValueError(f"lr={lr}, betas={betas}, eps={eps}, weight_decay={weight_decay} is out of range")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def __getstate__(self) -> State:
        """A deep copy has all attributes but a `step` that a scheduler wrapped, which would step the original; torch's
        own method keeps defaults, state and groups alone."""
        return {name: value for name, value in self.__dict__.items() if name != "step"}

    def load_state_dict(self, state_dict: State) -> None:
        """Load a copy: torch's own method keeps the tensors that it is given."""
        super().load_state_dict(deepcopy(state_dict))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.update_all()
        return loss

    def update_all(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, p.grad, group)

    def update(self, p: Tensor, grad: Tensor, group: State) -> None:
        state = self.state_of(p)
        state["step"] += 1
        self.move(p, grad, state, group, float(state["step"]))

    def state_of(self, p: Tensor) -> State:
        state = self.state[p]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state.update(exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        return state

    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        m, v, (beta1, beta2) = state["exp_avg"], state["exp_avg_sq"], group["betas"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        m.lerp_(grad, 1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        p.addcdiv_(m, self.denominator(v, 1 - beta2**t, group["eps"]), value=-group["lr"] / (1 - beta1**t))

    def denominator(self, v: Tensor, correction: float, eps: float) -> Tensor:
        return v.sqrt().div_(correction**0.5).add_(eps)


class Clipping(Simple):
    """AdamW with `max_grad_norm`."""

    grad_norm: Tensor | None = None

    def __init__(self, params: Any, lr: float = 1e-3, *, max_grad_norm: float | None = None, **options: Any) -> None:
        super().__init__(params, lr, **options)
        self.max_grad_norm = max_grad_norm
        self.factor = torch.ones(())

    def update_all(self) -> None:
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        if self.max_grad_norm is not None and grads:
            self.grad_norm = self.norm(grads)
            if self.skips(self.grad_norm):
                return
            self.factor = self.scale(self.grad_norm, self.max_grad_norm)
        super().update_all()

    def norm(self, grads: list[Tensor]) -> Tensor:
        norms = [g.to(torch.promote_types(g.dtype, torch.float64)).norm() for g in grads]
        return torch.stack(norms).norm().to(torch.promote_types(grads[0].real.dtype, torch.float32))

    def skips(self, norm: Tensor) -> bool:
        return not norm.isfinite()

    def scale(self, norm: Tensor, most: float) -> Tensor:
        return (most / (norm + 1e-6)).clamp(max=1)

    def update(self, p: Tensor, grad: Tensor, group: State) -> None:
        super().update(p, (grad * self.factor).to(grad.dtype), group)  # without dims a product has the wider dtype


class Master(Simple):
    """AdamW with `master_weights`."""

    def __init__(self, params: Any, lr: float = 1e-3, *, master_weights: bool = False, **options: Any) -> None:
        super().__init__(params, lr, **options)
        self.master_weights = master_weights

    def state_of(self, p: Tensor) -> State:
        state = self.state[p]
        if not state and self.master_weights and p.dtype in (torch.bfloat16, torch.float16):
            m, v = (torch.zeros_like(p, dtype=torch.float32) for _ in range(2))
            state["step"] = torch.zeros((), dtype=torch.float32)
            state.update(exp_avg=m, exp_avg_sq=v, master_weight=p.detach().float())
        return super().state_of(p)

    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        if "master_weight" not in state:
            super().move(p, grad, state, group, t)
            return
        super().move(state["master_weight"], grad.float(), state, group, t)
        p.copy_(state["master_weight"])

    def load_state_dict(self, state_dict: State) -> None:
        """torch casts the state to the parameter's dtype; here it stays in float32."""
        super().load_state_dict(state_dict)
        params = [p for group in self.param_groups for p in group["params"]]
        for p, i in zip(params, [i for group in state_dict["param_groups"] for i in group["params"]], strict=True):
            for name, value in state_dict["state"].get(i, {}).items():
                if self.master_weights and isinstance(value, Tensor) and p.dtype in (torch.bfloat16, torch.float16):
                    self.state[p][name] = value.to(p.device, torch.float32).clone()
