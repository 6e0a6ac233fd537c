"""Activation checkpointing: drop what forward would keep for backward, and compute it again there (Chen et al., 2016).

from impl.checkpointing import full

model = full(Transformer(SIZES["medium"], context_length=1024))
"""

from __future__ import annotations

from impl.checkpointing.contract import Policy
from impl.checkpointing.policies import every, full, none, recursive, selective

__all__ = ["Policy", "every", "full", "none", "recursive", "selective"]
