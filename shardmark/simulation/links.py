"""How long a collective takes: by its steps' latency, and by the bytes that the narrowest link carries.

Inside a node all links of a device together; where a group has ranks in several nodes, its ranks in a node share these
nodes' adapters. A ring or two trees, whichever is faster (Sanders, Speck and Träff, "Two-tree algorithms", 2009); trees
are for all-reduces alone, as in NCCL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import log2

from shardmark.simulation.hardware import Hardware

_REDUCED = ("all_reduce",)


def collective_seconds(hardware: Hardware, name: str, nbytes: int, ranks: Sequence[int]) -> float:
    """Seconds of one collective; `nbytes` is the larger of what goes in and what comes out on a rank."""
    if len(ranks) == 1:
        return 0.0
    reached = hardware.reached
    in_node, nodes = _nodes(hardware, ranks)
    link, network = hardware.link * reached.link, in_node * hardware.network * reached.network
    bandwidth = min(link, network) if nodes > 1 else link
    times = 2 if name in _REDUCED else 1
    ring = times * ((in_node - 1) * hardware.latency + (nodes - 1) * hardware.network_latency)
    seconds = ring + _sent(name, len(ranks)) * nbytes / bandwidth
    if name in _REDUCED:
        trees = 2 * (log2(in_node) * hardware.latency + log2(nodes) * hardware.network_latency)
        seconds = min(seconds, trees + 2 * nbytes / bandwidth)
    return reached.collective + seconds


def least_collective_seconds(hardware: Hardware, name: str, nbytes: int, ranks: Sequence[int]) -> float:
    """What the data sheets' links allow, whose latency is nothing."""
    if len(ranks) == 1:
        return 0.0
    in_node, nodes = _nodes(hardware, ranks)
    bandwidth = min(hardware.link, in_node * hardware.network) if nodes > 1 else hardware.link
    return _sent(name, len(ranks)) * nbytes / bandwidth


def _nodes(hardware: Hardware, ranks: Sequence[int]) -> tuple[int, int]:
    """Of the group's ranks, how many are in a node, the one that has fewest; and in how many nodes they are."""
    nodes = Counter(rank // hardware.devices_per_node for rank in ranks)
    return min(nodes.values()), len(nodes)


def _sent(name: str, size: int) -> float:
    """Of each byte, how many cross a link: around a ring."""
    return (2 if name in _REDUCED else 1) * (size - 1) / size
