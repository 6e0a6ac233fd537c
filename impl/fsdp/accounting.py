"""Full sharding: bytes at the peak of one rank's training step, exact on CPU and Gloo, and bytes it must send.

Units of the language model are the blocks, the embedding, the output projection, and the root module with its final
norm.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING

from impl.accounting.beside import BYTES, FLOAT, Technique, beside
from impl.accounting.ledger import Bytes
from impl.accounting.model import training_work
from impl.accounting.plain import PlainLanguageModel
from impl.collectives.accounting import padded, reduce_scatter_buffers, work_of_all
from impl.model.sizes import SIZES
from shardmark.api import BACKWARD, ENTER, GRADIENTS, LEAVE, PARAMETERS, Moment, OwnModelCase, Work, followed

if TYPE_CHECKING:
    from impl.fsdp.cases import FSDPCase

ROOT, EMBEDDING = "", "embedding"

UnitOf = Callable[[str, tuple[int, ...]], str]
"""From a parameter's name and shape to the name of the module whose unit it belongs to."""


def language_model_unit(parameter: str, shape: tuple[int, ...] = ()) -> str:
    """The parameter's unit: its block, the embedding, the output projection, or the root module with its norm."""
    module, *rest = parameter.split(".")
    return f"{module}.{rest[0]}" if module == "blocks" else ROOT if module == "norm" else module


def unit_of_matrices(parameter: str, shape: tuple[int, ...]) -> str:
    """As `language_model_unit`, except that the root module has all parameters with fewer than two dimensions."""
    return language_model_unit(parameter) if len(shape) > 1 else ROOT


class FullySharded(Technique):
    """Our FSDP. A unit is all-gathered in place, `prefetch` units ahead of where it is read, and freed after it, unless
    `reshard_after_forward` is False and it stays from forward to backward.

    When all of a unit's gradients are there, they are copied into one flat tensor (a single one needs no copy), and
    that is reduce-scattered, on CPU around a ring, while the next unit's backward runs. With `offload` shards of
    parameters, gradients and the optimizer's state are in host memory.
    """

    def __init__(
        self,
        ranks: int,
        device: str = "cpu",
        *,
        unit_of: UnitOf = language_model_unit,
        prefetch: int = 1,
        reshard_after_forward: bool = True,
        offload: bool = False,
    ) -> None:
        self.ranks, self.device, self.unit_of, self.offload = ranks, device, unit_of, offload
        self.prefetch, self.reshard_after_forward = prefetch, reshard_after_forward

    def begin(self) -> None:
        self.units: dict[str, list[str]] = {}
        for name, shape in self.plain.parameters.items():
            self.units.setdefault(self.unit_of(name, shape), []).append(name)
        self.missing = {unit: set(names) for unit, names in self.units.items()}
        self.gathered: set[str] = set()
        self.reducing: str | None = None
        self.forward_order = self._order(ENTER)
        # The gradient of the embedding's table is made of the indices alone.
        self.backward_order = [unit for unit in self._order(BACKWARD) if unit != EMBEDDING]
        if self.offload:
            self.ledger.free(PARAMETERS)
        else:
            self.take_shards(sum(map(self.shard, self.units)))

    def _order(self, kind: str) -> list[str]:
        """Units in the order of their moments of that kind."""
        return [moment.name for moment in self.plain.moments if moment.kind == kind and moment.name in self.units]

    def values_of(self, unit: str) -> int:
        """Number of values in a unit's parameters."""
        return sum(prod(self.plain.parameters[name]) for name in self.units[unit])

    def padded(self, unit: str) -> int:
        """Number of values in a unit's parameters, padded to a multiple of the ranks."""
        return padded(self.values_of(unit), self.ranks)

    def shard(self, unit: str) -> int:
        """Bytes of this rank's shard of the unit."""
        return FLOAT * self.padded(unit) // self.ranks

    def full(self, unit: str) -> int:
        """Bytes of the unit, all-gathered."""
        return self.itemsize * self.padded(unit)

    def gathered_bytes(self, unit: str) -> int:
        """Bytes that the unit's full parameters take in addition to its shards."""
        return self.full(unit)

    def buffers(self, unit: str) -> int:
        """Bytes of the buffers with which the unit's gradients are summed over the ranks."""
        return reduce_scatter_buffers(self.full(unit), self.ranks, self.device, self.itemsize)

    def at(self, moment: Moment) -> None:
        unit = moment.name if moment.name in self.units else None
        if moment.kind == ENTER and unit is not None:
            self.gather(unit, self.forward_order)
        elif moment.kind == LEAVE and unit and self.reshard_after_forward:
            self.release(unit)
        elif moment.kind == BACKWARD:
            if unit in self.backward_order:
                self.gather(unit, self.backward_order)
            # Two units have hooks on the tensor between them: the earlier is gathered before the later is reduced.
            for each in [each for each, missing in self.missing.items() if each and not missing]:
                if not f"{moment.name}.".startswith(f"{each}."):
                    self.leave_backward(each)
        super().at(moment)

    def gather(self, unit: str, order: list[str]) -> None:
        """All-gather the unit, and the `prefetch` units after it in `order`."""
        at = order.index(unit)
        for each in order[at : at + 1 + self.prefetch]:
            if each not in self.gathered:
                self.gathered.add(each)
                self.ledger.take(self.full_parameters(each), self.gathered_bytes(each))
                if self.offload and self.itemsize != FLOAT:
                    self.ledger.borrow("shard that is cast on the device", self.shard(each))

    def release(self, unit: str) -> None:
        if unit in self.gathered:
            self.gathered.remove(unit)
            self.ledger.free(self.full_parameters(unit), self.gathered_bytes(unit))

    def full_parameters(self, unit: str) -> str:
        """The ledger's name for a unit's full parameters; without resharding after forward all units share one."""
        return f"full parameters of {_called(unit)}" if self.reshard_after_forward else "full parameters"

    def gradient(self, parameter: str) -> None:
        self.missing[self.unit_of(parameter, self.plain.parameters[parameter])].discard(parameter)

    def leave_backward(self, unit: str) -> None:
        """Start to reduce the unit's gradients, once they and the gradients of its inputs are there."""
        del self.missing[unit]
        self.release(unit)
        self.finish_reduction()
        flat, gradients = self.full(unit), self.itemsize * self.values_of(unit)
        name = f"flat gradients of {_called(unit)}"
        if flat > gradients or len(self.units[unit]) > 1:
            self.ledger.take(name, flat)
            self.ledger.borrow("zero of the padding", self.itemsize)
            self.ledger.free(GRADIENTS, gradients)
        else:
            self.ledger.rename(GRADIENTS, name, flat)
        self.ledger.take("reduce-scatter buffers", self.buffers(unit))
        self.reducing = unit

    def finish_reduction(self) -> None:
        if self.reducing is not None:
            self.ledger.free("reduce-scatter buffers")
            self.ledger.take("shard of gradients", self.shard(self.reducing))
            self.ledger.borrow("number of ranks", 8)  # an int64, which the average divides by
            if self.offload:
                self.ledger.free("shard of gradients")
            self.ledger.free(f"flat gradients of {_called(self.reducing)}")
            self.reducing = None

    def finish(self) -> None:
        """Units whose inputs have no gradient are left after backward, the root module last."""
        for unit in sorted(self.missing, key=self.forward_order.index, reverse=True):
            self.leave_backward(unit)
        self.finish_reduction()


class NormsReplicated(FullySharded):
    """Every rank has the norms' weights, gradients and moments in full. These weights are the root module's unit.

    In float32 their full parameters are the stored ones, otherwise a cast copy. Gradients are all-reduced in place.
    """

    def __init__(self, ranks: int, device: str = "cpu") -> None:
        super().__init__(ranks, device, unit_of=unit_of_matrices)

    def padded(self, unit: str) -> int:
        return super().padded(unit) if unit else self.values_of(unit)

    def shard(self, unit: str) -> int:
        return super().shard(unit) if unit else FLOAT * self.values_of(unit)

    def gathered_bytes(self, unit: str) -> int:
        return super().gathered_bytes(unit) if unit or self.itemsize != FLOAT else 0

    def buffers(self, unit: str) -> int:
        return super().buffers(unit) if unit else 0


def _called(unit: str) -> str:
    return unit or "the root module"


def peak_of(technique: Technique, case: FSDPCase, device: str) -> Bytes:
    """Peak in bytes of a step of the language model with everything in the case's dtype."""
    return beside(followed(PlainLanguageModel.of(case, autocast=False), device), technique).peak


def sharded_peak(case: FSDPCase, device: str = "cpu") -> Bytes:
    """Peak in bytes of `sharded`; with offload on "cuda", without what is in the host's memory."""
    return peak_of(FullySharded(case.ranks, device, offload=case.offload and device == "cuda"), case, device)


def kept_peak(case: FSDPCase, device: str = "cpu") -> Bytes:
    """Peak in bytes where units stay gathered after forward."""
    return peak_of(FullySharded(case.ranks, device, reshard_after_forward=False), case, device)


def plain_peak(case: FSDPCase, device: str = "cpu") -> Bytes:
    """Peak in bytes without prefetch."""
    return peak_of(FullySharded(case.ranks, device, prefetch=0), case, device)


def norms_replicated_peak(case: FSDPCase, device: str = "cpu") -> Bytes:
    """Peak in bytes where the norms' weights are replicated."""
    return peak_of(NormsReplicated(case.ranks, device), case, device)


def work(case: FSDPCase | OwnModelCase, kept: bool = False, norms_replicated: bool = False) -> Work:
    """All ranks' FLOPs and bytes moved, and what each must send.

    Parameters are all-gathered for forward and, unless they are `kept`, for backward: all but the embedding's, whose
    gradient does not read it, and the root module's own. Gradients are reduced once. Each collective sends (n-1)/n of
    the bytes. Replicated parameters are not gathered, and their gradients are all-reduced, which sends as much as one
    gather and one reduction.
    """
    one = training_work(case)
    if isinstance(case, OwnModelCase):  # every unit counts as read in backward
        once = again = case.parameters
    else:
        size = SIZES[case.model]
        table = padded(size.vocab * size.d_model, case.ranks)
        norms = (2 * size.layers + 1 if norms_replicated else 1) * size.d_model
        block = (size.parameters - 2 * size.vocab * size.d_model - norms) // size.layers
        blocks = size.layers * padded(block, case.ranks)
        root = padded(norms, case.ranks)
        once, again = 2 * table + blocks + root, table + blocks
    sent = BYTES[case.dtype] * (2 * once + (0 if kept else again))
    return work_of_all(one, case.ranks, sent * (case.ranks - 1) // case.ranks)
