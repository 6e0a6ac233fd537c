"""Bytes live at each stage of training with FSDP2, by when the optimizer was made and how it was repaired."""

from __future__ import annotations

VARIANTS = ("after", "before", "before_repaired", "before_with_state_repaired", "accelerate")
"""When the optimizer was made: after sharding, which is right; or before it: unrepaired, or repaired, without state or
with it; or repaired by accelerate."""
STEPS = 4


def stage_bytes(variant: str, parameters: int, ranks: int) -> dict[str, int]:
    """Bytes live on one rank after each stage, with AdamW over `parameters` bytes and without activations. The first
    step makes the moments.

    An optimizer made before sharding keeps the full parameters until it is repaired. Unrepaired, it neither updates the
    shards nor clears their gradients.
    """
    whole, shard = parameters, -(-parameters // ranks)
    steps = [f"step_{step}" for step in range(1, 1 + STEPS)]
    sharded = {"backward_1": 2 * shard, **dict.fromkeys(steps, 3 * shard)}
    return {
        "after": {"model": whole, "sharding": shard, "optimizer": shard, **sharded},
        "before": {
            "model": whole,
            "optimizer": whole,
            "sharding": whole + shard,
            **dict.fromkeys(("backward_1", *steps), whole + 2 * shard),
        },
        "before_repaired": {
            "model": whole,
            "optimizer": whole,
            "sharding": whole + shard,
            "repair": shard,
            **sharded,
        },
        "before_with_state_repaired": {
            "model": whole,
            "optimizer": 3 * whole,
            "sharding": 3 * whole + shard,
            "repair": 3 * shard,
            **sharded,
            "backward_1": 4 * shard,
        },
        "accelerate": {"model": whole, "optimizer": whole, "sharding": shard, **sharded},
    }[variant]
