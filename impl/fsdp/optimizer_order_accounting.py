"""Bytes live at each stage of training with FSDP2, by when the optimizer was made and how it was repaired."""

from __future__ import annotations

VARIANTS = ("after", "before", "before_repaired", "before_with_state_repaired")
"""When the optimizer was made: after sharding, as is right; or before, left so, or repaired, without state or with."""


def stage_bytes(variant: str, parameters: int, ranks: int) -> dict[str, int]:
    """Of one rank and an AdamW over `parameters` bytes, without activations; the first step makes the moments.

    An optimizer made before keeps the full parameters until it is repaired. If it never is, it also leaves the shards'
    gradients alone, as it does the shards. The stages' names say what has just been done.
    """
    whole, shard = parameters, -(-parameters // ranks)
    sharded = {"backward_1": 2 * shard, "step_1": 3 * shard, "step_2": 3 * shard}
    return {
        "after": {"model": whole, "sharding": shard, "optimizer": shard, **sharded},
        "before": {
            "model": whole,
            "optimizer": whole,
            "sharding": whole + shard,
            "backward_1": whole + 2 * shard,
            "step_1": whole + 2 * shard,
            "step_2": whole + 2 * shard,
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
    }[variant]
