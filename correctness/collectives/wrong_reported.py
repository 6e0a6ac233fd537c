"""Planted defects: collectives that are wrong for large tensors alone."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from correctness.collectives.simple_collectives import Done, Group, Plain
from correctness.support.planting import defect

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
class GathersUpTo8MiB(Plain):
    """A buffer of 8 MiB holds what is gathered; the rest of a larger result is not written."""

    def all_gather(self, output: Tensor, input: Tensor, group: Group = None, *, async_op: bool = False) -> Any:
        found = torch.empty_like(output)
        dist.all_gather_into_tensor(found, input, group=group)
        most = 8 * MIB // output.itemsize
        output.view(-1)[:most] = found.view(-1)[:most]
        return Done() if async_op else None
