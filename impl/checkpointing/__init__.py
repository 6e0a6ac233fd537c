"""Activation checkpointing: forward saves fewer activations for backward, which recomputes the others (Chen et al.,
"Training Deep Nets with Sublinear Memory Cost", 2016).

    from impl.checkpointing import full

    model = full(Transformer(SIZES["medium"], context_length=1024))
"""

from __future__ import annotations

from impl.checkpointing.contract import Policy
from impl.checkpointing.policies import every, full, none, recursive, segments, selective

__all__ = ["Policy", "every", "full", "none", "recursive", "segments", "selective"]
