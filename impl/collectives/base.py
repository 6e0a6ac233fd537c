"""What the ring and the direct exchange share: what they take, and collectives over the steps of each."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch.distributed as dist
from torch import Tensor

from impl.collectives.messages import Peers, Steps
from impl.collectives.worker import WorkerWork


class MessageCollectives(ABC):
    """Collectives of our own, from send and receive. Contract: `impl.collectives.Collectives`.

    They go on while the caller computes. Sums are rounded to the tensor's own dtype at each addition, and are the same
    on every rank to the bit. ValueError for tensors that are not contiguous, and for sizes or dtypes that do not match.
    """

    @abstractmethod
    def reduce_scatter_steps(self, peers: Peers, output: Tensor, parts: Sequence[Tensor], buffers: Tensor) -> Steps:
        """Put the sum of this rank's part into `output`, which may be that part. `parts` are otherwise only read."""

    @abstractmethod
    def all_gather_steps(self, peers: Peers, parts: Sequence[Tensor]) -> Steps:
        """Put every other rank's part into its place in `parts`, where this rank's own already is."""

    @abstractmethod
    def reduce_rows(self, ranks: int) -> int:
        """How many buffers, each as large as the largest part, `reduce_scatter_steps` needs."""

    def all_reduce(
        self, tensor: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
    ) -> WorkerWork | None:
        """Replace `tensor`, of any shape, by its sum over the ranks."""
        peers = Peers(group)

        def steps(parts: Sequence[Tensor], buffers: Tensor) -> Steps:
            yield from self.reduce_scatter_steps(peers, parts[peers.rank], parts, buffers)
            yield from self.all_gather_steps(peers, parts)

        parts = flat(tensor).tensor_split(peers.size)  # the first ones are one element larger, or some are empty
        return peers.run(steps, parts, self.reduce_rows(peers.size), async_op)

    def reduce_scatter(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
    ) -> WorkerWork | None:
        """Put into rank i's `output` the sum of the i-th part of `input`, which stays as it is but for that part."""
        peers = Peers(group)
        parts = _parts("reduce_scatter's input", input, "output", output, peers.size)
        return peers.run(
            lambda parts, buffers: self.reduce_scatter_steps(peers, parts[-1], parts[:-1], buffers),
            [*parts, flat(output)],
            self.reduce_rows(peers.size),
            async_op,
        )

    def all_gather(
        self, output: Tensor, input: Tensor, group: dist.ProcessGroup | None = None, *, async_op: bool = False
    ) -> WorkerWork | None:
        """Put every rank's `input`, in rank order, into `output` on every rank."""
        peers = Peers(group)

        def steps(parts: Sequence[Tensor], buffers: Tensor) -> Steps:
            *parts, mine = parts
            parts[peers.rank].copy_(mine)
            yield from self.all_gather_steps(peers, parts)

        parts = _parts("all_gather's output", output, "input", input, peers.size)
        return peers.run(steps, [*parts, flat(input)], 0, async_op)


def flat(tensor: Tensor) -> Tensor:
    """A contiguous tensor's elements, one after the other, without its graph."""
    if not tensor.is_contiguous():
        shape, strides = tuple(tensor.shape), tensor.stride()
        raise ValueError(f"collectives take contiguous tensors, not one of shape {shape} with strides {strides}")
    return tensor.detach().view(-1)


def _parts(name: str, large: Tensor, small_name: str, small: Tensor, ranks: int) -> Sequence[Tensor]:
    """The rank's parts of the large tensor, each as large as the small one."""
    if large.dtype != small.dtype:
        raise ValueError(f"{name} and {small_name} are of one dtype, not {large.dtype} and {small.dtype}")
    if large.numel() != ranks * small.numel():
        raise ValueError(
            f"on {ranks} ranks {name} has {ranks} times the elements of its {small_name}, "
            f"not {large.numel()} against {small.numel()}"
        )
    return flat(large).view(ranks, small.numel()).unbind()


def requires_gloo(device: str) -> str | None:
    """Reason unless the ranks' backend is Gloo, whose messages a thread may send beside the caller's collectives."""
    return None if device == "cpu" else "its messages are Gloo's; NCCL's must come from the thread of its collectives"
