"""Base of the ring and the direct exchange: checks of tensors, and three collectives built from their steps."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from impl.collectives.messages import GLOO_ALONE, Peers, Steps
from impl.collectives.worker import WorkerHandle


class MessageCollectives(ABC):
    """Collectives made of sends and receives. Contract: `impl.collectives.Collectives`.

    They run on a thread while the caller computes. Sums are rounded to the tensor's own dtype at each addition, and are
    bitwise equal on every rank. ValueError for tensors that are not contiguous, or whose sizes or dtypes do not
    match; Unsupported for those that are not Gloo's.
    """

    @abstractmethod
    def reduce_scatter_steps(self, peers: Peers, output: Tensor, parts: Sequence[Tensor], buffers: Tensor) -> Steps:
        """Put the sum over the ranks of `parts[peers.rank]` into `output`, which may be that part itself.

        All parts are read, and no other is written.
        """

    @abstractmethod
    def all_gather_steps(self, peers: Peers, parts: Sequence[Tensor]) -> Steps:
        """Receive the other ranks' parts into `parts`, one for each rank; this rank's own is there already."""

    @abstractmethod
    def reduce_buffers(self, ranks: int) -> int:
        """How many buffers, each as large as the largest part, `reduce_scatter_steps` needs."""

    def all_reduce(
        self, tensor: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
    ) -> WorkerHandle | None:
        peers = Peers(group)

        def steps(parts: Sequence[Tensor], buffers: Tensor) -> Steps:
            yield from self.reduce_scatter_steps(peers, parts[peers.rank], parts, buffers)
            yield from self.all_gather_steps(peers, parts)

        parts = flat(tensor).tensor_split(peers.size)  # the first may be one element larger; the last may be empty
        return peers.run(steps, parts, self.reduce_buffers(peers.size), async_op)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
    ) -> WorkerHandle | None:
        peers = Peers(group)
        parts = _parts("reduce_scatter's input", input, "output", output, peers.size)
        return peers.run(
            lambda parts, buffers: self.reduce_scatter_steps(peers, parts[-1], parts[:-1], buffers),
            [*parts, flat(output)],
            self.reduce_buffers(peers.size),
            async_op,
        )

    def all_gather(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
    ) -> WorkerHandle | None:
        peers = Peers(group)

        def steps(parts: Sequence[Tensor], buffers: Tensor) -> Steps:
            *parts, own = parts
            parts[peers.rank].copy_(own)
            yield from self.all_gather_steps(peers, parts)

        parts = _parts("all_gather's output", output, "input", input, peers.size)
        return peers.run(steps, [*parts, flat(input)], 0, async_op)


def flat(tensor: Tensor) -> Tensor:
    """A contiguous tensor as a one-dimensional view, detached; ValueError for another, and for a lazy conjugate."""
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError("collectives take numbers as they are in memory: resolve_conj() and resolve_neg() first")
    if not tensor.is_contiguous():
        shape, strides = tuple(tensor.shape), tensor.stride()
        raise ValueError(f"collectives take contiguous tensors, not one of shape {shape} with strides {strides}")
    return tensor.detach().view(-1)


def _parts(name: str, large: Tensor, small_name: str, small: Tensor, ranks: int) -> Sequence[Tensor]:
    """One part of the large tensor for each rank, flat; ValueError unless each is as large as the small tensor."""
    if large.dtype != small.dtype:
        raise ValueError(f"{name} and {small_name} are of one dtype, not {large.dtype} and {small.dtype}")
    if large.numel() != ranks * small.numel():
        raise ValueError(
            f"on {ranks} ranks {name} has {ranks} times the elements of its {small_name}, "
            f"not {large.numel()} against {small.numel()}"
        )
    return flat(large).view(ranks, small.numel()).unbind()


def requires_gloo(device: str) -> str | None:
    """Return the reason unless the backend is Gloo, which lets one thread send while another runs collectives."""
    return None if device == "cpu" else GLOO_ALONE
