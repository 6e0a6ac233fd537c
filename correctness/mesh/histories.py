"""Random training on a mesh, beside one process: models of any sizes, any batches, saved and resumed at any time."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any, ClassVar

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import Optimizer

from correctness.engine import beside
from correctness.engine.histories import events_of, one_in
from correctness.engine.histories_on_ranks import Alike
from correctness.mesh.not_finite import BAD, EMBEDDING, batches_with_bad, with_a_bad_embedding
from correctness.mesh.training import WithASpare, batches, digest, in_float64, optimizer_of, own_batches
from correctness.support.batches import left_as_they_are
from impl.mesh import Decoder, DecoderSize, OneProcess
from impl.mesh.decoder import Batch
from shardmark.api import Implementation, Mesh, Unsupported

IN_FLOAT32 = 1e-4
"""How near float32 is to one process, relative to the largest value of a tensor."""
STEPS = 12
"""Number of different steps, by their batches."""
MANY = 99
"""Times that the last one of them has each row, so that a rank has thousands of tokens."""


class Event(beside.Event):
    """The value is the number of a step, by which its batches are drawn."""

    WORDS: ClassVar[Mapping[str, str]] = {
        "step": "a step",
        "not_finite": "a step whose loss and gradients are not finite, which changes nothing",
        "finite_loss": "the same, but that the loss is finite",
        "save": "the state is saved",
        "resume": "a new trainer loads the last state that was saved, and goes on from there",
        "rate": "the caller halves the rates of the optimizers that were made",
        "go_on": "the state is saved; a new trainer takes a step, loads that state, and goes on",
        "go_back": "the state is saved; the trainer takes a step, loads that state, and goes on",
    }


@dataclass(frozen=True)
class History:
    mesh: Mesh
    size: DecoderSize
    spare: bool
    """Has parameters that no forward pass uses."""
    frozen: frozenset[int]
    """Numbers of the parameters that are frozen."""
    half_frozen: bool
    """The embedding and the first half of the layers are frozen too. A stage's last frozen layer's `ffn_norm` stays
    trainable, as a stage's optimizer needs a parameter."""
    bad_embedding: bool
    """That of token `BAD` is NaN. Only steps that are not finite read it."""
    adam: bool
    max_norm: float
    dtype: torch.dtype
    events: list[Event]

    def __str__(self) -> str:
        size = self.size
        words = [f"{size.layers} layers of {size.dim}, {size.heads} heads, {size.kv_heads} of keys and values"]
        words += [
            f"{size.hidden} hidden, a vocabulary of {size.vocabulary}",
            *["tied embeddings"] * size.tied,
            *[f"{size.experts} experts"] * bool(size.experts),
        ]
        words += ["unused parameters"] * self.spare + ["an embedding that is not finite"] * self.bad_embedding
        but_norms = " but for norms" * ("pp" in self.mesh.sizes)
        words += [f"the embedding and the first half of the layers frozen{but_norms}"] * self.half_frozen
        words += ["AdamW" if self.adam else "SGD", f"max_norm {self.max_norm:g}"]
        words += [f"parameters {', '.join(map(str, sorted(self.frozen)))} frozen"] * bool(self.frozen)
        words += ["float32"] * (self.dtype == torch.float32)
        return ", ".join(words)


@st.composite
def histories(draw: st.DrawFn, mesh: Mesh) -> History:
    """Stages divide layers, and the ranks sizes; but a vocabulary and a hidden size are divided by tensor parallelism
    alone, as FSDP may cut them unevenly."""
    parts = mesh.sizes.get("tp", 1)
    kv_heads, per_group = mesh.size * draw(st.integers(1, 2)), draw(st.integers(1, 2))
    size = DecoderSize(
        dim=kv_heads * per_group * 2 * draw(st.integers(1, 2)),
        layers=mesh.size * draw(st.integers(1, 2)),
        heads=kv_heads * per_group,
        kv_heads=kv_heads,
        hidden=parts * draw(st.integers(1, 18)),
        vocabulary=DecoderSize.vocabulary + parts * draw(st.integers(0, 3)),
        tied=draw(one_in(4)),
        experts=4 if draw(one_in(4)) else 0,
    )
    drawn: set[str] = set()
    bad = not size.tied and draw(one_in(3))

    def following() -> Event:
        kinds = ["step"] * 3 + ["rate", "save", "go_on", "go_back"] * ("step" in drawn)
        kinds += ["resume"] * bool({"save", "go_on", "go_back"} & drawn)
        kinds += ["not_finite", "finite_loss"] * bad
        drawn.add(kind := draw(st.sampled_from(kinds)))
        return Event(kind, draw(st.integers(0, STEPS - 1)))

    events = events_of(draw, draw(st.sampled_from([2, 3, 4, 6])), following)
    frozen = draw(st.frozensets(st.integers(0, 30), max_size=6)) if draw(one_in(2)) else frozenset()
    adam, max_norm = draw(st.booleans()), draw(st.sampled_from([1.0, 0.01, 0.2, 100.0]))
    last = Event("step", draw(st.integers(0, STEPS - 1)))
    spare, half = draw(one_in(4)), draw(one_in(4))
    dtype = torch.float32 if not size.experts and draw(one_in(4)) else torch.float64  # near shares choose other experts
    return History(mesh, size, spare, frozen, half, bad, adam, max_norm, dtype, [*events, last])


def model_of(history: History, device: str) -> Decoder:
    """The history's model, with the same weights on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(13)
        model = in_float64((WithASpare if history.spare else Decoder)(history.size)).to(history.dtype)
    for number, parameter in enumerate(model.parameters()):
        parameter.requires_grad_(number not in history.frozen)
    if history.half_frozen:
        half = model.layers[: history.size.layers // 2].requires_grad_(False)
        model.tok_embeddings.requires_grad_(False)
        if "pp" in history.mesh.sizes:  # an optimizer takes no empty list
            each = history.size.layers // history.mesh.size
            for layer in half[each - 1 :: each]:
                layer.ffn_norm.requires_grad_(True)
    return (with_a_bad_embedding(model) if history.bad_embedding else model).to(device)


class Player(beside.Beside):
    """A trainer on a mesh, beside one process."""

    def __init__(self, implementation: Implementation, history: History, device: str) -> None:
        super().__init__()
        self.history, self.device, self.ranks = history, device, tuple(range(history.mesh.size))
        self.within = IN_FLOAT32 if history.dtype == torch.float32 else None
        kind = "frozen_and_unused" if history.adam else "plain"  # kinds that have either
        self.optimizers: list[Optimizer] = []

        def optimizer(parameters: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
            self.optimizers.append(optimizer_of(kind, parameters))
            return self.optimizers[-1]

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
        found, expected = self._stepped(self._batches, value)
        for name, *both in zip(("loss", "norm"), found, expected, strict=True):
            self.differ(f"the {name}", *(torch.tensor(x, dtype=torch.float64) for x in both), self.within)
        self._compare("gradient of", self.trainer.full_gradients(), self.reference.full_gradients())
        self._compare_parameters({"the loss": found[0], "the norm": found[1]})

    def not_finite(self, value: int, where: str = "everywhere") -> None:
        self._stepped(partial(batches_with_bad, where), value)
        self._compare_parameters({})

    def finite_loss(self, value: int) -> None:
        self.not_finite(value, "unseen")

    def _batches(self, groups: int, step: int) -> Sequence[Batch]:
        found = batches_with_bad("nowhere", groups, step) if self.history.bad_embedding else batches(groups, step)
        copies = MANY if step == STEPS - 1 else 1
        return [(tokens.repeat(copies, 1), at.repeat(copies, 1), to.repeat(copies, 1)) for tokens, at, to in found]

    def _stepped(self, of: Callable[[int, int], Sequence[Batch]], value: int) -> list[list[float]]:
        """The loss and the norm of a step on these batches, here and in one process."""
        mesh = self.history.mesh
        given = own_batches(mesh, self.device, value, of=of)
        with left_as_they_are(given):
            found = self.trainer.step(given)
        return [[float(x) for x in each] for each in (found, self.reference.step(of(mesh.row_groups, value)))]

    def _compare_parameters(self, values: Mapping[str, Any]) -> None:
        """Compare all parameters with the reference's; note their digests, and `values`, to compare ranks."""
        found = self.trainer.full_parameters()
        self._compare("parameter", found, self.reference.full_parameters())
        values = {**values, **{name: digest(parameter) for name, parameter in found.items()}}
        self.alike.append(Alike(self.after, "after a step:", self.ranks, values))

    def _compare(self, what: str, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
        """Compare tensors by their names. An embedding that is NaN in both counts as zeros."""
        for name in sorted(expected.keys() | found.keys()):
            both = [None if x is None else x.detach().cpu() for x in (found.get(name), expected.get(name))]
            if self.history.bad_embedding and name == EMBEDDING:
                both = [None if x is None else x.index_fill(0, torch.tensor(BAD), 0) for x in both]
            self.differ(f"the {what} {name}", *both, self.within)

    def save(self, value: int) -> None:
        self.saved = BytesIO()
        torch.save(self.trainer.state_dict(), self.saved)
        self.kept = copy.deepcopy((self.reference.model.state_dict(), self.reference.optimizer.state_dict()))

    def resume(self, value: int) -> None:
        self.trainer = self.make()
        self._load()

    def rate(self, value: int) -> None:
        for group in (group for each in self.optimizers for group in each.param_groups):
            group["lr"] *= 0.5

    def go_on(self, value: int) -> None:
        self.go_back(value, self.make)

    def go_back(self, value: int, make: Callable[[], Any] | None = None) -> None:
        self.save(value)
        self.trainer = self.trainer if make is None else make()
        self.trainer.step(own_batches(self.history.mesh, self.device, value, of=self._batches))
        self._load()

    def _load(self) -> None:
        self.saved.seek(0)
        self.trainer.load_state_dict(torch.load(self.saved, weights_only=False))
        model, optimizer = copy.deepcopy(self.kept)
        self.reference.model.load_state_dict(model)
        self.reference.optimizer.load_state_dict(optimizer)
