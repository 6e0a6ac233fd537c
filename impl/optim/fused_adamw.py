"""AdamW in one pass over parameters, gradients and both moments, all parameters in one launch of a Triton kernel.

28 bytes for each float32 parameter: parameter, gradient and moments read, parameter and moments written. The kernels
are in `triton_kernels`, and their launches in `multi_tensor`. On CPU they run in Triton's
interpreter (TRITON_INTERPRET=1), for correctness alone.
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
from shardmark.registry import Race, Unsupported, register


class FusedAdamW(AdamWBase):
    """`FusedAdamW(params, lr, betas, eps, weight_decay, max_grad_norm=None, master_weights=False)`.

    Contract and errors: `impl.optim.Optimizer`; Unsupported on a device that Triton does not run on. Arithmetic is in
    float32, of float64 parameters in float64; moments are in the parameter's dtype, with `master_weights` in float32.
    Bytes moved for each parameter: 28 in float32; 14 in bfloat16, and 28 with master weights (gradient 2, master weight
    and moments read 12 and written 12, parameter written 2).

    Clipping writes nothing: a kernel of its own reads each gradient once for the norm (4 bytes more in float32, where
    `clip_grad_norm_` and a step move 12 more), and the update scales them as it reads them again. Nothing waits for the
    device: step counts lie there, and so does the decision to skip a step whose norm is not finite; what is sent, be it
    for a first step or for other gradients than the last one's, is sent from pinned memory.

    A step is Unsupported under CUDA graph capture, which would keep the addresses and hyperparameters of that one step.

    `torch.amp.GradScaler` leaves unscaling and skipping to it (`grad_scale` and `found_inf`, which it sets). Parameters
    and gradients that are not dense, or not laid out alike, are copied for the step.
    """

    steps_on_device = True
    _step_supports_amp_scaling = True

    configuration: ClassVar[Configuration] = CONFIGURATIONS[0]
    _table: Table | None = None
    _seen: _Seen | None = None
    """What the table holds, where it holds addresses of no copies."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient; returns what `closure` does."""
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise Unsupported(
                "fused_triton is not captured in a CUDA graph: it would keep this step's lr and addresses"
            )
        loss = self.evaluate(closure)
        copied: list[tuple[Tensor, Tensor]] = []
        if self._table is None or not self._is_in(self._table):
            operands, copied = self._operands()
            if not operands.rows:
                self.grad_norm = None
                return loss
            if self._table is None or not self._table.fits(operands, self.configuration):
                self._table = Table(operands, operands.keep[0].device, self.configuration)
            self._table.fill(operands)
            self._seen = None if copied else self._look()
        self._table.set(self._hyperparameters())
        scaler = (getattr(self, name, None) for name in ("grad_scale", "found_inf"))
        self.grad_norm = self._table.run(self.max_grad_norm is not None, *scaler)
        for original, copy in copied:
            original.copy_(copy)
        return loss

    def _operands(self) -> tuple[Operands, list[tuple[Tensor, Tensor]]]:
        """What the kernels work on, and of it what is a copy: (original, copy)."""
        operands, copied = Operands([], [], []), []
        for index, group in enumerate(self.param_groups):
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad, state = dense_gradient(p), self.state_of(p)
                has_master = self.has_master(p)
                written = [p, state["exp_avg"], state["exp_avg_sq"], *([state[MASTER]] if has_master else [])]
                if not (grad.is_contiguous() and all(x.is_contiguous() for x in written)):
                    grad, written, copies = _laid_out_alike(grad, written)
                    copied += copies
                operands.add(grad, written, state["step"], has_master, index)
        return operands, copied

    def _is_in(self, table: Table) -> bool:
        """Whether all is where the table says; where gradients alone have moved, it is told so."""
        before, now = self._seen, self._look()
        if before is None or now is None or now.kept != before.kept:
            return False
        if now.gradients != before.gradients:
            if _misaligned(now.gradients) != _misaligned(before.gradients):
                return False  # of another kind
            table.move_gradients(now.gradients)
            self._seen = now
        return True

    def _look(self) -> _Seen | None:
        """What there is, as lists that are made and compared in one go: a step on a fast device waits for this."""
        params = [p for group in self.param_groups for p in group["params"]]
        kept = [*params, *chain.from_iterable(map(dict.values, self.state.values()))]
        grads = [p.grad for p in params]
        has_grad = [grad is not None for grad in grads]
        if not all(has_grad):
            grads = [grad for grad in grads if grad is not None]
        try:
            if not (all(map(Tensor.is_contiguous, params)) and all(map(Tensor.is_contiguous, grads))):
                return None
            gradients, addresses = list(map(Tensor.data_ptr, grads)), list(map(Tensor.data_ptr, kept))
        except (RuntimeError, TypeError):  # a sparse gradient, or state that is no tensor: said, or passed over, later
            return None
        identities = [*map(id, kept), *map(id, self.state)]
        groups = [len(group["params"]) for group in self.param_groups]
        dtypes = [grad.dtype for grad in grads]
        return _Seen(
            (addresses, identities, has_grad, dtypes, groups, self.master_weights, self.configuration), gradients
        )

    def _hyperparameters(self) -> list[float]:
        """As `prepare` reads them."""
        rows = [x for g in self.param_groups for x in (g["lr"], *g["betas"], g["eps"], g["weight_decay"])]
        return [self.max_grad_norm or 0.0, *rows]

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._seen = None

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        for p in group["params"]:
            if p.device.type != "cuda" and not (p.device.type == "cpu" and knobs.runtime.interpret):
                raise Unsupported(
                    f"fused_triton takes parameters on CUDA, or on CPU with TRITON_INTERPRET=1, got {p.device}"
                )


class _Seen(NamedTuple):
    """Contiguous parameters and gradients, and all state, as they are at a step.

    State is known by address and identity together, and is not kept by it: who takes it away frees it. Only a tensor of
    another layout that took a freed one's place, in memory and as an object, would be taken for that; loading state,
    after which that might be, forgets what was seen.
    """

    kept: tuple[Any, ...]
    gradients: list[int]


def _misaligned(addresses: list[int]) -> list[int]:
    return [i for i, address in enumerate(addresses) if address % ACCESS]


def _laid_out_alike(grad: Tensor, written: list[Tensor]) -> tuple[Tensor, list[Tensor], list[tuple[Tensor, Tensor]]]:
    """All as they are where they are dense and of the same strides, else contiguous; what of the written is a copy."""
    if len({x.stride() for x in (grad, *written)}) == 1 and _is_dense(grad):
        return grad, written, []
    dense = [x.contiguous() for x in written]
    return grad.contiguous(), dense, [(x, y) for x, y in zip(written, dense, strict=True) if x is not y]


def _is_dense(x: Tensor) -> bool:
    """Whether the elements of `x` are all there is from its first to its last, each once."""
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
)
