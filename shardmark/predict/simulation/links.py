"""Seconds of a collective: its steps' latency, and the bytes over the narrowest link.

Inside a node a device sends over all its links together. Between nodes, a group's ranks in one node share the node's
adapters; messages and all-to-all go by the sender's own adapter. An all-reduce runs on a ring or on two trees,
whichever is faster (Sanders, Speck and Träff, "Two-tree algorithms", 2009); other collectives run on a ring, as in
NCCL.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from math import log2

from shardmark.meter.hardware import Hardware

_MESSAGES = ("send", "receive")


def collective_seconds(hardware: Hardware, name: str, nbytes: int, ranks: Sequence[int]) -> float:
    """Seconds of one collective; `nbytes` is the larger of a rank's input and output."""
    if len(ranks) == 1:
        return 0.0
    reached, size = hardware.reached, len(ranks)
    in_node, nodes = _nodes(hardware, ranks)
    link, network = hardware.link * reached.link, hardware.network * reached.network
    network_latency = hardware.network_latency if nodes > 1 else 0.0  # a CPU's may not be known
    if name in _MESSAGES:
        latency = network_latency if nodes > 1 else hardware.latency
        return reached.collective + latency + nbytes / (network if nodes > 1 else link)
    inside, between = (size - nodes) * hardware.latency, (nodes - 1) * network_latency
    if name == "all_to_all":
        own = (in_node - 1) / size * nbytes / link
        if nodes > 1:
            own = max(own, (size - in_node) / size * nbytes / network)
        return reached.collective + inside + between + own
    bandwidth = min(link, in_node * network) if nodes > 1 else link
    times = 2 if name == "all_reduce" else 1
    seconds = times * (inside + between) + times * (size - 1) / size * nbytes / bandwidth
    if name == "all_reduce":  # trees of nodes, in each of which ranks are a chain
        latency = (in_node - 1) * hardware.latency + log2(nodes) * network_latency
        seconds = min(seconds, 2 * (latency + nbytes / bandwidth))
    return reached.collective + seconds


def least_collective_seconds(hardware: Hardware, name: str, nbytes: int, ranks: Sequence[int]) -> float:
    """The data sheets' lower bound: no latency; and switches may reduce, so each byte is sent once."""
    if len(ranks) == 1:
        return 0.0
    in_node, nodes = _nodes(hardware, ranks)
    bandwidth = min(hardware.link, in_node * hardware.network) if nodes > 1 else hardware.link
    return (len(ranks) - 1) / len(ranks) * nbytes / bandwidth


def _nodes(hardware: Hardware, ranks: Sequence[int]) -> tuple[int, int]:
    """Ranks in the group's smallest node, and the number of its nodes."""
    nodes = Counter(rank // hardware.devices_per_node for rank in ranks)
    return min(nodes.values()), len(nodes)
