"""Workspace of SDPA's kernels on CUDA, in bytes: memory that a kernel allocates and frees inside one operator.

On CPU it is a few tiles for each thread, and counts as zero here. On CUDA it is as large as the tensors themselves, so
a case needs room for it, though the formula of its peak counts tensors alone. The source is PyTorch's
aten/src/ATen/native/transformers/cuda.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import torch

from impl.accounting.ledger import Bytes

if TYPE_CHECKING:
    from impl.attention.cases import AttentionCase

FLOAT = 4
MULTIPROCESSORS = 132
"""Multiprocessors of an H100 SXM: formulas assume these if there is no GPU."""
MOST_SPLITS = 128


def sdpa_workspace(case: AttentionCase, device: str) -> Bytes:
    """Bytes of workspace of the kernel that SDPA chooses."""
    return efficient_workspace(case, device) if case.dtype == "float32" else flash_workspace(case, device)


def flash_workspace(case: AttentionCase, device: str) -> Bytes:
    """Bytes of the flash kernel. Forward: if keys are split, each split's sums (flash_api.cpp, set_params_splitkv).
    Backward: with several heads, dense copies of output and gradient (attention_backward.cu,
    _flash_attention_backward); and dq in float32 with one value per row, rows rounded up to 128, head_dim to 32,
    above 128 to 64 (flash_api.cpp, mha_bwd)."""
    if device == "cpu":
        return Bytes({})
    batch, head_dim = math.prod(case.shape[:-2]), case.head_dim
    columns = _up(head_dim, 32 if head_dim <= 128 else 64)
    splits = key_splits(batch, case.seq, head_dim, multiprocessors())
    forward = Bytes({"sums of each split of keys": FLOAT * splits * batch * case.seq * (columns + 1) * (splits > 1)})
    if case.mode == "forward":
        return forward
    rows = batch * _up(case.seq, 128)
    backward = Bytes(
        {
            "output and its gradient, copied": 2 * _copy(case),
            "gradient of q in float32": FLOAT * rows * columns,
            "delta": FLOAT * rows,
        }
    )
    return max(forward, backward)


def multiprocessors() -> int:
    """Number of multiprocessors of this machine's GPU: with more of them flash attention splits keys further."""
    found = torch.cuda.is_available()
    return torch.cuda.get_device_properties().multi_processor_count if found else MULTIPROCESSORS


def key_splits(batch: int, seq: int, head_dim: int, multiprocessors: int) -> int:
    """Number of blocks among which flash attention's forward splits the keys (flash_api.cpp, num_splits_heuristic):
    the fewest within 85% of the best use of the multiprocessors, two blocks on each; 1 if queries alone nearly fill
    them. A number that cuts keys no finer than the one before does not count."""
    slots, blocks = 2 * multiprocessors, batch * math.ceil(seq / 64)
    if blocks >= 0.8 * slots:
        return 1
    key_blocks = math.ceil(seq / (256 if head_dim <= 64 else 128 if head_dim <= 128 else 64))
    most = min(MOST_SPLITS, slots, key_blocks)
    finer = [n for m, n in pairwise(range(1, most + 1)) if math.ceil(key_blocks / n) != math.ceil(key_blocks / m)]
    use = {n: blocks * n / slots / math.ceil(blocks * n / slots) for n in [1, *finer]}
    return next(n for n, share in use.items() if share >= 0.85 * max(use.values()))


def efficient_workspace(case: AttentionCase, device: str) -> Bytes:
    """Bytes of the memory-efficient kernel: none forward. Backward: with several heads, a dense copy of the output's
    gradient; in float32 that gradient times the output, freed once it is summed to delta (attention_backward.cu,
    _efficient_attention_backward); then dq by blocks, each with a lock of 16 bytes. Blocks have head_dim rounded up to
    64, in half precision above 64 to 128 (kernel_backward.h, workspace_size; kernels/generate_kernels.py,
    BwdKernel.get_all).
    """
    if device == "cpu" or case.mode == "forward":
        return Bytes({})
    batch, seq, head_dim = math.prod(case.shape[:-2]), case.seq, case.head_dim
    queries = 128 if head_dim > 64 else 64
    keys = 64 if case.dtype == "float32" or head_dim <= 64 else 128
    blocks = batch * math.ceil(seq / queries) * math.ceil(head_dim / keys)
    held = Bytes({"gradient of the output, copied": _copy(case), "delta": FLOAT * batch * seq})
    product = FLOAT * batch * seq * head_dim if case.dtype == "float32" else 0
    return max(
        held.add({"output times its gradient": product}),
        held.add({"gradient of q in float32": blocks * (16 + FLOAT * queries * keys)}),
    )


def cudnn_workspace(case: AttentionCase, device: str) -> Bytes:
    """Bytes of cuDNN's kernel: none forward; backward, dq in float32 and one value a row, as cudnn-frontend's
    CompositeSDPABackwardNode requests. The plan for a given GPU may take more or less (native/cudnn/MHA.cpp,
    run_cudnn_SDP_bprop, get_workspace_size).
    """
    if device == "cpu" or case.mode == "forward":
        return Bytes({})
    rows = math.prod(case.shape[:-1])
    return Bytes({"gradient of q in float32": FLOAT * rows * case.head_dim, "delta": FLOAT * rows})


def _copy(case: AttentionCase) -> int:
    """Bytes of a dense copy of a tensor as large as q; with several heads the kernels need (batch, seq, heads,
    head_dim)."""
    return 0 if case.heads in (None, 1) else math.prod(case.shape) * case.torch_dtype.itemsize


def _up(length: int, multiple: int) -> int:
    return multiple * math.ceil(length / multiple)
