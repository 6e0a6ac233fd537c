"""The table of tensors on the device that the fused AdamW's kernels read, and the launches of the kernels.

One launch covers all tensors of one kind, whatever their number and sizes: each program looks up its tensor, and which
chunk of it, in a map. Only what changed since the last step is copied to the device.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from impl.optim import triton_kernels

CHUNK = 8192
"""Elements that one program updates."""


class Configuration(NamedTuple):
    """Elements per block, elements per program's chunk (a multiple of the block), and warps per program."""

    block: int
    chunk: int
    warps: int


CONFIGURATIONS = (
    Configuration(block=1024, chunk=CHUNK, warps=4),
    Configuration(block=2048, chunk=CHUNK, warps=8),
    Configuration(block=2048, chunk=CHUNK, warps=4),
)
"""The first one runs: 8 elements per thread, so few registers that 7 blocks fit on an SM of Hopper. Their reads in
flight are several times what its memory needs. float64 would spill registers in the last one."""

ACCESS = 16
"""Bytes of the widest memory access; it needs addresses that are multiples of this."""

TRITON_DTYPES = {
    torch.float64: tl.float64,
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


Kind = tuple[torch.dtype, torch.dtype, torch.dtype, bool, bool]
"""Tensors of one kind share a launch. Fields: dtypes of parameter, gradient and state; has a master weight; is
aligned."""


@dataclass
class Operands:
    """The tensors of one step: the table's rows, one after another, and each tensor's kind and number of elements."""

    rows: list[int]
    kinds: list[Kind]
    counts: list[int]
    gradients: list[Tensor] = field(default_factory=list)
    """References to the gradients, some of them copies, which must live until the launch."""

    def add(self, grad: Tensor, written: list[Tensor], step: Tensor, has_master: bool, group: int) -> None:
        """Add a parameter: `written` is the parameter, its two moments and its master weight, if it has one."""
        p, m, v = written[:3]
        param_at, grad_at, m_at, v_at = p.data_ptr(), grad.data_ptr(), m.data_ptr(), v.data_ptr()
        master_at = written[3].data_ptr() if has_master else 0
        count = p.numel()
        self.rows += (param_at, grad_at, m_at, v_at, master_at, step.data_ptr(), count, group)
        aligned = (param_at | grad_at | m_at | v_at | master_at) % ACCESS == 0
        self.kinds.append((p.dtype, grad.dtype, m.dtype, has_master, aligned))
        self.counts.append(count)
        self.gradients.append(grad)


class Table:
    """The table and the map in device memory, for steps over tensors of the same kinds and sizes."""

    def __init__(self, operands: Operands, device: torch.device, configuration: Configuration) -> None:
        self.device, self.configuration = device, configuration
        self.kinds, self.counts = operands.kinds, operands.counts
        self.tensors = len(self.kinds)
        chunks = [triton.cdiv(count, configuration.chunk) for count in self.counts]
        order = sorted(range(self.tensors), key=lambda i: str(self.kinds[i]))
        self.launches: list[tuple[Kind, int, int]] = []
        """Kind, first program, number of programs."""
        self.programs = 0
        for kind, members in groupby(order, key=lambda i: self.kinds[i]):
            programs = sum(chunks[i] for i in members)
            if programs:
                self.launches.append((kind, self.programs, programs))
            self.programs += programs
        repeats = torch.tensor([chunks[i] for i in order])
        starts = repeats.cumsum(0) - repeats
        chunk_of = torch.arange(self.programs) - starts.repeat_interleave(repeats)
        tensor_of = torch.tensor(order).repeat_interleave(repeats)
        self.tensor_of, self.chunk_of = (_to_device(x.to(torch.int32), device) for x in (tensor_of, chunk_of))
        self.table = torch.empty(self.tensors, triton_kernels.COLUMNS.value, dtype=torch.int64, device=device)
        self.hyperparameters: Tensor | None = None
        self.scalars = torch.empty(self.tensors, triton_kernels.SCALARS.value, dtype=torch.float64, device=device)
        self.decision = torch.empty(2, dtype=torch.float64, device=device)
        self.partials: Tensor | None = None
        self._rows = array("q")
        self._hyperparameters: list[float] = []
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self._on_several_streams = False

    def fits(self, operands: Operands, configuration: Configuration) -> bool:
        """Return True if the map from programs to tensors is right for these tensors."""
        return (self.kinds, self.counts, self.configuration) == (operands.kinds, operands.counts, configuration)

    def fill(self, operands: Operands) -> None:
        """Copy the addresses to the device, if they changed since the last step."""
        rows = array("q", operands.rows)
        if rows != self._rows:
            self._rows = rows
            self._send_rows()

    def set_gradients(self, addresses: list[int]) -> None:
        """Replace the gradients' addresses."""
        self._rows[triton_kernels.GRAD.value :: triton_kernels.COLUMNS.value] = array("q", addresses)
        self._send_rows()

    def set(self, hyperparameters: list[float]) -> None:
        """Copy the hyperparameters to the device, if they changed since the last step."""
        if hyperparameters != self._hyperparameters:
            if len(hyperparameters) != len(self._hyperparameters):
                self.hyperparameters = torch.empty(len(hyperparameters), dtype=torch.float64, device=self.device)
            assert self.hyperparameters is not None
            self._hyperparameters = hyperparameters
            values = torch.frombuffer(array("d", hyperparameters), dtype=torch.float64)
            self.hyperparameters.copy_(_pinned(values, self.device), non_blocking=True)

    def _send_rows(self) -> None:
        # Overwrites the same table: stream order puts the copy after kernels that still read it.
        rows = torch.frombuffer(self._rows, dtype=torch.int64)
        self.table.view(-1).copy_(_pinned(rows, self.device), non_blocking=True)

    def _use_on_this_stream(self) -> None:
        """Have the allocator reuse the table's memory only after kernels on other streams have read it."""
        if self._stream is None:
            return
        stream = torch.cuda.current_stream(self.device)
        if self._on_several_streams or stream != self._stream:
            self._on_several_streams = True
            own = (self.table, self.tensor_of, self.chunk_of, self.scalars, self.decision)
            for x in (*own, self.hyperparameters, self.partials):
                if x is not None:
                    x.record_stream(stream)

    def run(self, clips: bool, grad_scale: Tensor | None, found_inf: Tensor | None) -> Tensor | None:
        """Launch the kernels. Returns the norm of the gradients if they are clipped, else None."""
        block, chunk, warps = self.configuration
        with torch.cuda.device_of(self.decision):  # Triton launches on the current device
            partials = grad_norm = None
            if clips:
                partials = self._norms()
                has_float64 = any(kind[0] == torch.float64 for kind in self.kinds)
                grad_norm = torch.empty((), dtype=torch.float64 if has_float64 else torch.float32, device=self.device)
            triton_kernels.prepare[(1,)](
                self.table,
                self.hyperparameters,
                self.scalars,
                self.decision,
                partials,
                grad_norm,
                _scalar_to(grad_scale, self.device),
                _scalar_to(found_inf, self.device),
                self.tensors,
                self.programs,
                TENSORS=256,
                PARTIALS=4096,
                num_warps=8,
            )
            for (param, grad, state, has_master, aligned), first, programs in self.launches:
                triton_kernels.update[(programs,)](
                    self.table,
                    self.tensor_of,
                    self.chunk_of,
                    self.scalars,
                    self.decision,
                    first,
                    PARAM_DTYPE=TRITON_DTYPES[param],
                    GRAD_DTYPE=TRITON_DTYPES[grad],
                    STATE_DTYPE=TRITON_DTYPES[state],
                    HAS_MASTER=has_master,
                    COMPUTE=_compute(param),
                    WIDTH=ACCESS // max(param.itemsize, grad.itemsize, state.itemsize) if aligned else 1,
                    BLOCK=block,
                    CHUNK=chunk,
                    BY_HAND=bool(knobs.runtime.interpret),
                    num_warps=warps,
                )
            self._use_on_this_stream()
        return grad_norm

    def _norms(self) -> Tensor:
        """Launch the kernel that computes each program's sum of squared gradients."""
        if self.partials is None:
            self.partials = torch.empty(self.programs, dtype=torch.float64, device=self.device)
        block, chunk, warps = self.configuration
        for (param, grad, _, _, aligned), first, programs in self.launches:
            triton_kernels.squared_norms[(programs,)](
                self.table,
                self.tensor_of,
                self.chunk_of,
                self.partials,
                first,
                GRAD_DTYPE=TRITON_DTYPES[grad],
                COMPUTE=_compute(param),
                WIDTH=ACCESS // grad.itemsize if aligned else 1,
                BLOCK=block,
                CHUNK=chunk,
                num_warps=warps,
            )
        return self.partials


def _compute(param: torch.dtype) -> Any:
    return tl.float64 if param == torch.float64 else tl.float32


def _to_device(values: Tensor, device: torch.device) -> Tensor:
    """A copy on the device; the host does not wait for it."""
    return _pinned(values, device).to(device, non_blocking=True)


def _pinned(values: Tensor, device: torch.device) -> Tensor:
    """The values in pinned memory, which torch does not reuse before the copy from it is done; unchanged for CPU."""
    return values.pin_memory() if device.type == "cuda" else values


def _scalar_to(scalar: Tensor | None, device: torch.device) -> Tensor | None:
    return None if scalar is None else scalar.to(device, non_blocking=True)
