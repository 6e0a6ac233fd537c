"""Configurations of the Triton kernels: tiles, warps, and stages of the software pipeline.

None spills registers on the chips that it is for, and each uses their matrix unit, except for float32 under "ieee",
which has none. `pytest correctness -m sweep -k compiles` compiles them all and prints the registers and shared memory
of each.
"""

from __future__ import annotations

from typing import Any

import triton
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

HALF = "half"
"""Arithmetic of 16-bit inputs; float32 has those of `EXACTER`."""

EXACTER = ("tf32", "tf32x3", "ieee")
"""Arithmetics of float32, from the least to the most accurate."""

CHIPS = (80, 90, 100)
"""Compute capabilities with their own tables: Ampere, Hopper, Blackwell."""

MAX_REGISTERS = 255
"""Most registers per thread."""

Tile = tuple[int, int, int, int]
"""BLOCK_M, BLOCK_N, warps, stages."""

Table = dict[str, dict[int, list[Tile]]]
"""Kernel -> most columns of a tile (the head dim, as a power of two) -> tiles to choose from."""

AMPERE_HALF: Table = {
    "attention_forward": {
        64: [(128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 3)],
        128: [(128, 64, 8, 3), (128, 32, 8, 3), (64, 32, 4, 3)],
    },
    "attention_backward_q": {
        64: [(128, 64, 8, 3), (128, 32, 8, 3), (64, 64, 4, 3)],
        128: [(64, 64, 8, 3), (128, 32, 8, 2), (64, 32, 4, 3)],
    },
    "attention_backward_kv": {
        64: [(32, 128, 8, 2), (64, 32, 8, 3), (32, 64, 4, 3)],
        128: [(32, 64, 8, 3), (64, 32, 8, 3)],
    },
}

HOPPER_HALF: Table = {
    "attention_forward": {
        64: [(128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 4, 3)],
        128: [(128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 3)],
    },
    "attention_backward_q": {
        64: [(128, 128, 8, 2), (128, 64, 8, 3), (64, 128, 4, 2)],
        128: [(128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3)],
    },
    "attention_backward_kv": {
        64: [(64, 128, 8, 3), (64, 128, 8, 2), (32, 128, 8, 3)],
        128: [(64, 64, 8, 2), (32, 128, 8, 2)],
    },
}

BLACKWELL_HALF: Table = {
    "attention_forward": {
        64: [(128, 128, 8, 2), (128, 128, 8, 3), (128, 64, 4, 3)],
        128: [(128, 128, 8, 2), (128, 64, 4, 3)],
    },
    "attention_backward_q": {
        64: [(128, 64, 8, 3), (128, 64, 4, 3), (64, 128, 4, 2)],
        128: [(128, 64, 8, 2), (128, 128, 8, 2), (64, 64, 4, 3)],
    },
    "attention_backward_kv": {64: [(64, 128, 8, 2), (32, 128, 8, 3)], 128: [(64, 64, 8, 2), (32, 64, 8, 2)]},
}

AMPERE_TF32: Table = {
    "attention_forward": {64: [(128, 64, 8, 2), (64, 64, 8, 2)], 128: [(64, 64, 8, 2), (64, 32, 8, 2)]},
    "attention_backward_q": {64: [(128, 32, 8, 2), (64, 32, 8, 2)], 128: [(64, 32, 8, 2), (64, 32, 8, 1)]},
    "attention_backward_kv": {64: [(16, 64, 8, 2), (32, 32, 8, 2)], 128: [(16, 64, 8, 2), (32, 32, 8, 2)]},
}

HOPPER_TF32: Table = {
    "attention_forward": {64: [(128, 64, 8, 2), (64, 64, 4, 2)], 128: [(128, 64, 8, 2), (64, 64, 8, 2)]},
    "attention_backward_q": {64: [(128, 64, 8, 2), (64, 64, 4, 2)], 128: [(64, 64, 8, 2), (64, 32, 8, 2)]},
    "attention_backward_kv": {
        64: [(64, 64, 8, 2), (32, 128, 8, 2), (32, 64, 4, 2)],
        128: [(32, 64, 8, 2), (16, 64, 8, 2)],
    },
}

BLACKWELL_TF32: Table = {
    "attention_forward": {64: [(128, 64, 8, 2), (64, 64, 4, 2)], 128: [(64, 64, 8, 2), (128, 32, 8, 2)]},
    "attention_backward_q": {64: [(128, 64, 8, 2), (64, 32, 4, 2)], 128: [(64, 32, 8, 2), (64, 32, 4, 2)]},
    "attention_backward_kv": {64: [(32, 64, 8, 2), (64, 64, 8, 1)], 128: [(32, 64, 8, 1), (16, 64, 8, 1)]},
}

AMPERE_TF32X3: Table = {
    "attention_forward": {64: [(64, 16, 4, 2), (64, 16, 8, 2)], 128: [(64, 16, 8, 2)]},
    "attention_backward_q": {64: [(64, 16, 8, 2), (64, 16, 4, 2)]},
    "attention_backward_kv": {64: [(16, 32, 8, 2), (16, 32, 8, 1)]},
}

HOPPER_TF32X3: Table = {
    "attention_forward": {64: [(128, 32, 8, 2), (64, 32, 4, 2)], 128: [(128, 32, 8, 2), (64, 32, 4, 2)]},
    "attention_backward_q": {64: [(64, 32, 4, 2), (64, 16, 8, 2)], 128: [(64, 16, 8, 2)]},
    "attention_backward_kv": {64: [(16, 64, 8, 2), (16, 64, 8, 1)]},
}

BLACKWELL_TF32X3: Table = {
    "attention_forward": {64: [(128, 32, 8, 2), (64, 32, 4, 2)], 128: [(64, 32, 4, 2), (64, 16, 8, 2)]},
    "attention_backward_q": {64: [(64, 32, 8, 2), (64, 16, 4, 2)], 128: [(64, 16, 8, 2), (64, 16, 4, 2)]},
    "attention_backward_kv": {64: [(32, 64, 8, 1), (16, 64, 8, 2)]},
}

AMPERE_IEEE: Table = {
    "attention_forward": {128: [(64, 16, 8, 2), (64, 16, 4, 2), (32, 32, 4, 2)]},
    "attention_backward_q": {64: [(64, 32, 8, 2), (32, 32, 8, 2)], 128: [(32, 32, 8, 2)]},
    "attention_backward_kv": {64: [(16, 64, 8, 2), (16, 32, 8, 2)], 128: [(16, 32, 8, 2)]},
}

HOPPER_IEEE: Table = {
    "attention_forward": {128: [(64, 16, 8, 2), (64, 16, 4, 2), (32, 32, 4, 2)]},
    "attention_backward_q": {64: [(64, 32, 8, 2), (64, 16, 8, 2)], 128: [(32, 32, 8, 2)]},
    "attention_backward_kv": {128: [(16, 64, 8, 2), (32, 32, 8, 2)]},
}

BLACKWELL_IEEE: Table = {
    "attention_forward": {128: [(64, 32, 8, 2), (32, 32, 4, 2)]},
    "attention_backward_q": {64: [(64, 32, 8, 2), (32, 32, 8, 2)], 128: [(32, 32, 8, 2)]},
    "attention_backward_kv": {128: [(16, 64, 8, 2), (32, 32, 8, 2)]},
}

TABLES: dict[int, dict[str, Table]] = {
    80: {HALF: AMPERE_HALF, "tf32": AMPERE_TF32, "tf32x3": AMPERE_TF32X3, "ieee": AMPERE_IEEE},
    90: {HALF: HOPPER_HALF, "tf32": HOPPER_TF32, "tf32x3": HOPPER_TF32X3, "ieee": HOPPER_IEEE},
    100: {HALF: BLACKWELL_HALF, "tf32": BLACKWELL_TF32, "tf32x3": BLACKWELL_TF32X3, "ieee": BLACKWELL_IEEE},
}


def tiles(kernel: str, arithmetic: str, chip: int, columns: int) -> list[Tile]:
    """Return the tiles that a kernel may use for that many columns; none if every choice would spill registers."""
    by_columns = TABLES[chip][arithmetic].get(kernel, {})
    return next((by_columns[most] for most in sorted(by_columns) if columns <= most), [])


def nearest_arithmetic(kernel: str, wanted: str, chip: int, columns: int) -> str:
    """`wanted`, or the next more accurate arithmetic for which the chip has tiles, as PyTorch's settings allow."""
    order = (HALF,) if wanted == HALF else EXACTER[EXACTER.index(wanted) :]
    return next(arithmetic for arithmetic in order if tiles(kernel, arithmetic, chip, columns))


def configuration(tile: Tile, arithmetic: str) -> triton.Config:
    """A tile as a configuration for Triton's autotuner."""
    block_m, block_n, warps, stages = tile
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n}
    # Where rows are loaded in chunks, ptxas would spill registers to fit a second block on the multiprocessor.
    registers = MAX_REGISTERS if arithmetic in ("ieee", "tf32x3") else None
    return triton.Config(blocks, num_warps=warps, num_stages=stages, maxnreg=registers, pre_hook=_set_rows)


def _set_rows(arguments: dict[str, Any]) -> None:
    """Set the number of rows of each tensor descriptor's tiles."""
    for name, x in arguments.items():
        if isinstance(x, TensorDescriptor):
            rows = arguments["BLOCK_N" if name[-1] in "kv" else "BLOCK_M"]  # k, v, grad_k, grad_v
            x.block_shape = [1, 1, rows, arguments["COLUMNS"]]


def prune(choices: list[triton.Config], positional: dict[str, Any], **arguments: Any) -> list[triton.Config]:
    """Return the configurations whose tiles fit in the device's shared memory, as others would fail to launch; if
    none fits, the smallest."""
    room = shared_memory(arguments["lse"].device.index)
    needed = [(tile_bytes(choice, arguments), choice) for choice in choices]
    return [choice for size, choice in needed if size <= room] or [min(needed, key=lambda pair: pair[0])[1]]


def shared_memory(device: int) -> int:
    """Bytes of shared memory that one block may use on a CUDA device."""
    return driver.active.utils.get_device_properties(device)["max_shared_mem"]


def tile_bytes(choice: triton.Config, arguments: dict[str, Any]) -> int:
    """Approximate bytes of shared memory of a configuration's tiles: resident ones, and those of each stage."""
    stay, stream = choice.kwargs["BLOCK_M"], choice.kwargs["BLOCK_N"]
    if "grad_k" in arguments:
        stay, stream = stream, stay
    staying = 1 if "grad_out" not in arguments else 2  # q; q and grad_out, or k and v
    rows = staying * stay + choice.num_stages * 2 * stream  # k and v are streamed, or q and grad_out
    q = arguments["q"]
    itemsize = (q.base if isinstance(q, TensorDescriptor) else q[0]).itemsize
    return rows * arguments["COLUMNS"] * itemsize
