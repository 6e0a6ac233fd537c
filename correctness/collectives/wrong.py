"""Planted defects: wrong collectives."""

from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from correctness.collectives.simple_collectives import Done, Group, Plain, exchange, finished
from correctness.support.planting import defect

# World size and shapes


class RingReduceScatter(Plain):
    """A correct ring: rank i ends with the sum of part i."""

    def first(self, rank: int, step: int) -> int:
        """Return the part that a rank sends in that step."""
        return rank - step - 1

    def reduce_scatter(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        parts = input.reshape(ranks, -1).clone()
        for step in range(ranks - 1):
            send, receive = self.first(rank, step) % ranks, self.first(rank - 1, step) % ranks
            received = torch.empty_like(parts[0])
            if received.numel():
                exchange(parts[send], received, (rank + 1) % ranks, (rank - 1) % ranks, group)
            parts[receive] += received
        output.copy_(parts[rank].view_as(output))
        return Done() if async_op else None


@defect(cause="world size", caught_by="test_results_are_those_done_by_hand")
class TurnsTheRingTheWrongWay(RingReduceScatter):
    """Rotates parts the wrong way: right on two ranks, where both ways are the same."""

    def first(self, rank: int, step: int) -> int:
        return rank + step + 1


@defect(cause="world size", caught_by="test_results_are_those_done_by_hand")
class DoublesOnTwoRanks(Plain):
    """Exchanges with a single partner: right on two ranks."""

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        partner, received = rank ^ 1, torch.empty_like(tensor)
        if partner < ranks and tensor.numel():
            exchange(tensor, received, partner, partner, group)
            tensor += received
        return Done() if async_op else None


@defect(cause="shapes", caught_by="test_results_are_those_done_by_hand")
class LosesTheRemainder(Plain):
    """hw-native-sys/pypto#1942: cuts into one equal part per rank, and drops the remainder."""

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        ranks = dist.get_world_size(group)
        even = tensor.view(-1)[: tensor.numel() // ranks * ranks]
        return super().all_reduce(even, group, async_op=async_op)


@defect(cause="shapes", caught_by="test_results_of_several_segments")
class LosesTheLastSegment(Plain):
    """Gathers tensors above 1 MiB in whole segments of that size, and drops the last."""

    def all_gather(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        if input.nbytes <= 2**20:
            return super().all_gather(output, input, group, async_op=async_op)
        ranks, each = dist.get_world_size(group), 2**20 // input.element_size()
        into = output.view(ranks, -1)
        for start in range(0, input.numel() // each * each, each):
            gathered = input.new_empty(ranks * each)
            super().all_gather(gathered, input.view(-1)[start : start + each], group)
            into[:, start : start + each] = gathered.view(ranks, -1)
        return Done() if async_op else None


@defect(cause="shapes", caught_by="test_tensors_of_several_dimensions")
class GathersAlongTheLastDimension(Plain):
    def all_gather(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        everyone = [torch.empty_like(input) for _ in range(dist.get_world_size(group))]
        dist.all_gather(everyone, input, group=group)
        output.copy_(
            torch.cat([part.flatten(0, -2) if part.ndim > 1 else part for part in everyone], -1).view_as(output)
        )
        return Done() if async_op else None


@defect(cause="shapes", caught_by="test_tensors_of_several_dimensions")
class WritesTheWholeStorage(Plain):
    """Reduces the whole storage behind a view."""

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
        return super().all_reduce(whole, group, async_op=async_op)


@defect(cause="shapes", caught_by="test_results_are_those_done_by_hand")
class RefusesNoElements(Plain):
    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        tensor.view(-1)[0].item()
        return super().all_reduce(tensor, group, async_op=async_op)


# Numerics


class Detour(Plain):
    """Reduces in another dtype."""

    through: ClassVar[dict[torch.dtype, torch.dtype]] = {}

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        other = tensor.to(self.through.get(tensor.dtype, tensor.dtype), copy=True)
        handle = super().all_reduce(other, group, async_op=True)
        return finished(handle, lambda: tensor.copy_(other), async_op)


@defect(cause="numerics", caught_by="test_sums_are_as_exact_as_the_dtype")
class Float64ThroughFloat32(Detour):
    through: ClassVar = {torch.float64: torch.float32}


@defect(cause="numerics", caught_by="test_sums_are_as_exact_as_the_dtype")
class Float32ThroughBfloat16(Detour):
    through: ClassVar = {torch.float32: torch.bfloat16}


@defect(cause="numerics", caught_by="test_sums_are_as_exact_as_the_dtype")
class Bfloat16ThroughFloat16(Detour):
    """Converts through float16, which has more digits and less range."""

    through: ClassVar = {torch.bfloat16: torch.float16}


@defect(cause="numerics", caught_by="test_sums_are_as_exact_as_the_dtype")
class IntegersThroughFloats(Detour):
    """PaddlePaddle/PaddleFleet#1761: sums counts as float32, which has no integers of more than 24 bits."""

    through: ClassVar = {torch.int64: torch.float64, torch.int32: torch.float32}


@defect(cause="numerics", caught_by="test_every_rank_has_the_same_sum_to_the_bit")
class AddsItsOwnFirst(Plain):
    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        rank, ranks = dist.get_rank(group), dist.get_world_size(group)
        everyone = [torch.empty_like(tensor) for _ in range(ranks)]
        dist.all_gather(everyone, tensor.detach(), group=group)
        for i in range(1, ranks):
            tensor.data += everyone[(rank + i) % ranks]
        return Done() if async_op else None


@defect(cause="world size", caught_by="test_every_rank_has_the_same_sum_to_the_bit")
class OneShotOwnFirst(AddsItsOwnFirst):
    """pytorch/pytorch#129501: adds its own part of small tensors first: right on two ranks, where no order matters."""

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        if tensor.numel() > 2**16:
            return Plain.all_reduce(self, tensor, group, async_op=async_op)
        return super().all_reduce(tensor, group, async_op=async_op)


@defect(cause="numerics", caught_by="test_every_rank_has_the_same_sum_to_the_bit")
class AsynchronousOwnFirst(AddsItsOwnFirst):
    """Adds the parts in one order in blocking calls alone."""

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        add = super().all_reduce if async_op else partial(Plain.all_reduce, self)
        return add(tensor, group, async_op=async_op)


@defect(cause="numerics", caught_by="test_every_rank_has_the_same_sum_to_the_bit")
class LargeSumsOwnFirst(AddsItsOwnFirst):
    """Above 4 MiB each rank adds the parts from its own on, in a direct exchange."""

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        add = super().all_reduce if tensor.nbytes > 2**22 else partial(Plain.all_reduce, self)
        return add(tensor, group, async_op=async_op)


@defect(cause="numerics", caught_by="test_what_is_gathered_has_the_bits_that_were_sent")
class GathersBySumming(Plain):
    """Sums each rank's part padded with zeros: -0.0 becomes 0.0."""

    def all_gather(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        padded = torch.zeros_like(output)
        padded.view(dist.get_world_size(group), input.numel())[dist.get_rank(group)] = input.detach().view(-1)
        handle = super().all_reduce(padded, group, async_op=True)
        return finished(handle, lambda: output.copy_(padded), async_op)


# Subgroups


@defect(cause="subgroup", caught_by="test_groups_side_by_side")
class IgnoresTheGroup(Plain):
    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        return super().all_reduce(tensor, async_op=async_op)


@defect(cause="subgroup", caught_by="test_groups_side_by_side")
class TakesTheWorldsRank(Plain):
    """pytorch/pytorch#130515: takes its rank in the world for that in the group, here to place its part."""

    def reduce_scatter(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        total = input.clone()
        super().all_reduce(total, group)
        ranks = dist.get_world_size(group)
        output.copy_(total.reshape(ranks, -1)[dist.get_rank() % ranks].view_as(output))
        return Done() if async_op else None


@defect(cause="subgroup", caught_by="test_groups_side_by_side")
class BroadcastsFromRank0(Plain):
    """meta-pytorch/torchrec#4601, flashinfer-ai/flashinfer#3418: takes the group's rank 0 for the world's rank 0."""

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        dist.reduce(tensor, 0, group=group)
        return dist.broadcast(tensor, 0, group=group, async_op=async_op)


# Communication


@defect(cause="communication", caught_by="test_results_are_those_done_by_hand")
class OverwritesItsInput(Plain):
    """faasm/faabric#195, llnl/Aluminum#110: adds up in the caller's input."""

    def reduce_scatter(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        super().all_reduce(input, group)
        ranks = dist.get_world_size(group)
        output.copy_(input.reshape(ranks, -1)[dist.get_rank(group)].view_as(output))
        return Done() if async_op else None


@defect(cause="communication", caught_by="test_results_are_those_done_by_hand")
class ClearsItsOutputFirst(Plain):
    """Loses an input that is part of the output."""

    def all_gather(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        output.zero_()
        return super().all_gather(output, input, group, async_op=async_op)


@defect(cause="communication", caught_by="test_any_history")
class OneStorageIsOnePart(Plain):
    """openucx/xccl#123: takes any input in its output's storage for this rank's own part, and skips the copy."""

    def all_gather(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        if output.untyped_storage().data_ptr() == input.untyped_storage().data_ptr() and output.numel():
            input = output.detach().view(dist.get_world_size(group), -1)[dist.get_rank(group)]
        return super().all_gather(output, input, group, async_op=async_op)


@defect(cause="communication", caught_by="test_results_are_those_done_by_hand")
class Averages(Plain):
    def reduce_scatter(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        handle = super().reduce_scatter(output, input, group, async_op=True)
        return finished(handle, lambda: output.copy_(output / dist.get_world_size(group)), async_op)
