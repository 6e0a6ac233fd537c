"""Collectives: all-reduce, reduce-scatter and all-gather between the ranks of a process group.

Bandwidths are the ones that NCCL's tests report. The algorithm bandwidth is one rank's bytes over time. The bus
bandwidth multiplies it by the share of the bytes that must cross each link, which is 2(n-1)/n for an all-reduce.
"""

from __future__ import annotations

from impl.collectives.contract import Collectives, Handle

# Implementations register in this order, which is the order in every list and table.
# isort: off
from impl.collectives.library import Backend
from impl.collectives.ring import Ring
from impl.collectives.direct import Direct
from impl.collectives.messages import count_bytes_sent
from impl.collectives.chosen import OnGloo, collectives_for
# isort: on

__all__ = ["Backend", "Collectives", "Direct", "Handle", "OnGloo", "Ring", "collectives_for", "count_bytes_sent"]
