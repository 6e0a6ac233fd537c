"""The optimizer on every rank whole, and ZeRO-1 as PyTorch ships it: the peer."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from impl.sharded_optimizer.accounting import unsharded_peak, zero_redundancy_peak
from shardmark.registry import Race, Unsupported, register


def unsharded(
    params: Any,
    optimizer_cls: type[torch.optim.Optimizer],
    *,
    process_group: dist.ProcessGroup | None = None,
    **defaults: Any,
) -> torch.optim.Optimizer:
    """`optimizer_cls` itself: every rank has all of its state, and makes every update."""
    return optimizer_cls(params, **defaults)


def zero_redundancy(
    params: Any,
    optimizer_cls: type[torch.optim.Optimizer],
    *,
    process_group: dist.ProcessGroup | None = None,
    **defaults: Any,
) -> torch.optim.Optimizer:
    """`torch.distributed.optim.ZeroRedundancyOptimizer` under the family's contract.

    It gives whole parameters to ranks, largest first, and each rank broadcasts its own when they are updated: with
    `parameters_as_bucket_view`, all of them at once. Unsupported for parameters of several dtypes.
    """
    params = list(params)
    tensors = [p for group in params for p in group["params"]] if isinstance(params[0], dict) else params
    if len({p.dtype for p in tensors}) > 1:
        raise Unsupported("ZeroRedundancyOptimizer takes parameters of one dtype")
    return _zero_redundancy_class()(
        params,
        optimizer_class=optimizer_cls,
        process_group=process_group or dist.group.WORLD,
        parameters_as_bucket_view=True,
        **defaults,
    )


@cache
def _zero_redundancy_class() -> Any:
    """Made when first asked for: what it is imported from compiles scripts for a second."""
    from torch.distributed.optim import ZeroRedundancyOptimizer

    class ZeroRedundancy(ZeroRedundancyOptimizer):
        """torch's, with the whole state on every rank, where torch has it on one; it may be loaded again."""

        def state_dict(self) -> dict[str, Any]:
            self.consolidate_state_dict(to=0)
            shared = [super().state_dict() if self.rank == 0 else None]
            dist.broadcast_object_list(shared, group=self.process_group, group_src=0)
            assert shared[0] is not None
            return shared[0]

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            super().load_state_dict(state_dict | {"state": dict(state_dict["state"])})  # which it writes into

    return ZeroRedundancy


register("sharded_optimizer", "unsharded", unsharded, memory=unsharded_peak, time=Race("zero_redundancy"))
register(
    "sharded_optimizer",
    "zero_redundancy",
    zero_redundancy,
    memory=zero_redundancy_peak,
    time=Race("unsharded"),
)
