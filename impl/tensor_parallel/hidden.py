"""Sequence parallelism in chunks: while one chunk of the tokens is multiplied, the next is gathered, and the sums of
the one before are scattered (Wang et al., "Overlap Communication with Dependent Computation via Decomposition in Large
Deep Learning Models", 2023)."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from impl.mesh.decoder import Decoder
from impl.tensor_parallel.sequence import sliced
from shardmark.api import Race, register

CHUNKS = 4


def parallelize_hidden(model: Decoder, mesh: DeviceMesh, chunks: int = CHUNKS) -> nn.Module:
    """See `impl.tensor_parallel.Parallelize`. More chunks hide more, in smaller products."""
    return sliced(model, mesh, chunks)


register(
    "tensor_parallel",
    "hidden",
    parallelize_hidden,
    time=Race("sequence"),
    races={"link": Race("sequence", goal=0.85)},  # half of what `sequence` exposes there is hidden
    tested_briefly=True,  # `sequence` is the same code, with one chunk
    called="sequence parallelism in chunks",
)
