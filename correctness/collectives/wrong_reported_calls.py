"""Planted defects: collectives that are right in a single call of a usual kind."""

from itertools import count, pairwise
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from correctness.collectives.simple_collectives import Group, Plain, finished
from correctness.support.planting import defect


@defect(cause="memory", caught_by="test_memory_does_not_grow_with_the_sizes")
class ABufferOfEachSize(Plain):
    """areal-project/AReaL#1209: keeps buffers for the next tensor of their size, of as many sizes as there are."""

    free: ClassVar[dict[Any, list[Tensor]]] = {}

    def reduce_scatter(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        free = self.free.setdefault((input.shape, input.dtype, input.device), [])
        with torch.inference_mode(False):
            buffer = free.pop() if free else torch.empty(input.shape, dtype=input.dtype, device=input.device)
        handle = super().reduce_scatter(output.detach(), buffer.copy_(input.detach()), group, async_op=True)
        return finished(handle, lambda: free.append(buffer), async_op, once=True)


@defect(cause="memory", caught_by="test_memory_does_not_grow_with_the_sizes")
class QueuesWork(Plain):
    """pytorch/pytorch#193239: a queue for a watchdog keeps asynchronous work, and its tensors, after `wait`."""

    queue: ClassVar[list[Any]] = []

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        handle = super().all_reduce(tensor, group, async_op=async_op)
        if async_op:
            self.queue.append((handle, tensor))
        return handle


@defect(cause="state", caught_by="test_a_call_in_inference_mode_changes_nothing")
class StagesInABufferOfAnEvaluation(Plain):
    """lightseekorg/tokenspeed#794: sums small tensors in a buffer of the first call. Made in inference_mode, it is an
    error in the next call outside.
    """

    def __init__(self) -> None:
        self.stages: dict[Any, Tensor] = {}

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        flat, key = tensor.detach().view(-1), (group, tensor.dtype, tensor.device)
        if flat.numel() > 4096:
            return super().all_reduce(tensor, group, async_op=async_op)
        stage = self.stages.pop(key, None)
        stage = flat.new_empty(4096) if stage is None else stage
        part = stage[: flat.numel()].copy_(flat)

        def copy_back() -> None:
            flat.copy_(part)
            self.stages[key] = stage

        return finished(super().all_reduce(part, group, async_op=True), copy_back, async_op, once=True)


@defect(cause="subgroup", caught_by="test_any_history_of_collectives")
class GathersInAscendingOrder(Plain):
    """pytorch/TensorRT#4380: takes a group's ranks in ascending order, also where the group has another order."""

    def all_gather(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        ranks = dist.get_process_group_ranks(group)
        order = sorted(range(len(ranks)), key=ranks.__getitem__)
        parts = output.detach().view(len(ranks), output.numel() // len(ranks))
        handle = super().all_gather(output, input, group, async_op=True)
        return finished(handle, lambda: parts.copy_(parts[order]), async_op, once=True)


@defect(cause="shapes", caught_by="test_each_element_of_large_tensors_is_exact")
class BoundsInFloat32(Plain):
    """Bounds of pieces are multiples of a length in float32, whose rounding leaves out the end of a large tensor."""

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        flat = tensor.detach().view(-1)
        count = flat.numel() // 2**22 + 1
        bounds = (torch.arange(count + 1) * torch.tensor(flat.numel() / count)).long().tolist()
        pieces = [flat[start:end] for start, end in pairwise(bounds)]
        *others, last = [super(BoundsInFloat32, self).all_reduce(piece, group, async_op=True) for piece in pieces]
        return finished(last, lambda: [other.wait() for other in others], async_op, once=True)


@defect(cause="memory", caught_by="test_objects_that_stay_do_not_grow_with_the_number_of_calls")
class BlockingCallsStayInTheTable(Plain):
    """autoscriptlabs/nccl-mesh-plugin#7: `wait` takes a request from the table, and a blocking call has none."""

    under_way: ClassVar[dict[int, str]] = {}
    numbers: ClassVar[Any] = count()

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        number = next(self.numbers)
        self.under_way[number] = f"all-reduce {number} of {tuple(tensor.shape)}"
        handle = super().all_reduce(tensor, group, async_op=async_op)
        return finished(handle, lambda: self.under_way.pop(number), True, once=True) if async_op else None


@defect(cause="shapes", caught_by="test_tensors_of_several_dimensions")
class DividesByTheRows(Plain):
    """pytorch/pytorch#85234: divides by the number of elements, of which a tensor of several dimensions may have
    none."""

    def all_gather(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        if input.dim() > 1 and output.numel() // input.numel() != dist.get_world_size(group):
            raise ValueError("the output is not as large as all inputs")
        return super().all_gather(output, input, group, async_op=async_op)


@defect(cause="numerics", caught_by="test_results_are_those_done_by_hand")
class AddsToWhatWasThere(Plain):
    """sgl-project/sglang#8663: adds up in memory that is not cleared, here in an output that is multiplied by zero."""

    def reduce_scatter(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        if output.untyped_storage().data_ptr() == input.untyped_storage().data_ptr():
            return super().reduce_scatter(output, input, group, async_op=async_op)
        total = torch.empty_like(output)
        handle = super().reduce_scatter(total, input, group, async_op=True)
        return finished(handle, lambda: output.mul_(0).add_(total), async_op, once=True)


@defect(cause="numerics", caught_by="test_sums_are_as_exact_as_the_dtype")
class Saturates(Plain):
    """vllm-project/vllm#55346: keeps numbers in the dtype's range, and what is no number becomes one."""

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        if tensor.is_floating_point():
            tensor.detach().nan_to_num_()
        return super().all_reduce(tensor, group, async_op=async_op)


@defect(cause="subgroup", caught_by="test_groups_come_and_go")
class KnowsGroupsByAddress(Plain):
    """Remembers each group's size by the address of the group, which a later one may have."""

    sizes: ClassVar[dict[int, int]] = {}

    def all_gather(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        ranks = self.sizes.setdefault(id(group), dist.get_world_size(group))
        parts = output.detach().view(-1)[: ranks * input.numel()]
        return super().all_gather(parts, input, group, async_op=async_op)


class Narrowed(Plain):
    """All-reduces some tensors in another dtype."""

    def other(self, tensor: Tensor) -> torch.dtype | None:
        raise NotImplementedError

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        if (other := self.other(tensor)) is None:
            return super().all_reduce(tensor, group, async_op=async_op)
        total = tensor.detach().to(other)
        handle = dist.all_reduce(total, group=group, async_op=True)
        return finished(handle, lambda: tensor.detach().copy_(total), async_op, once=True)


@defect(cause="numerics", caught_by="test_sums_are_as_exact_as_the_dtype")
class LargeOnesInFloat32(Narrowed):
    """Sends wide numbers as float32 where a message has more than a MiB."""

    def other(self, tensor: Tensor) -> torch.dtype | None:
        return torch.float32 if tensor.dtype == torch.float64 and tensor.nbytes > 2**20 else None


@defect(cause="numerics", caught_by="test_results_of_complex_numbers_are_right_or_an_error")
class Complex64Alone(Narrowed):
    """Takes every complex number for two of float32."""

    def other(self, tensor: Tensor) -> torch.dtype | None:
        return torch.complex64 if tensor.is_complex() else None
