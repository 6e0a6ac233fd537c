"""Tensor parallelism: each rank of `tp` has a part of every matrix, and does its part of every product.

    mesh = init_device_mesh("cuda", (8,), mesh_dim_names=("tp",))
    model = parallelize_sequence(model, mesh)
    model(tokens, positions, targets).backward()

`plain` sums the ranks' products with an all-reduce. `sequence` scatters the sums, so that norms and what they leave for
backward are a slice of the tokens; `hidden` does the same in chunks, of which one is sent while the next is multiplied.
`library` and `library_sequence` are PyTorch's own.
"""

from __future__ import annotations

from impl.tensor_parallel.contract import TOKENS, Parallelize
from impl.tensor_parallel.decoder import Products, TensorParallelDecoder

# Implementations register in this order, the reference first, which is the order in every list and table.
# isort: off
from impl.tensor_parallel.plain import Plain, parallelize_plain
from impl.tensor_parallel.sequence import Sliced, parallelize_sequence
from impl.tensor_parallel.hidden import parallelize_hidden
from impl.tensor_parallel.library import parallelize_by_torch
from impl.tensor_parallel.library_sequence import parallelize_sequence_by_torch
# isort: on

__all__ = [
    "TOKENS",
    "Parallelize",
    "Plain",
    "Products",
    "Sliced",
    "TensorParallelDecoder",
    "parallelize_by_torch",
    "parallelize_hidden",
    "parallelize_plain",
    "parallelize_sequence",
    "parallelize_sequence_by_torch",
]
