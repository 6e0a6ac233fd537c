"""The optimizer without sharding (the reference), and PyTorch's own ZeRO-1 (the peer)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist

from impl.data_parallel.accounting import bucketed_peak
from impl.sharded_optimizer.accounting import zero_redundancy_work
from impl.sharded_optimizer.contract import Facts
from impl.sharded_optimizer.state import check_groups
from shardmark.api import Race, Unsupported, register


def unsharded(
    params: Any,
    optimizer_cls: type[torch.optim.Optimizer],
    *,
    process_group: dist.ProcessGroup | None = None,
    **defaults: Any,
) -> torch.optim.Optimizer:
    """`optimizer_cls` itself: every rank has the full state, and updates every parameter."""
    return optimizer_cls(params, **defaults)


def zero_redundancy(
    params: Any,
    optimizer_cls: type[torch.optim.Optimizer],
    *,
    process_group: dist.ProcessGroup | None = None,
    **defaults: Any,
) -> torch.optim.Optimizer:
    """`torch.distributed.optim.ZeroRedundancyOptimizer` under the family's contract.

    It assigns each parameter as a whole to one rank, largest first. After the update each rank broadcasts its
    parameters: as one tensor, with `parameters_as_bucket_view`. Unsupported for parameters of several dtypes.
    """
    params = _without_names(params)
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


def _without_names(params: Any) -> list[Any]:
    """Parameters, or groups of lists of them: torch's ZeroRedundancyOptimizer takes no `named_parameters()`."""

    def one(each: Any) -> Any:
        if isinstance(each, dict):
            own = each["params"]
            return each | {"params": [own] if isinstance(own, torch.Tensor) else _without_names(own)}
        return each[1] if isinstance(each, tuple) else each

    return [one(each) for each in params]


@cache
def _zero_redundancy_class() -> Any:
    # Defined on the first call, because the import compiles TorchScript for a second.
    from torch.distributed.optim import ZeroRedundancyOptimizer

    class ZeroRedundancy(ZeroRedundancyOptimizer):
        """torch's, with four differences. `state_dict` returns the full state on every rank, not on one. Loading drops
        the state of parameters that the loaded state does not have, finds that of others by the ids of its groups, and
        casts as `optimizer_cls` does.
        """

        def state_dict(self) -> dict[str, Any]:
            self.consolidate_state_dict(to=0)
            shared = [super().state_dict() if self.rank == 0 else None]
            dist.broadcast_object_list(shared, group=self.process_group, group_src=0)
            self._all_state_dicts: list[dict[str, Any]] = []  # torch keeps the full state here
            assert shared[0] is not None
            return shared[0]

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            check_groups(state_dict, self.param_groups)  # torch would raise IndexError after loading a part
            self.optim.state.clear()
            ids = [i for group in state_dict["param_groups"] for i in group["params"]]
            state = {place: state_dict["state"][i] for place, i in enumerate(ids) if i in state_dict["state"]}
            super().load_state_dict(state_dict | {"state": state})  # torch writes into it
            self.optim.load_state_dict(self.optim.state_dict())  # casts the state, as torch's sharded loading does not
            self.state.clear()  # frees a second copy of this rank's part, which nothing reads

    return ZeroRedundancy


register(
    "sharded_optimizer",
    "unsharded",
    unsharded,
    memory=bucketed_peak,  # the wrapper that averages gradients for it
    time=Race("zero_redundancy"),
    tested_briefly=True,
    called="the unsharded optimizer",
)
register(
    "sharded_optimizer",
    "zero_redundancy",
    zero_redundancy,
    time=Race("unsharded"),
    facts=Facts(work=zero_redundancy_work, wrapper="ddp"),
    tested_briefly=True,
    predicted=True,
    called="PyTorch's ZeroRedundancyOptimizer",
)
