"""What cases would take by simulation: the memory budget of what has no closed form, and whether it fits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist

from shardmark.memory import is_out_of_memory
from shardmark.plan import Plan
from shardmark.registry import Unsupported


class Predictions:
    """A session's, each made once: a simulation on the CPU takes some tenths of a second."""

    def __init__(self) -> None:
        self._tensors: dict[Any, int | None] = {}

    def tensors(self, plan: Plan) -> int | None:
        """Bytes at the peak on the first rank, which has the most; None where that cannot be predicted."""
        key = plan.workload, plan.implementation.spec, plan.case, plan.world_size
        if key not in self._tensors:
            self._tensors[key] = _predicted(plan)
        return self._tensors[key]


def _predicted(plan: Plan) -> int | None:
    if dist.is_initialized():  # torchrun's rank 0 has a process group already, and cannot be in a simulated one
        return None
    # Imported here because all of PyTorch's FSDP comes with it, which takes a second.
    from shardmark.simulation.predict import predict

    try:
        return predict(replace(plan, device="cpu", observers=())).memory.tensors
    except Unsupported:
        return None
    except RuntimeError as error:
        if is_out_of_memory(error):  # of one tensor that is larger than this machine's memory
            return None
        raise
