"""Random training on a mesh, beside one process: models of any sizes, any batches, saved and resumed at any time."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor

from correctness.engine import beside
from correctness.engine.histories import events_of, one_in
from correctness.engine.histories_on_ranks import Alike
from correctness.mesh.training import WithASpare, batches, digest, in_float64, optimizer_of, own_batches
from correctness.support.batches import left_as_they_are
from impl.mesh import Decoder, DecoderSize, OneProcess
from shardmark.api import Implementation, Mesh, Unsupported

STEPS = 12
"""Number of different steps, by their batches."""


class Event(beside.Event):
    """The value is the number of a step, by which its batches are drawn."""

    WORDS: ClassVar[Mapping[str, str]] = {
        "step": "a step",
        "save": "the state is saved",
        "resume": "a new trainer loads the last state that was saved, and goes on from there",
        "go_on": "the state is saved; a new trainer takes a step, loads that state, and goes on",
    }


@dataclass(frozen=True)
class History:
    mesh: Mesh
    size: DecoderSize
    spare: bool
    """Has parameters that no forward pass uses."""
    frozen: frozenset[int]
    """Numbers of the parameters that are frozen."""
    adam: bool
    max_norm: float
    events: list[Event]

    def __str__(self) -> str:
        size = self.size
        words = [f"{size.layers} layers of {size.dim}, {size.heads} heads, {size.kv_heads} of keys and values"]
        words += [
            f"{size.hidden} hidden",
            *["tied embeddings"] * size.tied,
            *[f"{size.experts} experts"] * bool(size.experts),
        ]
        words += ["unused parameters"] * self.spare + ["AdamW" if self.adam else "SGD", f"max_norm {self.max_norm:g}"]
        words += [f"parameters {', '.join(map(str, sorted(self.frozen)))} frozen"] * bool(self.frozen)
        return ", ".join(words)


@st.composite
def histories(draw: st.DrawFn, mesh: Mesh) -> History:
    """The ranks divide sizes, and stages layers."""
    kv_heads, per_group = mesh.size * draw(st.integers(1, 2)), draw(st.integers(1, 2))
    size = DecoderSize(
        dim=kv_heads * per_group * 2 * draw(st.integers(1, 2)),
        layers=mesh.size * draw(st.integers(1, 2)),
        heads=kv_heads * per_group,
        kv_heads=kv_heads,
        hidden=mesh.size * draw(st.integers(1, 9)),
        tied=draw(one_in(4)),
        experts=4 if draw(one_in(4)) else 0,
    )
    drawn: set[str] = set()

    def following() -> Event:
        kinds = ["step"] * 3 + ["save", "go_on"] * ("step" in drawn) + ["resume"] * bool({"save", "go_on"} & drawn)
        drawn.add(kind := draw(st.sampled_from(kinds)))
        return Event(kind, draw(st.integers(0, STEPS - 1)))

    events = events_of(draw, draw(st.sampled_from([2, 3, 4, 6])), following)
    frozen = draw(st.frozensets(st.integers(0, 30), max_size=6)) if draw(one_in(2)) else frozenset()
    adam, max_norm = draw(st.booleans()), draw(st.sampled_from([1.0, 0.01, 0.2, 100.0]))
    last = Event("step", draw(st.integers(0, STEPS - 1)))
    return History(mesh, size, draw(one_in(4)), frozen, adam, max_norm, [*events, last])


def model_of(history: History, device: str) -> Decoder:
    """The same model on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(13)
        model = in_float64((WithASpare if history.spare else Decoder)(history.size))
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number not in history.frozen)
    return model.to(device)


class Player(beside.Beside):
    """A trainer on a mesh, beside one process."""

    def __init__(self, implementation: Implementation, history: History, device: str) -> None:
        super().__init__()
        self.history, self.device, self.ranks = history, device, tuple(range(history.mesh.size))
        optimizer = partial(optimizer_of, "frozen_and_unused" if history.adam else "plain")  # kinds that have either
        on = history.mesh.device_mesh(torch.device(device).type)
        self.make = partial(
            implementation.watched, partial(model_of, history, device), optimizer, on, max_norm=history.max_norm
        )
        self.reference = OneProcess(partial(model_of, history, "cpu"), optimizer, None, max_norm=history.max_norm)
        try:
            self.trainer: Any = self.make()
        except Unsupported:
            self.is_refused = True

    def step(self, value: int) -> None:
        mesh = self.history.mesh
        given = own_batches(mesh, self.device, value)
        with left_as_they_are(given):
            found = [float(each) for each in self.trainer.step(given)]
        expected = [float(each) for each in self.reference.step(batches(mesh.row_groups, value))]
        for name, *both in zip(("loss", "norm"), found, expected, strict=True):
            self.differ(f"the {name}", *(torch.tensor(x, dtype=torch.float64) for x in both))
        parameters = self.trainer.full_parameters()
        self._compare("gradient of", self.trainer.full_gradients(), self.reference.full_gradients())
        self._compare("parameter", parameters, self.reference.full_parameters())
        values = {"the loss": found[0], "the norm": found[1], **{n: digest(p) for n, p in parameters.items()}}
        self.alike.append(Alike(self.after, "after a step:", self.ranks, values))

    def _compare(self, what: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        for name in sorted(expected.keys() | found.keys()):
            own = found.get(name)
            self.differ(f"the {what} {name}", None if own is None else own.detach().cpu(), expected.get(name))

    def save(self, value: int) -> None:
        self.saved = BytesIO()
        torch.save(self.trainer.state_dict(), self.saved)
        self.kept = copy.deepcopy((self.reference.model.state_dict(), self.reference.optimizer.state_dict()))

    def resume(self, value: int) -> None:
        self.trainer = self.make()
        self._load()

    def go_on(self, value: int) -> None:
        self.save(value)
        self.trainer = self.make()
        self.trainer.step(own_batches(self.history.mesh, self.device, value))
        self._load()

    def _load(self) -> None:
        self.saved.seek(0)
        self.trainer.load_state_dict(torch.load(self.saved, weights_only=False))
        model, optimizer = copy.deepcopy(self.kept)
        self.reference.model.load_state_dict(model)
        self.reference.optimizer.load_state_dict(optimizer)
