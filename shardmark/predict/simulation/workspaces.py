"""Workspaces of CUDA's libraries and kernels: cuBLAS's, and those that single kernels take as they run.

The single kernels counted are PyTorch's softmax and sums, and attention's backward (Dao, "FlashAttention-2", 2023).
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.autograd.profiler import record_function

from shardmark.meter.hardware import Hardware
from shardmark.meter.recording import mark
from shardmark.predict.simulation.streams import ALL_AWAITED_AS_KERNELS_LOAD

_PRODUCTS = {f"aten::{name}" for name in ("mm", "bmm", "addmm", "baddbmm", "addmv", "mv", "dot")}
"""Operators that cuBLAS computes."""


class Workspaces:
    """Workspaces that libraries and kernels take on that hardware."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._of_thread: dict[bool, Tensor] = {}

    def take(self, operator: OpOverload, args: tuple[Any, ...]) -> None:
        """Take the operator's workspace and give it back.

        cuBLAS's workspace is kept: forward's thread has one, and so has the engine's, which runs backward. Kernels of
        cuBLAS are loaded with it, for which "context synchronization" may be required (CUDA C++ Programming Guide,
        "Lazy Loading").
        """
        name = operator._schema.name
        in_backward = torch._C._current_graph_task_id() != -1
        of_blas = name.rstrip("_") in _PRODUCTS and in_backward not in self._of_thread
        within = [nbytes for nbytes in _within(operator, args, self._hardware) if nbytes]
        if of_blas or within:
            with record_function(name):  # the recording may name no operators
                if of_blas:
                    mark(ALL_AWAITED_AS_KERNELS_LOAD)
                    self._of_thread[in_backward] = _bytes(self._hardware.blas_workspace_bytes)
                held = [_bytes(nbytes) for nbytes in within]
                del held  # within the range, by which the meter knows that these are workspace

    def give_back(self, device: str) -> None:
        """Free cuBLAS's workspaces."""
        self._of_thread.clear()


def _bytes(count: int) -> Tensor:
    return torch.empty(count, dtype=torch.uint8, device="cpu")


def _within(operator: OpOverload, args: tuple[Any, ...], hardware: Hardware) -> list[int]:
    """Bytes that a kernel takes as it runs: softmax's and attention's backward for the product of gradient and output,
    in half precision also for the gradient of q, which is summed up in float32; sums for their parts.
    """
    match operator._schema.name.removeprefix("aten::"):
        case "_softmax_backward_data":
            return [args[0].nbytes]
        case "_scaled_dot_product_efficient_attention_backward":
            return [4 * prod(args[1].shape[:3])]
        case "_scaled_dot_product_flash_attention_backward":
            batch, heads, length, width = args[1].shape
            rows = -(-length // 128) * 128
            # With grouped queries, the gradients of k and v are made for each head of q and then summed up.
            keys = batch * heads * args[2].size(2) * width * args[2].element_size() if args[2].size(1) != heads else 0
            return [4 * batch * heads * rows, 4 * batch * heads * rows * (-(-width // 32) * 32), keys, keys]
        case "sum" | "mean" if len(args) > 1 and args[1]:
            return [sum_of_columns(args[0], args[1], hardware)]
    return []


MOST_THREADS, WARP, VECTOR = 512, 32, 4
"""Threads of a block that sums, threads of a warp, and neighbouring outputs of a thread."""
FEWEST_VALUES, MOST_VALUES = 16, 256
"""Values that a thread sums where more than one block works on an output."""


def sum_of_columns(x: Tensor, dims: list[int], hardware: Hardware) -> int:
    """Bytes of the partial sums where a matrix is summed over its rows, as for the gradient of a bias, and several
    blocks work on each output (PyTorch's Reduce.cuh); 0 for other sums, whose partial sums take a few bytes.
    """
    if x.dim() == 0 or x.numel() == 0:
        return 0
    summed = {dim % x.dim() for dim in dims}
    if not x.is_contiguous() or summed != set(range(len(summed))) or len(summed) == x.dim():
        return 0
    rows, columns = prod(x.shape[: len(summed)]), prod(x.shape[len(summed) :])
    vector = next(size for size in (VECTOR, 2, 1) if columns % size == 0)
    threads = MOST_THREADS // vector
    wide, high = _power_of_2(columns // vector), _power_of_2(rows)
    width = min(wide, WARP)
    height = min(high, threads // width)
    width = min(wide, threads // height)
    values = rows if rows < min(16 * height, MOST_VALUES) else -(-rows // height)
    grid = -(-(columns // vector) // width)
    at_once = hardware.sm_count * (hardware.threads_per_sm // (width * height))
    if values == rows or values < MOST_VALUES or grid > at_once:
        return 0
    blocks = max(min(-(-at_once // grid), -(-values // FEWEST_VALUES)), -(-values // MOST_VALUES))
    accumulator = max(4, x.element_size())
    return accumulator * columns * blocks * width * vector if blocks > 1 else 0


def _power_of_2(number: int) -> int:
    """The largest power of 2 up to the number."""
    return 1 << (number.bit_length() - 1)
