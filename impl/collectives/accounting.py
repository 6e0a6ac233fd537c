"""Collectives in closed form: bytes each rank must send, the buffers it needs, and the bandwidths people quote.

Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", JPDC 2009.
"""

from __future__ import annotations

from dataclasses import replace
from math import log2
from typing import TYPE_CHECKING

from impl.accounting.ledger import Bytes
from impl.collectives.segments import buffer_bytes
from shardmark.api import Work

if TYPE_CHECKING:
    from impl.collectives.cases import CollectiveCase


def all_reduce_bytes_sent(nbytes: int, ranks: int) -> int:
    """Bytes each rank must send for an all-reduce of `nbytes`: 2(n-1)/n of them."""
    return 2 * (ranks - 1) * nbytes // ranks


def bytes_sent(collective: str, nbytes: int, ranks: int) -> int:
    """Bytes each rank must send where the larger of its tensors has `nbytes`: (n-1)/n of them, twice that for an
    all-reduce."""
    return all_reduce_bytes_sent(nbytes, ranks) // (1 if collective == "all_reduce" else 2)


def ring_bytes_sent(collective: str, elements: int, itemsize: int, rank: int, ranks: int) -> int:
    """Bytes that `rank` sends around a ring, exact where `elements` (of the larger tensor) do not divide by the ranks.

    To reduce-scatter it sends every part but its own; to all-gather, every part but its successor's. An all-reduce is
    both. Over all ranks these are n-1 times the tensor, or 2(n-1) times.
    """
    scattering = elements - part_elements(elements, rank, ranks)
    gathering = elements - part_elements(elements, (rank + 1) % ranks, ranks)
    return (
        itemsize
        * {
            "reduce_scatter": scattering,
            "all_gather": gathering,
            "all_reduce": scattering + gathering,
        }[collective]
    )


def direct_bytes_sent(collective: str, elements: int, itemsize: int, rank: int, ranks: int) -> int:
    """Bytes that `rank` sends in a direct exchange: the other ranks' parts to reduce-scatter, its own part n-1 times
    to all-gather."""
    own = part_elements(elements, rank, ranks)
    scattering, gathering = elements - own, (ranks - 1) * own
    return (
        itemsize
        * {
            "reduce_scatter": scattering,
            "all_gather": gathering,
            "all_reduce": elements if ranks == 2 else scattering + gathering,
        }[collective]
    )


def work_of_all(one: Work, ranks: int, bytes_communicated: int) -> Work:
    """Work of all ranks, each of which does as much as `one` and must send that many bytes."""
    return replace(
        one,
        flops=ranks * one.flops,
        model_flops=ranks * one.model_flops,
        bytes_moved=ranks * one.bytes_moved,
        bytes_communicated=bytes_communicated,
    )


def part_elements(elements: int, index: int, parts: int) -> int:
    """Elements of part `index` of `parts`; the first parts have one more where `elements` do not divide evenly."""
    return elements // parts + (index < elements % parts)


def bus_bandwidth(collective: str, nbytes: int, seconds: float, ranks: int) -> float:
    """Bytes a second across each link, as NCCL's tests define it; `nbytes` of the larger tensor of one rank."""
    return nbytes / seconds * (2 if collective == "all_reduce" else 1) * (ranks - 1) / ranks


def ring_all_reduce_seconds(nbytes: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Seconds of a ring all-reduce: 2(n-1) steps, in each of which a rank sends an n-th; `bandwidth` is that of one
    direction."""
    return 2 * (ranks - 1) * (latency + nbytes / ranks / bandwidth)


def tree_all_reduce_seconds(nbytes: float, ranks: int, bandwidth: float, latency: float) -> float:
    """Seconds of a tree all-reduce, up and down two binary trees that carry half of the bytes each. A leaf of one
    tree is an inner node of the other, so a rank sends every byte twice; the bytes go in pieces and wait for 2
    log2(n) steps. Sanders, Speck and Träff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan",
    2009."""
    return 2 * (log2(ranks) * latency + nbytes / bandwidth)


def ring_meets_tree_bytes(ranks: int, bandwidth: float, latency: float) -> float:
    """Bytes above which a ring is faster than the trees: sending fewer bytes makes up for its steps."""
    return ranks * bandwidth * latency * (ranks - 1 - log2(ranks))


def half_bandwidth_bytes(steps: float, sent: float, bandwidth: float, latency: float) -> float:
    """Bytes whose transfer takes as long as the latency of `steps`; `sent` is the number of bytes each rank sends
    per byte. An all-reduce is bound by bandwidth above and by latency below: the corner of its roofline."""
    return steps * latency * bandwidth / sent


def padded(count: int, ranks: int) -> int:
    """The smallest multiple of `ranks` that is not below `count`."""
    return -(-count // ranks) * ranks


def reduce_scatter_buffers(nbytes: int, ranks: int, device: str, itemsize: int = 4) -> int:
    """Bytes that a reduce-scatter of `nbytes` holds until its wait: a ring's buffers on CPU; on CUDA none, as NCCL's
    are not PyTorch's."""
    rows = 0 if device == "cuda" else ring_rows("reduce_scatter", ranks)
    return buffer_bytes(nbytes // itemsize // ranks, itemsize, rows)


def ring_rows(collective: str, ranks: int) -> int:
    """Number of buffers per segment in a ring: none to gather; to reduce, one to receive and one to send."""
    return 0 if collective == "all_gather" else min(2, ranks - 1)


def direct_rows(collective: str, ranks: int) -> int:
    """Number of buffers per segment in a direct exchange: none to gather; to reduce, one for each other rank."""
    return 0 if collective == "all_gather" else ranks - 1


def in_place_peak(case: CollectiveCase) -> Bytes:
    """Peak in bytes of a collective without buffers: the large tensor and the n-th part of it."""
    part = 0 if case.collective == "all_reduce" else case.bytes // case.ranks
    return Bytes({"tensor": case.bytes, "one rank's part of it": part})


def buffered_peak(case: CollectiveCase) -> Bytes:
    """Peak in bytes of a collective with a buffer as large as the tensor."""
    return in_place_peak(case).add({"buffer": case.bytes})


def backend_peak(case: CollectiveCase, device: str = "cpu") -> Bytes:
    """Peak in bytes of the backend's collectives. Gloo works on a copy of the large tensor, except in an all-reduce.
    NCCL works on the tensors, and its own buffers are not PyTorch's (ProcessGroupNCCL.cpp, _allgather_base and
    _reduce_scatter_base)."""
    in_place = device == "cuda" or case.collective == "all_reduce"
    return in_place_peak(case) if in_place else buffered_peak(case)


def ring_peak(case: CollectiveCase) -> Bytes:
    """Peak in bytes of a ring collective."""
    part = -(-case.elements // case.ranks)
    buffers = buffer_bytes(part, case.itemsize, ring_rows(case.collective, case.ranks))
    return in_place_peak(case).add({"buffers of segments": buffers})


def direct_peak(case: CollectiveCase) -> Bytes:
    """Peak in bytes of a direct exchange; two ranks all-reduce in one part."""
    whole = case.collective == "all_reduce" and case.ranks == 2
    part = case.elements if whole else -(-case.elements // case.ranks)
    buffers = buffer_bytes(part, case.itemsize, direct_rows(case.collective, case.ranks))
    return in_place_peak(case).add({"buffers of segments": buffers})
