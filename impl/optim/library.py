"""AdamW as torch ships it: its for-loop, its foreach and its fused implementation, each pinned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor

from impl.optim import accounting
from impl.optim.base import MASTER, MasterWeights
from shardmark.registry import Race, register


class _TorchAdamW(MasterWeights, torch.optim.AdamW):
    """`torch.optim.AdamW`; with `master_weights` it runs on float32 copies, which torch's own has no option for.

    That option is put together here, of what torch has: each gradient is first made float32, then torch steps on the
    copies, then another pass writes the parameters. It is right, and no measure of how fast torch could be: to be
    faster than it tells something for parameters without master weights alone.
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
        for group in self.param_groups:  # loaded state says how it was made, and that may be another way
            group.update(self.kind)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """torch's step, and where there are master weights, parameters made of them."""
        loss = super().step(closure)
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
        """torch's list of what to update, with master weights in the place of their parameters."""
        for p in group["params"]:
            if p.grad is not None and self.has_master(p):
                self.state_of(p)
        has_complex = super()._init_group(group, params, grads, *state)
        for i, p in enumerate(params):
            if self.has_master(p):
                params[i], grads[i] = self.state[p][MASTER], grads[i].float()
        return has_complex


class TorchForLoop(_TorchAdamW):
    """`torch.optim.AdamW(..., foreach=False)`: one parameter after another."""

    kind: ClassVar = {"foreach": False, "fused": False}
    steps_on_device = False


class TorchForeach(_TorchAdamW):
    """`torch.optim.AdamW(..., foreach=True)`: each operation over all parameters at once."""

    kind: ClassVar = {"foreach": True, "fused": False}
    steps_on_device = False


class TorchFused(_TorchAdamW):
    """`torch.optim.AdamW(..., fused=True)`: all operations in one kernel over many parameters."""

    kind: ClassVar = {"foreach": False, "fused": True}
    steps_on_device = True


for _name, _target, _memory in (
    ("torch_forloop", TorchForLoop, accounting.torch_forloop_peak),
    ("torch_foreach", TorchForeach, accounting.torch_foreach_peak),
    ("torch_fused", TorchFused, accounting.torch_fused_peak),
):
    register("optimizer", _name, _target, memory=_memory, time=Race("torch_fused"))
