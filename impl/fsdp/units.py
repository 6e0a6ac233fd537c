"""A unit: parameters that are all-gathered together before use, and whose gradients are reduced together."""

from __future__ import annotations

import torch
from torch import nn

from impl.fsdp.flat_parameters import Flat, Sharding

Place = tuple[nn.Module, str]
"""A module and the name of a parameter in it."""


class Calls:
    """The calls of a unit in one forward pass of the wrapper; the hooks in its graph share them."""

    def __init__(self) -> None:
        self.number = 0
        self.ended = 0
        """Number of those whose backward is complete."""
        self.end_unseen = False
        """True if no hook tells when the backward of one of them is complete."""

    def end_one(self) -> bool:
        """Count one whose backward is complete; return whether all are. A graph that is kept may run again."""
        self.ended += 1
        return not self.end_unseen and self.ended % self.number == 0


class Unit:
    """A module and the parameters that are all-gathered before its forward.

    `places` are those parameters and where in the module each is found; a tied one is found in several places.
    """

    def __init__(self, module: nn.Module, places: dict[nn.Parameter, list[Place]], sharding: Sharding) -> None:
        self.module = module
        self.flats: list[Flat] = []
        self._places: list[tuple[nn.Module, str, nn.Parameter, nn.Parameter]] = []
        self.add(places, sharding)
        self.calls = Calls()
        """The calls of this unit in the wrapper's last forward pass."""
        self.in_backward = False
        """True if backward has begun and full parameters have been gathered for it."""
        self.reduced = False
        self.given: set[int] = set()
        """The ids of the tensors that its last forward was given, of a view that of its base."""

    def add(self, places: dict[nn.Parameter, list[Place]], sharding: Sharding, kind: type[Flat] = Flat) -> None:
        """Add these parameters to the unit."""
        kinds: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
        for parameter in places:
            kinds.setdefault((parameter.dtype, parameter.requires_grad), []).append(parameter)
        flats = [kind(parameters, sharding) for parameters in kinds.values()]
        self.flats += flats
        self._places += [
            (owner, name, parameter, full)
            for flat in flats
            for parameter, full in zip(flat.parameters, flat.full, strict=True)
            for owner, name in places[parameter]
        ]
        # Backward of an embedding reads the indices alone, so its table is not gathered for it.
        self.read_in_backward = not all(type(owner) is nn.Embedding for owner, *_ in self._places)

    def begin_gather(self) -> None:
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
        """Put this rank's shards into the module, and free the full parameters."""
        self.install_shards()
        for flat in self.flats:
            flat.release()
        self.in_backward = False

    @property
    def has_gradients(self) -> bool:
        """True if backward has produced a gradient that is not yet being reduced."""
        return any(flat.has_gradient for flat in self.flats)

    def begin_reduce(self) -> None:
        self.reduced = True
        for flat in self.flats:
            if flat.trainable:
                flat.begin_reduce()

    def finish_reduce(self) -> None:
        for flat in self.flats:
            flat.finish_reduce()

    @property
    def reduced_parameters(self) -> list[nn.Parameter]:
        """The shards whose gradient of this step is reduced; its `.grad` may have been set to None since."""
        flats = [flat for flat in self.flats if flat.trainable and self.reduced and not flat.reducing]
        return [parameter for flat in flats for parameter in flat.parameters]

    def discard_step(self) -> None:
        """Free the full parameters and gradients of a step that raised, including gradients being reduced."""
        self.reshard()
        for flat in self.flats:
            flat.discard_gradients()
        self.reduced = False
