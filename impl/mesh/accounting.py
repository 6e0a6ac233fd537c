"""The work of a training step on a mesh."""

from __future__ import annotations

from impl.mesh.cases import SIZES, MeshCase
from impl.mesh.decoder import DecoderSize
from shardmark.api import Mesh, OwnModelCase, Work


def parameters(size: DecoderSize) -> tuple[int, int]:
    """Numbers of a decoder's parameters: of matrices that each token is multiplied with, and of all."""
    kv = size.dim // size.heads * size.kv_heads
    attention = 2 * size.dim**2 + 2 * size.dim * kv
    experts = max(1, size.experts)
    feed_forward = (2 if size.experts else 3) * size.dim * size.hidden * experts
    matrices = size.layers * (attention + feed_forward + size.dim * size.experts) + size.vocabulary * size.dim
    return matrices, matrices + size.vocabulary * size.dim + (2 * size.layers + 1) * size.dim


def tokens(case: MeshCase) -> int:
    """Tokens of all ranks in a step."""
    return Mesh.parse(case.mesh).row_groups * case.batch * case.context


def work(case: MeshCase | OwnModelCase) -> Work:
    """6 FLOPs of each token and parameter of a matrix, of every expert as the naive mixture has it, and those of causal
    attention; of the model as one process has it, whatever a mesh repeats."""
    mesh = Mesh.parse(case.mesh)
    if isinstance(case, OwnModelCase):
        own = case.work
        return Work(*(mesh.row_groups * each for each in (own.flops, own.bytes_moved)))
    return work_of(SIZES[case.model], tokens(case), case.context)


def work_of(size: DecoderSize, tokens: int, context: int) -> Work:
    """The work of a step of AdamW of one decoder, with rows of that context."""
    matrices, every = parameters(size)
    flops = 6 * tokens * (matrices + context * size.dim * size.layers)
    return Work(flops=flops, bytes_moved=40 * every, model_flops=flops)
