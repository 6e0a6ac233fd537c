"""One rank of a process group whose other ranks are not there: collectives send nothing, and allocate what Gloo or NCCL
does.

Every other rank is assumed to do what this one does, and to hold the same small tensors: what it would send arrives as
this rank's own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PythonCallbackWork, Work, _create_work_from_future  # type: ignore[attr-defined]
from torch._ops import OpOverload
from torch.distributed import distributed_c10d as c10d
from torch.distributed.distributed_c10d import GroupName
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves

from shardmark.api.registry import Unsupported
from shardmark.meter.communication import described
from shardmark.predict.simulation.kinds import is_called_by_autograd
from shardmark.predict.simulation.schedule import Schedule
from shardmark.predict.simulation.shortcuts import shortcuts

UNTIMED = Schedule()

_new_group, _wait, _future = c10d._new_process_group_helper, Work.wait, Work.get_future


def gloo(operator: OpOverload, args: tuple[Any, ...], schedule: Schedule = UNTIMED) -> Any:
    """The outcome of a collective on Gloo: its output, and a handle that holds Gloo's own buffers until it has been
    waited for. The copy that reduce-scatter makes of its input lives as long as the handle."""
    name = _collective(operator)
    held: list[Tensor] = []
    match name:
        case "_allgather_base" | "allgather":
            outputs = [args[0]] if isinstance(args[0], Tensor) else args[0][0]
            _flat(outputs)  # once to look at shapes, and once more to receive
            held = [_flat(outputs)]
        case "allgather_into_tensor_coalesced":
            for each in args[1]:
                _flat([each])
            held = [_flat(args[0])]
        case "allreduce_coalesced":
            held = [_flat(args[0])]
        case "_reduce_scatter_base":
            held = [_flat([args[1]])]
        case "reduce_scatter_tensor_coalesced":
            held = [_flat([each]) for each in args[1]]
        case "reduce_scatter":
            rank = dist.ProcessGroup.unbox(args[2]).rank()
            held = [_flat([each]) for i, each in enumerate(args[1][0]) if i != rank]
        case "gather" if args[0]:  # on the rank that receives
            _flat(args[0][0])
            held = [_flat(args[0][0])]
        case "scatter" if args[1]:  # on the rank that sends
            _flat(args[1][0])
    return _handle(operator, args, held, schedule, frees="reduce_scatter" not in name)


def nccl(operator: OpOverload, args: tuple[Any, ...], schedule: Schedule = UNTIMED) -> Any:
    """The outcome of a collective on NCCL, which works in place, except where one end is a list of tensors."""
    name = _collective(operator)
    listed = args[0][0] if name == "allgather" else args[1][0] if name == "reduce_scatter" else []
    held = [_flat(listed)] if listed and not _of_fsdp1(operator, args) else []
    return _handle(operator, args, held, schedule)


_OF_NCCL = torch.cpu.Stream()


def nccl_recording_streams(operator: OpOverload, args: tuple[Any, ...], schedule: Schedule = UNTIMED) -> Any:
    """`nccl` as PyTorch did it until 2025: `record_stream` has the caching allocator keep blocks for NCCL's stream,
    but for `all_gather_into_tensor` and `reduce_scatter_tensor`, which are taken to be waited for. Since then c10d
    holds the tensors themselves until the handle is waited for (pytorch/pytorch#147168).

    DDP's ranks exchange whole numbers, which the host reads and so waits for.
    """
    tensors = [each for each in tree_leaves(args) if isinstance(each, Tensor)]
    if _collective(operator) not in ("_allgather_base", "_reduce_scatter_base") and not _of_fsdp1(operator, args):
        _OF_NCCL.wait_stream(torch.cpu.current_stream())
        for tensor in tensors:
            tensor.record_stream(_OF_NCCL)  # type: ignore[arg-type]  # as annotated
        if not any(map(torch.is_floating_point, tensors)):
            torch.cpu.synchronize()
    return nccl(operator, args, schedule)


def _of_fsdp1(operator: OpOverload, args: tuple[Any, ...]) -> bool:
    """Whether it is FSDP1's all-gather: on a CPU into a list of a tensor's parts, on CUDA into the tensor itself."""
    if _collective(operator) != "allgather":
        return False
    listed = args[0][0]
    return len(listed) > 1 and len({each.untyped_storage().data_ptr() for each in listed}) == 1


def _collective(operator: OpOverload) -> str:
    """The name of the collective: "allreduce" of "c10d::allreduce_"."""
    return operator.name().removeprefix("c10d::").rstrip("_")


def _handle(
    operator: OpOverload, args: tuple[Any, ...], held: list[Tensor], schedule: Schedule, frees: bool = True
) -> Any:
    """The operator's results with a handle among them. Waiting for the handle `frees` the held tensors; the handle of
    an all-reduce has a future with its tensors, where DDP reads them."""
    over = _launched(operator, args, schedule)

    def waited(timeout: timedelta) -> bool:
        if frees:
            held.clear()
        schedule.wait(over)
        return True

    if _collective(operator) == "allreduce":
        future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
        future.set_result(args[0])
        work = _create_work_from_future(future)
    else:
        work = PythonCallbackWork(waited)
    returns = operator._schema.returns
    return None if not returns else work.boxed() if len(returns) == 1 else (args[0], work.boxed())


def _launched(operator: OpOverload, args: tuple[Any, ...], schedule: Schedule) -> float:
    """Launch the collective in the schedule, on its group's stream; returns when it ends."""
    if not schedule.running:
        return 0.0
    names = [argument.name for argument in operator._schema.arguments]
    given = dict(zip(names, args, strict=False))
    each = described(operator.name().removeprefix("c10d::"), given)
    name = GroupName(dist.ProcessGroup.unbox(given["process_group"]).group_name)
    over = schedule.collective(each.name, each.nbytes, _ranks(name), name)
    if each.name == "all_reduce":
        schedule.reduced(args[0], over)
        if is_called_by_autograd():  # by DDP's reducer
            schedule.wait_after_backward(args[0])
    return over


@cache
def _ranks(group: GroupName) -> Sequence[int]:
    """The group's ranks; evenly spaced ones as a range."""
    ranks = dist.get_process_group_ranks(c10d._resolve_process_group(group))
    apart = range(ranks[0], ranks[-1] + 1, max((ranks[-1] - ranks[0]) // max(len(ranks) - 1, 1), 1))
    return apart if list(apart) == ranks else tuple(ranks)


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    """Allocate one tensor with as many bytes as they have together."""
    return torch.empty(sum(each.numel() for each in tensors), dtype=tensors[0].dtype, device=tensors[0].device)


def _without_ranks(name: str, size: int, rank: int, ranks: Any, backend: Any, *args: Any, **kwargs: Any) -> Any:
    """PyTorch's own function that makes a group, with the fake backend under that name."""
    group, store = _new_group(size, rank, ranks, "fake", *args, **kwargs)
    if isinstance(group, dist.ProcessGroup):  # this rank is in it
        _, own_store = c10d._world.pg_map[group]
        c10d._world.pg_map[group] = dist.Backend(name), own_store
        c10d._world.pg_backend_config[group] = f"cpu:{name}"
    return group, store


def _gathered(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """`all_gather_object` where every rank has the same object."""
    object_list[:] = [obj] * len(object_list)


def _received(name: str, object_list: list[Any], *args: Any, **kwargs: Any) -> None:
    """`broadcast_object_list` and `recv_object_list` where every rank has the same objects."""
    if name == "recv_object_list" or None in object_list:
        raise Unsupported(f"{name}: this rank receives what only another one knows, and that is not there")


@contextmanager
def _real_group_aside() -> Iterator[None]:
    """Set the process group that this process is in aside: under torchrun it is a rank of one."""
    if not dist.is_initialized():
        yield
        return
    names = dict(c10d._world.pg_names)
    with ExitStack() as aside:
        for place in ("pg_map", "pg_names", "pg_group_ranks", "pg_backend_config", "tags_to_pg", "pg_to_tag"):
            aside.enter_context(patch.object(c10d, f"_{place}", {}))
        aside.enter_context(patch.object(sys, "excepthook", sys.excepthook))
        aside.enter_context(patch.object(c10d, "_group_count", 0))
        aside.enter_context(patch.object(c10d, "_default_pg_init_method", None))
        aside.enter_context(patch.object(c10d, "_world", c10d._World()))
        c10d._unregister_all_process_groups()
        try:
            yield
        finally:
            for group, name in names.items():
                c10d._register_process_group(name, group)


@contextmanager
def one_rank_of(size: int, rank: int = 0, backend: str = "gloo", schedule: Schedule = UNTIMED) -> Iterator[None]:
    """In the block this process is rank `rank` of a process group of `size` ranks, which all do the same. Waits for
    all-reduces go to the schedule."""

    def wait(work: Work, *timeout: Any) -> bool:
        waited = _wait(work, *timeout)
        if schedule.running and type(work) is Work:
            schedule.wait_for(_future(work).value())
        return waited

    def get_future(work: Work) -> Any:
        """A communication hook that a user gives DDP asks for the future, and DDP waits for it after backward."""
        future = _future(work)
        if schedule.running and type(work) is Work:
            schedule.wait_after_backward(future.value())
        return future

    _ranks.cache_clear()
    with ExitStack() as patches:
        patches.enter_context(patch.object(Work, "wait", wait))
        patches.enter_context(patch.object(Work, "get_future", get_future))
        for module in (dist, c10d):
            patches.enter_context(patch.object(module, "all_gather_object", _gathered))
            for name in ("broadcast_object_list", "recv_object_list"):
                patches.enter_context(patch.object(module, name, partial(_received, name)))
        patches.enter_context(patch.object(c10d, "_new_process_group_helper", partial(_without_ranks, backend)))
        # PyTorch names NCCL's version in errors of an NCCL group, and a build without CUDA has none.
        patches.enter_context(patch("torch.cuda.nccl.version", lambda: (0, 0, 0)))
        # A mesh is on this device by default, and simulated tensors are on the CPU.
        patches.enter_context(patch("torch._C._get_accelerator", lambda check=None: torch.device("cpu")))
        patches.enter_context(shortcuts())
        patches.enter_context(_real_group_aside())
        dist.init_process_group("gloo", store=FakeStore(), rank=rank, world_size=size)
        try:
            yield
        finally:
            if len(c10d._world.pg_names) > 1:  # a next rank is in other groups, and DTensor remembers this one's
                _clear_sharding_prop_cache()
            dist.destroy_process_group()
