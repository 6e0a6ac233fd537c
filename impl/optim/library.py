"""torch's own AdamW: its for-loop, its foreach and its fused implementation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from impl.optim import accounting
from impl.optim.base import MASTER, MasterWeights
from shardmark.api import Race, register


def _without_hooks(step: Callable[..., Any]) -> Callable[..., Any]:
    """PyTorch wraps `step` of each class that is instantiated, to run hooks, which the subclass's step runs already."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


class _TorchAdamW(MasterWeights, torch.optim.AdamW):
    """`torch.optim.AdamW`, with an option `master_weights` that torch does not have.

    The option is made of torch's operators: gradients are cast to float32, torch's step runs on the master weights, and
    one more pass writes the parameters. It is right, but does not show how fast torch could be. So only without master
    weights does a comparison of times with it mean something.
    """

    kind: ClassVar[dict[str, bool]]

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        master_weights: bool = False,
    ) -> None:
        self.master_weights = master_weights
        super().__init__(params, lr, betas, eps, weight_decay, **self.kind)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for group in self.param_groups:  # loaded state may come from another implementation
            group.update(self.kind)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = _without_hooks(torch.optim.AdamW.step)(self, closure)
        updated = [
            (p, self.state[p][MASTER])
            for group in self.param_groups
            for p in group["params"]
            if p.grad is not None and self.has_master(p)
        ]
        if updated:
            torch._foreach_copy_([p for p, _ in updated], [master for _, master in updated])
        return loss

    def _init_group(self, group: dict[str, Any], params: list[Tensor], grads: list[Tensor], *state: Any) -> bool:
        """List tensors to update as torch's does, but with master weights in place of their parameters."""
        for p in group["params"]:
            if p.grad is not None and self.has_master(p):
                own = self.state_of(p)
                if getattr(self, "found_inf", None) is not None:  # an earlier step may have been skipped
                    own[MASTER].copy_(torch.where(own["step"] == 0, p, own[MASTER]))
        has_complex = super()._init_group(group, params, grads, *state)
        for i, p in enumerate(params):
            if self.has_master(p):
                params[i], grads[i] = self.state[p][MASTER], grads[i].float()
        return has_complex


class TorchForLoop(_TorchAdamW):
    """`torch.optim.AdamW(..., foreach=False, fused=False)`: one parameter after another."""

    kind: ClassVar = {"foreach": False, "fused": False}
    steps_on_device = False


class TorchForeach(_TorchAdamW):
    """`torch.optim.AdamW(..., foreach=True)`: each operation for all parameters at once."""

    kind: ClassVar = {"foreach": True, "fused": False}
    steps_on_device = False


class TorchFused(_TorchAdamW):
    """`torch.optim.AdamW(..., fused=True)`: all operations in one kernel over many parameters."""

    kind: ClassVar = {"foreach": False, "fused": True}
    steps_on_device = True


for _name, _called, _target, _memory in (
    ("torch_forloop", "PyTorch's AdamW in a loop", TorchForLoop, accounting.torch_forloop_peak),
    ("torch_foreach", "PyTorch's foreach AdamW", TorchForeach, accounting.torch_foreach_peak),
    ("torch_fused", "PyTorch's fused AdamW", TorchFused, accounting.torch_fused_peak),
):
    register("optimizer", _name, _target, memory=_memory, time=Race("torch_fused"), tested_briefly=True, called=_called)
