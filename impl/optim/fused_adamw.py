"""AdamW in one pass over parameters, gradients and both moments: one launch of a Triton kernel for all parameters.

It moves 28 bytes for each float32 parameter: it reads parameter, gradient and moments, and writes parameter and
moments. The addresses of all tensors are in a table on the device (`multi_tensor`), which the kernels read
(`triton_kernels`). On CPU they run in Triton's interpreter (TRITON_INTERPRET=1), for correctness only.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from impl.interpreting import requires_no_interpreter, requires_triton
from impl.optim.accounting import fused_triton_peak
from impl.optim.base import MASTER, AdamWBase, dense_gradient
from impl.optim.multi_tensor import ACCESS, CHUNK, CONFIGURATIONS, Configuration, Operands, Table
from shardmark.api import Race, Unsupported, register


class FusedAdamW(AdamWBase):
    """`FusedAdamW(params, lr, betas, eps, weight_decay, max_grad_norm=None, master_weights=False)`.

    Contract and errors: `impl.optim.Optimizer`; Unsupported on a device that Triton does not run on. Arithmetic is in
    float32, for float64 parameters in float64. Moments have the parameter's dtype, with `master_weights` float32. Bytes
    moved for each parameter: 28 in float32; 14 in bfloat16, and 28 with master weights (gradient 2, master weight and
    moments 12 read and 12 written, parameter 2 written).

    Clipping writes no gradients: a kernel reads each once for the norm (4 more bytes in float32, where
    `clip_grad_norm_` before a step moves 12 more), and the update scales them when it reads them again. The host never
    waits for the device: step counts are there, a kernel decides there to skip a step whose norm is not finite, and
    addresses and hyperparameters are copied from pinned memory.

    Unsupported under CUDA graph capture: a graph would always use the addresses and hyperparameters of that one step.

    `torch.amp.GradScaler` sets `grad_scale` and `found_inf`, and the kernels unscale and skip. Parameters and gradients
    that are not dense, or have different strides, are copied for the step.
    """

    steps_on_device = True
    _step_supports_amp_scaling = True

    configuration: ClassVar[Configuration] = CONFIGURATIONS[0]
    _table: Table | None = None
    _in_table: _Snapshot | None = None
    """Snapshot of the tensors that the table's addresses point to; None if some point to copies."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise Unsupported(
                "fused_triton is not captured in a CUDA graph: it would keep this step's lr and addresses"
            )
        loss = self.evaluate(closure)
        copied: list[tuple[Tensor, Tensor]] = []
        if self._table is None or not self._is_current(self._table):
            operands, copied = self._operands()
            if not operands.rows:
                self.grad_norm = None
                return loss
            if self._table is None or not self._table.fits(operands, self.configuration):
                self._table = Table(operands, operands.gradients[0].device, self.configuration)
            self._table.fill(operands)
            self._in_table = None if copied else self._snapshot()
        self._table.set(self._hyperparameters())
        scaler = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        self.grad_norm = self._table.run(self.max_grad_norm is not None, *scaler)
        for original, copy in copied:
            original.copy_(copy)
        return loss

    def _operands(self) -> tuple[Operands, list[tuple[Tensor, Tensor]]]:
        """Return the tensors that the kernels read and write, and (original, copy) for each written copy."""
        operands, copied = Operands([], [], []), []
        for index, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = dense_gradient(p), self.state_of(p)
                has_master = self.has_master(p)
                written = [p, state["exp_avg"], state["exp_avg_sq"], *([state[MASTER]] if has_master else [])]
                if not (grad.is_contiguous() and all(x.is_contiguous() for x in written)):
                    grad, written, copies = _with_equal_strides(grad, written)
                    copied += copies
                operands.add(grad, written, state["step"], has_master, index)
        return operands, copied

    def _is_current(self, table: Table) -> bool:
        """Return True if the table's addresses are current. Writes new addresses of gradients into it."""
        before, now = self._in_table, self._snapshot()
        if before is None or now is None or now.others != before.others:
            return False
        if now.gradients != before.gradients:
            if _misaligned(now.gradients) != _misaligned(before.gradients):
                return False  # they need other kernels
            table.set_gradients(now.gradients)
            self._in_table = now
        return True

    def _snapshot(self) -> _Snapshot | None:
        """Addresses and identities of all tensors, in lists that compare fast; None if the table needs copies."""
        params = [p for group in self.param_groups for p in group["params"]]
        tensors = [*params, *chain.from_iterable(map(dict.values, self.state.values()))]
        grads = [p.grad for p in params]
        has_grad = [grad is not None for grad in grads]
        if not all(has_grad):
            grads = [grad for grad in grads if grad is not None]
        try:
            if not (all(map(Tensor.is_contiguous, params)) and all(map(Tensor.is_contiguous, grads))):
                return None
            gradients, addresses = list(map(Tensor.data_ptr, grads)), list(map(Tensor.data_ptr, tensors))
        # a sparse gradient, which raises later; or state that is no tensor, which is ignored
        except (RuntimeError, TypeError):
            return None
        identities = [*map(id, tensors), *map(id, self.state)]
        groups = [len(group["params"]) for group in self.param_groups]
        dtypes = [grad.dtype for grad in grads]
        return _Snapshot(
            (addresses, identities, has_grad, dtypes, groups, self.master_weights, self.configuration), gradients
        )

    def _hyperparameters(self) -> list[float]:
        """Hyperparameters in the order in which the kernel `prepare` reads them."""
        rows = [x for g in self.param_groups for x in (g["lr"], *g["betas"], g["eps"], g["weight_decay"])]
        return [self.max_grad_norm or 0.0, *rows]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._in_table = None

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        for p in group["params"]:
            if p.device.type != "cuda" and not (p.device.type == "cpu" and knobs.runtime.interpret):
                raise Unsupported(
                    f"fused_triton takes parameters on CUDA, or on CPU with TRITON_INTERPRET=1, got {p.device}"
                )


class _Snapshot(NamedTuple):
    """Addresses of the gradients; and of all else, addresses, identities, dtypes and settings.

    It holds no tensors, so state that a user removes is freed. A tensor with other strides that got both the address
    and the `id` of a freed one would be mistaken for it. That could happen after loading state, which therefore
    discards the snapshot.
    """

    others: tuple[Any, ...]
    gradients: list[int]


def _misaligned(addresses: list[int]) -> list[int]:
    return [i for i, address in enumerate(addresses) if address % ACCESS]


def _with_equal_strides(
    grad: Tensor, written: list[Tensor]
) -> tuple[Tensor, list[Tensor], list[tuple[Tensor, Tensor]]]:
    """Return the tensors, made contiguous unless they are dense with equal strides; and (original, copy) of those
    written."""
    if len({x.stride() for x in (grad, *written)}) == 1 and _is_dense(grad):
        return grad, written, []
    dense = [x.contiguous() for x in written]
    return grad.contiguous(), dense, [(x, y) for x, y in zip(written, dense, strict=True) if x is not y]


def _is_dense(x: Tensor) -> bool:
    """True if the elements of `x`, in some order of its dimensions, fill a block of memory without gaps or overlap."""
    step = 1
    for stride, size in sorted(zip(x.stride(), x.shape, strict=True)):
        if size > 1 and stride != step:
            return False
        step *= size
    return True


register(
    "optimizer",
    "fused_triton",
    FusedAdamW,
    memory=partial(fused_triton_peak, chunk=CHUNK),
    time=Race("torch_fused"),
    requires=(requires_triton,),
    requires_to_measure=(requires_no_interpreter,),
    called="the fused AdamW in Triton",
)
