"""Planted defects: collectives that are wrong as public trackers report, or for large tensors alone."""

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from correctness.collectives.simple_collectives import Done, Group, Plain, finished
from correctness.support.planting import defect
from impl.collectives import Ring
from impl.collectives.messages import Peers, Steps

MIB = 2**20


@defect(cause="numerics", caught_by="test_each_element_of_large_tensors")
class LargeSumsInBfloat16(Plain):
    """Compresses messages above 1 MiB to bfloat16."""

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        if tensor.nbytes > MIB and tensor.dtype == torch.float32:
            narrow = tensor.bfloat16()
            dist.all_reduce(narrow, group=group)
            tensor.copy_(narrow)
            return Done() if async_op else None
        return super().all_reduce(tensor, group, async_op=async_op)


@defect(cause="numerics", caught_by="test_results_of_complex_numbers_are_right_or_an_error")
class SumsInFloat64(Plain):
    """Sums in float64, which has no imaginary part, and rounds once; refuses lazy conjugates."""

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        if tensor.is_conj():
            raise ValueError("a lazy conjugate")
        if not (tensor.is_floating_point() or tensor.is_complex()):
            return super().all_reduce(tensor, group, async_op=async_op)
        total = tensor.detach().double()
        handle = dist.all_reduce(total, group=group, async_op=True)
        return finished(handle, lambda: tensor.detach().copy_(total), async_op, once=True)


@defect(cause="numerics", caught_by="test_results_of_complex_numbers_are_right_or_an_error")
class OverBytes(Plain):
    """Sends the bytes of a tensor, and not whether they are of its conjugate (pytorch#88294)."""

    def all_gather(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        return super().all_gather(output, input.conj() if input.is_conj() else input, group, async_op=async_op)


class InSegments(Plain):
    """Where a tensor has several segments, does not reduce the elements after the last whole one."""

    bytes = 16 * MIB

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        flat, size = tensor.view(-1), self.bytes // tensor.itemsize
        if flat.numel() <= size:
            return super().all_reduce(tensor, group, async_op=async_op)
        for segment in flat[: flat.numel() // size * size].split(size):
            dist.all_reduce(segment, group=group)
        return Done() if async_op else None


@defect(cause="shapes", caught_by="test_each_element_of_large_tensors")
class EndOf16MiBSegments(InSegments):
    """Leaves out the elements after the last whole segment of 16 MiB."""


@defect(cause="shapes", caught_by="test_each_element_of_large_tensors")
class EndOf32MiBSegments(InSegments):
    bytes = 32 * MIB


@defect(cause="shapes", caught_by="test_each_element_of_large_tensors")
class EndOfFewerElementsThanRanks(Plain):
    """ROCm/rocm-systems#3213: what is left after whole segments is cut into equal parts, one for each rank, which are
    empty where fewer elements than ranks are left."""

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        ranks = dist.get_world_size(group)
        left = tensor.numel() % (1024 * ranks)
        if tensor.numel() < 1024 * ranks or left >= ranks:
            return super().all_reduce(tensor, group, async_op=async_op)
        return super().all_reduce(tensor.view(-1)[: tensor.numel() - left], group, async_op=async_op)


@defect(cause="shapes", caught_by="test_each_element_of_large_tensors")
class GathersUpTo8MiB(Plain):
    """A buffer of 8 MiB holds what is gathered; the rest of a larger result is not written."""

    def all_gather(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        found = torch.empty_like(output)
        dist.all_gather_into_tensor(found, input, group=group)
        most = 8 * MIB // output.itemsize
        output.view(-1)[:most] = found.view(-1)[:most]
        return Done() if async_op else None


@defect(cause="shapes", caught_by="test_results_are_those_done_by_hand")
class GathersWholeTiles(Plain):
    """tenstorrent/tt-metal#21964: gathers tiles of 32 elements; zeros stand where a part's last tile is not whole."""

    def all_gather(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        handle = super().all_gather(output, input, group, async_op=True)
        rest = output.detach().view(dist.get_world_size(group), -1)[:, input.numel() // 32 * 32 :]
        return finished(handle, rest.zero_, async_op)


@defect(cause="numerics", caught_by="test_results_are_those_done_by_hand")
class DividesFirst(Plain):
    """horovod/horovod#1699: divides before it adds, against overflow. Small numbers underflow, and a third of a whole
    number is not exact.
    """

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        if not tensor.is_floating_point():
            return super().all_reduce(tensor, group, async_op=async_op)
        ranks, shared = dist.get_world_size(group), tensor.detach()
        handle = dist.all_reduce(shared.div_(ranks), group=group, async_op=True)
        return finished(handle, lambda: shared.mul_(ranks), async_op, once=True)


@defect(cause="handles", caught_by="test_the_neighbours_in_a_buffer")
class WritesWholeWords(Plain):
    """Reduces a copy of the words of 16 bytes that a view lies in, and writes them back as they were."""

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        storage, item = tensor.detach().untyped_storage(), tensor.itemsize
        start, end = tensor.storage_offset(), tensor.storage_offset() + tensor.numel()
        whole = 16 // item
        first, last = start // whole * whole, min(-(-end // whole) * whole, storage.nbytes() // item)
        words = torch.empty(0, dtype=tensor.dtype).set_(storage, first, (last - first,))
        copy = words.clone()
        handle = dist.all_reduce(copy[start - first :][: tensor.numel()], group=group, async_op=True)
        return finished(handle, lambda: words.copy_(copy), async_op, once=True)


@defect(cause="memory", caught_by="test_a_collective_that_is_over_keeps_no_tensor")
class KeepsFinishedWork(Plain):
    """RLinf/RLinf#505: a reference to work that is over is not dropped, nor are its tensors."""

    started: ClassVar[list[Any]] = []

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        self.started.append((super().all_reduce(tensor, group, async_op=True), tensor))
        return self.started[-1][0] if async_op else self.started[-1][0].wait()


@defect(cause="world size", caught_by="test_results_are_those_done_by_hand")
class DoublesToAPowerOfTwo(Ring):
    """open-mpi/ompi#7523: doubles the parts in each step. Where ranks are no power of two, a message's size is wrong,
    here on five and on seven ranks.
    """

    def all_gather_steps(self, peers: Peers, parts: Sequence[Tensor]) -> Steps:
        distance = 1
        while distance < peers.size:
            count = peers.size % distance or distance
            sent = [parts[(peers.rank + i) % peers.size] for i in range(count)]
            received = [parts[(peers.rank + distance + i) % peers.size] for i in range(count)]
            yield [
                *(peers.send(part, to=peers.rank - distance) for part in sent),
                *(peers.receive(part, source=peers.rank + distance) for part in received),
            ]
            distance *= 2


@defect(cause="numerics", caught_by="test_sums_of_integers_may_leave_the_dtype_on_the_way")
class StaysAtTheLimits(Plain):
    """open-mpi/ompi#8045: additions of bytes stay at their limits, as some vector instructions do."""

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        if tensor.dtype != torch.int8:
            return super().all_reduce(tensor, group, async_op=async_op)
        terms = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
        dist.all_gather(terms, tensor, group=group)
        tensor.zero_()
        for term in terms:
            tensor.copy_((tensor.int() + term).clamp(-128, 127))
        return Done() if async_op else None


@defect(cause="numerics", caught_by="test_results_are_those_done_by_hand")
class AddsBytesWithTheirSign(Plain):
    """Takes all tensors of one byte for signed ones, and adds them up in a wider type."""

    def all_reduce(self, tensor: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        if tensor.dtype != torch.uint8:
            return super().all_reduce(tensor, group, async_op=async_op)
        total = tensor.view(torch.int8).float()
        dist.all_reduce(total, group=group)
        tensor.copy_(total.clamp(min=0))
        return Done() if async_op else None
