"""Collectives: all-reduce, reduce-scatter and all-gather between the ranks of a process group.

Bandwidths are the ones NCCL's tests report: the algorithm bandwidth is bytes of one rank over time; the bus bandwidth
multiplies it by the share of them that must cross each link, 2(n-1)/n for an all-reduce.
"""

from __future__ import annotations

from impl.collectives.contract import Collectives, Work

# They register in this order, as every list and table has them.
# isort: off
from impl.collectives.library import Backend
from impl.collectives.ring import Ring
from impl.collectives.direct import Direct
from impl.collectives.messages import count_bytes_sent
from impl.collectives.chosen import OnGloo, collectives_for
# isort: on

__all__ = ["Backend", "Collectives", "Direct", "OnGloo", "Ring", "Work", "collectives_for", "count_bytes_sent"]
