"""A unit: parameters that are gathered together before use, and whose gradients are reduced together after backward.

They lie end to end in one flat tensor, of which each rank owns an equal part, its shard: an all-gather writes what
parameters are views of. Gradients are copied into such a tensor once, when all of them are there: it takes the place of
the parameters, which are needed no more.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.collectives import Handle, collectives_for
from impl.data_parallel.base import call_on_gradient

Place = tuple[nn.Module, str]
"""A module and the name of a parameter in it."""


@dataclass(frozen=True)
class Sharding:
    """How parameters are spread: over which ranks, in which dtypes they travel, and where shards are kept."""

    process_group: dist.ProcessGroup
    compute_dtype: torch.dtype | None
    reduce_dtype: torch.dtype | None
    device: torch.device
    home: torch.device
    """Where shards, gradients and optimizer state live: `device`, or the CPU."""

    @property
    def world_size(self) -> int:
        """Shards of each flat tensor."""
        return dist.get_world_size(self.process_group)

    @property
    def rank(self) -> int:
        """Which of them is this process's."""
        return dist.get_rank(self.process_group)


class Flat:
    """Parameters of one dtype, all trainable or all frozen, end to end and padded to a multiple of the ranks.

    Each stays the object that it was and becomes its part of this rank's shard: one-dimensional, with as many elements
    as fell to this rank, perhaps none. What computes are other parameters, `full`, views of a tensor whose memory is
    there only while it is gathered.
    """

    def __init__(self, parameters: list[nn.Parameter], sharding: Sharding) -> None:
        first, ranks = parameters[0], sharding.world_size
        floating = first.is_floating_point()
        self.sharding = sharding
        self.parameters = parameters
        self.trainable = first.requires_grad
        self.shapes = [p.shape for p in parameters]
        self._offsets = [0, *accumulate(p.numel() for p in parameters)]
        self._shard_size = -(-self._offsets[-1] // ranks)
        self._reduce_dtype = sharding.reduce_dtype or sharding.compute_dtype or first.dtype
        self._gathering: Handle | None = None
        self._gradients: dict[int, Tensor] = {}  # whole, by parameter, as backward produces them
        self._gradient: Tensor | None = None  # all of them end to end, while they are reduced
        self._reducing: Handle | None = None

        with torch.no_grad():
            self.shard = self._scatter().to(sharding.home)
            dtype = (sharding.compute_dtype if floating else None) or first.dtype
            self._flat = torch.empty(ranks * self._shard_size, dtype=dtype, device=sharding.device)
            # `data` has a version counter of its own: autograd must not take a gather for a change of the values.
            self.full = [nn.Parameter(x.data, requires_grad=self.trainable) for x in self._pieces(self._flat)]
            self._nbytes = self._flat.untyped_storage().nbytes()
            self._flat.untyped_storage().resize_(0)
            for parameter, piece in zip(parameters, self.own(self.shard), strict=True):
                parameter.grad = None
                parameter.data = piece
        if self.trainable:
            for full in self.full:
                call_on_gradient(full, self._take)

    def _scatter(self) -> Tensor:
        """This rank's shard of rank 0's values."""
        flat = torch.zeros(
            self.sharding.world_size * self._shard_size, dtype=self.parameters[0].dtype, device=self.sharding.device
        )
        if self.sharding.rank == 0:
            for piece, parameter in zip(self._pieces(flat), self.parameters, strict=True):
                piece.copy_(parameter)
        dist.broadcast(flat, group=self.sharding.process_group, group_src=0)
        return self._part(flat).clone()

    @property
    def gathered(self) -> bool:
        """Whether the full parameters are there, or on their way."""
        return self._flat.untyped_storage().nbytes() > 0 or self._nbytes == 0

    def begin_gather(self) -> None:
        """Begin to gather: this rank's part is cast to the dtype that is computed in, and then sent."""
        if self.gathered:
            return
        self._flat.untyped_storage().resize_(self._nbytes)
        with torch.no_grad():
            own = self._part(self._flat).copy_(self.shard)
        collectives = collectives_for(self.sharding.process_group)
        self._gathering = collectives.all_gather(self._flat, own, self.sharding.process_group, async_op=True)

    def finish_gather(self) -> None:
        """Wait until every rank's part is there."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def release(self) -> None:
        """Give the memory of the full parameters back."""
        self.finish_gather()
        self._flat.untyped_storage().resize_(0)

    def gathered_once(self) -> list[Tensor]:
        """Full parameters in their own dtype, in memory of their own."""
        shard = self.shard.to(self.sharding.device)
        flat = shard.new_empty(self.sharding.world_size * self._shard_size)
        collectives_for(self.sharding.process_group).all_gather(flat, shard, self.sharding.process_group)
        return [piece.clone() for piece in self._pieces(flat)]

    @property
    def has_gradient(self) -> bool:
        """Whether backward has produced one that is not being reduced."""
        return bool(self._gradients)

    @property
    def reducing(self) -> bool:
        """Whether a reduction is under way."""
        return self._reducing is not None

    def begin_reduce(self) -> None:
        """Begin to sum the gradients over the ranks; one that this rank does not have counts as zero."""
        self._gradient = gradient = self._end_to_end()
        collectives = collectives_for(self.sharding.process_group)
        self._reducing = collectives.reduce_scatter(
            self._part(gradient), gradient, self.sharding.process_group, async_op=True
        )

    def finish_reduce(self) -> None:
        """Wait for the sums, and add the averages to the gradients of this rank's shard."""
        if self._reducing is None or self._gradient is None:
            return
        self._reducing.wait()
        self._reducing = None  # before there is anything new: some backends reduce a copy
        average = torch.empty_like(self.shard)
        average.copy_(self._part(self._gradient)).div_(self.sharding.world_size)
        self._gradient = None
        for parameter, piece in zip(self.parameters, self.own(average), strict=True):
            parameter.grad = piece if parameter.grad is None else parameter.grad.add_(piece)

    def give_up_gradient(self) -> None:
        """Let go of what backward has produced, once the ranks are done with it."""
        if self._reducing is not None:
            self._reducing.wait()
            self._reducing = None
        self._gradient = None
        self._gradients.clear()

    def _take(self, full: nn.Parameter) -> None:
        """Keep a gradient that backward has produced."""
        gradient, full.grad = full.grad, None
        assert gradient is not None
        i = next(i for i, candidate in enumerate(self.full) if candidate is full)
        # It may be a view of what is not ours, so that nothing is added to it in place.
        self._gradients[i] = self._gradients[i] + gradient if i in self._gradients else gradient

    def _end_to_end(self) -> Tensor:
        """All gradients in one flat tensor, each let go of as it is copied; one that is all there is needs no copy."""
        only = self._gradients.get(0)
        if only is not None and only.numel() == self._flat.numel() and only.is_contiguous():
            return self._gradients.pop(0).to(self._reduce_dtype).flatten()
        flat = torch.empty_like(self._flat, dtype=self._reduce_dtype)
        flat[self._offsets[-1] :] = 0  # padding
        for i, piece in enumerate(self._pieces(flat)):
            if i in self._gradients:
                piece.copy_(self._gradients.pop(i))
            else:
                piece.zero_()
        return flat

    def _pieces(self, flat: Tensor) -> list[Tensor]:
        """Each parameter's part of a flat tensor, in its shape."""
        bounds = pairwise(self._offsets)
        return [flat[begin:end].view(shape) for (begin, end), shape in zip(bounds, self.shapes, strict=True)]

    def _part(self, flat: Tensor) -> Tensor:
        """This rank's part of a flat tensor."""
        return flat.narrow(0, self.sharding.rank * self._shard_size, self._shard_size)

    def own(self, shard: Tensor) -> list[Tensor]:
        """Each parameter's part of a shard, one-dimensional."""
        start = self.sharding.rank * self._shard_size
        where = zip(self._offsets, self.intervals(), strict=False)
        return [shard[offset + begin - start :][: end - begin] for offset, (begin, end) in where]

    def intervals(self) -> list[tuple[int, int]]:
        """Which elements of each parameter, flattened, are this rank's: from one to before the other."""
        start = self.sharding.rank * self._shard_size
        return [
            (min(max(start - begin, 0), end - begin), min(max(start + self._shard_size - begin, 0), end - begin))
            for begin, end in pairwise(self._offsets)
        ]


class Unit:
    """A module and the parameters that are gathered when its forward begins.

    `places` are those parameters and where in the module each is found; a tied one is found in several places.
    """

    def __init__(self, module: nn.Module, places: dict[nn.Parameter, list[Place]], sharding: Sharding) -> None:
        self.module = module
        kinds: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
        for parameter in places:
            kinds.setdefault((parameter.dtype, parameter.requires_grad), []).append(parameter)
        self.flats = [Flat(parameters, sharding) for parameters in kinds.values()]
        self._places = [
            (owner, name, parameter, full)
            for flat in self.flats
            for parameter, full in zip(flat.parameters, flat.full, strict=True)
            for owner, name in places[parameter]
        ]
        # The gradient of a table of embeddings is made of the indices alone.
        self.read_in_backward = not all(type(owner) is nn.Embedding for owner, *_ in self._places)
        self.calls = 0
        """Forward passes whose backward is still to come."""
        self.in_backward = False
        self.reduced = False

    def begin_gather(self) -> None:
        """Begin to gather all that is not there."""
        for flat in self.flats:
            flat.begin_gather()

    def finish_gather(self) -> None:
        """Wait for the full parameters and put them into the module."""
        for flat in self.flats:
            flat.finish_gather()
        for owner, name, _, full in self._places:
            owner._parameters[name] = full

    def install_shards(self) -> None:
        """Put this rank's shards into the module; the full parameters stay gathered."""
        for owner, name, parameter, _ in self._places:
            owner._parameters[name] = parameter

    def reshard(self) -> None:
        """Put this rank's shards into the module, and give the memory of the full parameters back."""
        self.install_shards()
        for flat in self.flats:
            flat.release()

    @property
    def has_gradients(self) -> bool:
        """Whether backward has produced some that are not being reduced."""
        return any(flat.has_gradient for flat in self.flats)

    def begin_reduce(self) -> None:
        """Begin to reduce the gradients of what is trainable."""
        self.reduced = True
        for flat in self.flats:
            if flat.trainable:
                flat.begin_reduce()

    def finish_reduce(self) -> None:
        """Wait for the gradients of this rank's shards."""
        for flat in self.flats:
            flat.finish_reduce()

    @property
    def arrived(self) -> list[nn.Parameter]:
        """This rank's shards whose gradient of this step is there, unless somebody has let go of it since."""
        flats = [flat for flat in self.flats if flat.trainable and self.reduced and not flat.reducing]
        return [parameter for flat in flats for parameter in flat.parameters]

    def give_up(self) -> None:
        """Let go of a step that raised: of what is gathered, and of gradients, also of those on their way."""
        self.reshard()
        for flat in self.flats:
            flat.give_up_gradient()
        self.calls, self.in_backward, self.reduced = 0, False, False
