"""Random training on a mesh, beside one process: models of any sizes, any batches, saved and resumed at any time."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from correctness.engine.histories import events_of, one_in
from correctness.engine.histories_on_ranks import Alike
from correctness.mesh.training import WithASpare, batches, digest, optimizer_of, own_batches
from impl.mesh import Decoder, DecoderSize, OneProcess
from shardmark.api import Implementation, Mesh, Unsupported

WITHIN = 1e-9
"""Relative to the largest value of a tensor, in float64, after several steps."""
STEPS = 12
"""Number of different steps, by their batches."""
EVENTS = {
    "step": "a step",
    "save": "the state is saved",
    "resume": "a new trainer loads the last state that was saved, and goes on from there",
    "go_on": "a new trainer, which has taken a step, loads the state of now, and goes on",
}


class Event(NamedTuple):
    kind: str
    """A key of `EVENTS`."""
    value: int = 0
    """The number of the step, by which its batches are drawn."""

    def __str__(self) -> str:
        return f"{self.kind}({self.value}): {EVENTS[self.kind]}"


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
    kinds = ["step"] * 4 + ["save", "resume", "go_on"]
    events = events_of(
        draw,
        draw(st.sampled_from([2, 3, 4, 6])),
        lambda: Event(draw(st.sampled_from(kinds)), draw(st.integers(0, STEPS - 1))),
    )
    frozen = draw(st.frozensets(st.integers(0, 30), max_size=6)) if draw(one_in(2)) else frozenset()
    adam, max_norm = draw(st.booleans()), draw(st.sampled_from([1.0, 0.01, 0.2, 100.0]))
    last = Event("step", draw(st.integers(0, STEPS - 1)))
    return History(mesh, size, draw(one_in(4)), frozen, adam, max_norm, [*events, last])


def model_of(history: History, device: str) -> Decoder:
    """The same model on every rank, in float64. Its norms' weights are not 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(13)
        model = (WithASpare if history.spare else Decoder)(history.size).double()
        for number, parameter in enumerate(model.parameters()):
            if parameter.ndim == 1:
                nn.init.uniform_(parameter, 0.5, 1.5)
            parameter.requires_grad_(number not in history.frozen)
    return model.to(device)


class Beside:
    """A trainer on a mesh, and one process, on this rank; each event runs on both."""

    def __init__(self, implementation: Implementation, history: History, device: str) -> None:
        self.history, self.device, self.after, self.wrong = history, device, 0, ""
        self.alike: list[Alike] = []
        self.ranks = tuple(range(history.mesh.size))
        optimizer = partial(optimizer_of, "frozen_and_unused" if history.adam else "plain")
        on = history.mesh.device_mesh(torch.device(device).type)
        self.make = partial(
            implementation.watched, partial(model_of, history, device), optimizer, on, max_norm=history.max_norm
        )
        self.plain = OneProcess(partial(model_of, history, "cpu"), optimizer, None, max_norm=history.max_norm)
        self.trainer: Any = None
        with suppress(Unsupported):  # no event says anything then
            self.trainer = self.make()
            self.save()

    def play(self, event: Event) -> None:
        self.after += 1
        if self.trainer is not None:
            getattr(self, event.kind)(event.value)

    def problem(self) -> str:
        return self.wrong

    def step(self, value: int) -> None:
        mesh = self.history.mesh
        found = [float(each) for each in self.trainer.step(own_batches(mesh, self.device, value))]
        expected = [float(each) for each in self.plain.step(batches(mesh.row_groups, value))]
        for name, own, right in zip(("the loss", "the norm"), found, expected, strict=True):
            if not self.wrong and not math.isclose(own, right, rel_tol=WITHIN, abs_tol=1e-15):
                self.wrong = f"{name} is {own:.12g}, in one process {right:.12g}"
        self._compare("the gradient of", self.trainer.full_gradients(), self.plain.full_gradients())
        parameters = self.trainer.full_parameters()
        self._compare("the parameter", parameters, self.plain.full_parameters())
        values = {"the loss": found[0], "the norm": found[1], **{n: digest(p) for n, p in parameters.items()}}
        self.alike.append(Alike(self.after, "after a step:", self.ranks, values))

    def _compare(self, what: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        """Note the first difference; zeros may stand for no gradient."""
        for name, right in expected.items():
            own = found.get(name, torch.zeros_like(right) if "gradient" in what else None)
            if self.wrong:
                return
            if own is None or own.shape != right.shape:
                self.wrong = f"{what} {name} is {'missing' if own is None else f'of shape {tuple(own.shape)}'}"
            elif not (error := (own.cpu() - right).abs().max()) <= WITHIN * (
                large := right.abs().max().clamp(min=1e-6)
            ):
                self.wrong = f"{what} {name} is off by {error / large:.3g} of its largest value"

    def save(self, value: int = 0) -> None:
        self.saved = BytesIO()
        torch.save(self.trainer.state_dict(), self.saved)
        self.kept = copy.deepcopy((self.plain.model.state_dict(), self.plain.optimizer.state_dict()))

    def resume(self, value: int) -> None:
        self.trainer = self.make()
        self._load()

    def go_on(self, value: int) -> None:
        self.save()
        self.trainer = self.make()
        self.trainer.step(own_batches(self.history.mesh, self.device, value))
        self._load()

    def _load(self) -> None:
        self.saved.seek(0)
        self.trainer.load_state_dict(torch.load(self.saved, weights_only=False))
        model, optimizer = copy.deepcopy(self.kept)
        self.plain.model.load_state_dict(model)
        self.plain.optimizer.load_state_dict(optimizer)
