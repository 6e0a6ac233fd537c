"""Right AdamWs that work in unusual ways: the tests must accept them."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from correctness.optim.simple_adamw import Clipping, Master, Simple, State
from correctness.support.planting import right


@right("a function that makes torch's own")
def torchs(params: Any, lr: float = 1e-3, **arguments: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr, **arguments)


@right("the paper's formulas in another order, and the step count a Python int")
class Rearranged(Simple):
    def state_of(self, p: Tensor) -> State:
        state = super().state_of(p)
        state["step"] = int(state["step"])
        return state

    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        beta1, beta2 = group["betas"]
        m = state["exp_avg"] = beta1 * state["exp_avg"] + (1 - beta1) * grad
        v = state["exp_avg_sq"] = state["exp_avg_sq"] + (1 - beta2) * (grad**2 - state["exp_avg_sq"])
        root = (1 - beta2**t) ** 0.5
        update = m / (v.sqrt() + group["eps"] * root) * (root / (1 - beta1**t))
        p.sub_(group["lr"] * (update + group["weight_decay"] * p))


@right("state from the start, also of parameters that never step, and more of it than was asked for")
class EagerState(Simple):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        for group in self.param_groups:
            for p in group["params"]:
                self.state_of(p)

    def state_of(self, p: Tensor) -> State:
        state = super().state_of(p)
        state.setdefault("largest", torch.zeros_like(p))
        return state

    def move(self, p: Tensor, grad: Tensor, state: State, group: State, t: float) -> None:
        super().move(p, grad, state, group, t)
        torch.maximum(state["largest"], grad.abs(), out=state["largest"])


@right("moments of each group in one flat buffer; the state is views of it")
class FlatMoments(Simple):
    def update_all(self) -> None:
        for group in self.param_groups:
            some = [p for p in group["params"] if p.grad is not None]
            kinds: dict[Any, list[Tensor]] = {}
            for p in some:
                kinds.setdefault((p.dtype, self._count(p)), []).append(p)
            for (_, t), params in kinds.items():
                self._update(params, group, t + 1)

    def _count(self, p: Tensor) -> float:
        return float(self.state.get(p, {}).get("step", 0))

    def _update(self, params: list[Tensor], group: State, t: float) -> None:
        states = [self.state_of(p) for p in params]
        flat, grad = (torch.cat([x.reshape(-1) for x in xs]) for xs in (params, [p.grad for p in params]))
        moments = {k: torch.cat([state[k].reshape(-1) for state in states]) for k in ("exp_avg", "exp_avg_sq")}
        self.move(flat, grad, moments, group, t)
        at = 0
        for p, state in zip(params, states, strict=True):
            part = slice(at, at + p.numel())
            p.copy_(flat[part].view(p.shape))
            state.update({k: x[part].view(p.shape) for k, x in moments.items()})
            state["step"] = torch.tensor(t, dtype=torch.float32)
            at += p.numel()


@right("powers of the betas accumulated, in Python, beside the state")
class AccumulatedPowers(Simple):
    def update(self, p: Tensor, grad: Tensor, group: State) -> None:
        state = self.state_of(p)
        powers = self.__dict__.setdefault("powers", {})
        step, betas, *old = powers.get(p, (None, None))
        if (step, betas) != (float(state["step"]), group["betas"]):  # the first step, or another state
            old = [beta ** float(state["step"]) for beta in group["betas"]]
        state["step"] += 1
        power1, power2 = new = [power * beta for power, beta in zip(old, group["betas"], strict=True)]
        powers[p] = (float(state["step"]), group["betas"], *new)
        m, v = state["exp_avg"], state["exp_avg_sq"]
        beta1, beta2 = group["betas"]
        m.mul_(beta1).add_(grad, alpha=1 - beta1)
        v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.addcdiv_(m / (1 - power1), (v / (1 - power2)).sqrt() + group["eps"], value=-group["lr"])


@right("clips by one norm of all gradients' elements together")
class OneNorm(Clipping):
    def norm(self, grads: list[Tensor]) -> Tensor:
        wide = torch.promote_types(grads[0].dtype, torch.float32)
        return torch.cat([g.to(wide).reshape(-1) for g in grads]).norm()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        self.grad_norm = None
        return super().step(closure)


@right("master weights, in the plainest way")
class Plain32(Master):
    pass
