"""Optimizers of the random histories: torch's, and some with unusual state."""

from copy import deepcopy
from typing import Any

import torch
from torch import Tensor

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "sgd": (torch.optim.SGD, {"lr": 0.1}),
    "momentum": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1, "nesterov": True}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True, "fused": True}),
    "adagrad": (torch.optim.Adagrad, {"lr": 0.05, "initial_accumulator_value": 0.3}),
}


class Heavy(torch.optim.Optimizer):
    """Keeps `copies` tensors of each parameter's shape."""

    def __init__(self, params: Any, lr: float = 0.1, copies: int = 10) -> None:
        super().__init__(params, {"lr": lr, "copies": copies})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    for i in range(group["copies"]):
                        state.setdefault(f"copy_{i}", torch.zeros_like(p)).add_(p.grad)
                    p.sub_(state["copy_0"], alpha=group["lr"])
        return loss


class Counting(torch.optim.Optimizer):
    """The state has an int, a str, a tensor without dimensions and a tensor of the parameter's shape. A step takes no
    closure, as of optimizers that people write for themselves."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state.update(steps=0, phase="odd", rate=torch.ones((), dtype=p.dtype), sum=torch.zeros_like(p))
                state["steps"] += 1
                state["phase"] = "odd" if state["steps"] % 2 else "even"
                state["rate"] = state["rate"] * (0.5 if state["phase"] == "even" else 0.9)
                state["sum"] += p.grad
                p.sub_(group["lr"] * state["rate"].item() / state["steps"] * state["sum"])


class CountingInGroups(torch.optim.Optimizer):
    """Counts steps in its param groups, as fused Adams of libraries do, and shrinks its rate by them."""

    def __init__(self, params: Any, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in (p for p in group["params"] if p.grad is not None):
                total = self.state[p].setdefault("sum", torch.zeros_like(p)).add_(p.grad)
                p.sub_(group["lr"] / group["step"] * (total + group["weight_decay"] * p))


class Wide(torch.optim.Optimizer):
    """Float64 weights and sums and an int64 count of nonzero gradients, for any parameter dtype. Its `load_state_dict`
    keeps these dtypes; torch's own would cast floating tensors to the parameter's."""

    def __init__(self, params: Any, lr: float, momentum: float = 0.9, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = None if closure is None else closure()
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    weight = p.double()
                    state.update(weight=weight.clone(), sum=torch.zeros_like(weight), seen=torch.zeros_like(p).long())
                grad = p.grad.double() + group["weight_decay"] * state["weight"]
                state["sum"].mul_(group["momentum"]).add_(grad)
                state["seen"] += p.grad != 0
                state["weight"] -= group["lr"] * state["sum"]
                p.copy_(state["weight"])
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        ids = [i for group in state_dict["param_groups"] for i in group["params"]]
        for i, p in zip(ids, (p for group in self.param_groups for p in group["params"]), strict=True):
            for name, value in state_dict["state"].get(i, {}).items():
                self.state[p][name] = value.to(p.device, copy=True) if isinstance(value, Tensor) else deepcopy(value)
