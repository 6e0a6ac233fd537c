"""Random histories of a parallel model, beside the same model in one process: what it holds for, event by event."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from correctness.engine import beside
from correctness.engine.histories import events_of, one_in
from correctness.engine.histories_on_ranks import Alike
from correctness.support.batches import left_as_they_are, packed
from correctness.tensor_parallel.training import LARGE, weighted
from impl.distributed import full, local
from impl.mesh import Decoder, DecoderSize
from impl.mesh.decoder import IGNORED, Batch, losses_of
from shardmark.api import Implementation, Mesh, Unsupported


class Event(beside.Event):
    WORDS = beside.ParametersChange.WORDS | {
        "losses": "a call with targets, which waits for its backward pass",
        "logits": "a call without targets, which waits for its backward pass",
        "recompute": "a call with targets that backward runs again (checkpoint), and which waits for it",
        "evaluate": "a call without autograd, in inference mode if the number is 2 modulo 3",
        "backward": "the backward pass of a waiting call, which goes on waiting if the number is 1 modulo 4",
        "drop": "a waiting call is freed",
        "fail": "a call with a row of positions too many, whose error the caller takes",
        "step": "each parameter takes a step of its gradient",
        "another": "another model on the same ranks is called and passes back, made anew if the number is even",
    }


ENDS_WAITING = ("step", "freeze", "weights", "mode")
"""Events that no call waits through."""


@dataclass(frozen=True)
class History:
    mesh: Mesh
    size: DecoderSize
    biases: frozenset[str]
    """Names of the linear layers that have one, by the last part."""
    frozen: tuple[int, ...]
    """Numbers of the parameters that are frozen from the start."""
    uneven: bool
    """Whether the ranks divide neither sizes nor contexts."""
    output_scale: float
    """Factor of the output's weight; steps are so much smaller."""
    events: list[Event]

    def __str__(self) -> str:
        size = self.size
        words = [f"{size.layers} layers of {size.dim}", f"{size.heads} heads, {size.kv_heads} of keys and values"]
        words += [f"{size.hidden} hidden", f"a vocabulary of {size.vocabulary}"]
        words += ["tied embeddings"] * size.tied + ["fused products"] * size.fused
        words += [f"biases of {', '.join(sorted(self.biases))}"] * bool(self.biases)
        words += [f"parameters {', '.join(map(str, self.frozen))} frozen"] * bool(self.frozen)
        words += ["logits in the thousands"] * (self.output_scale > 1)
        return ", ".join(words)


@st.composite
def histories(draw: st.DrawFn, mesh: Mesh) -> History:
    """Most are of models that every implementation takes."""
    ranks = mesh.size
    kv_heads, per_group = ranks * draw(st.integers(1, 2)), draw(st.integers(1, 3))
    head_dim, usual = 2 * draw(st.integers(1, 2)), not draw(one_in(3))
    if not usual and draw(one_in(3)):
        kv_heads, per_group = 1, ranks * draw(st.integers(1, 2))
    uneven = not usual and draw(one_in(3))
    heads = kv_heads * per_group
    size = DecoderSize(
        dim=heads * head_dim,
        layers=draw(st.integers(1, 2)),
        heads=heads,
        kv_heads=kv_heads,
        hidden=ranks * draw(st.integers(1, 9)) + uneven,
        vocabulary=ranks * draw(st.integers(2, 9)) + uneven * draw(st.integers(0, 1)),
        tied=not usual and draw(one_in(3)),
        fused=not usual and draw(one_in(3)),
    )
    linear = ["w1", "w2", "w3", "wo", "output", *(["wqkv"] if size.fused else ["wq", "wk", "wv"])]
    biases = draw(st.frozensets(st.sampled_from(linear))) if not usual and draw(one_in(2)) else frozenset()
    frozen = tuple(draw(st.lists(st.integers(0, 30), max_size=6))) if not usual and draw(one_in(2)) else ()
    output_scale = LARGE if not size.tied and draw(one_in(4)) else 1.0
    waiting = 0

    def following() -> Event:
        nonlocal waiting
        kinds = ["losses", "logits", "evaluate", "recompute"] + ["backward"] * 4 * bool(waiting)
        kinds += ["drop"] * bool(waiting) + ["step", "clear", "zero", "scale", "weights", "mode", "another", "fail"]
        kinds += ["freeze"] * 2 * (not usual)
        kind = draw(st.sampled_from(kinds))
        waiting += {"losses": 1, "logits": 1, "recompute": 1, "backward": -1, "drop": -1}.get(kind, 0)
        waiting = 0 if kind in ENDS_WAITING else waiting
        return Event(kind, draw(st.integers(0, 255)))

    events = events_of(draw, draw(st.sampled_from([4, 6, 8, 10, 12])), following)
    last = [Event("losses", draw(st.integers(0, 255))), Event("backward"), Event("step"), Event("evaluate", 1)]
    return History(mesh, size, biases, frozen, uneven, output_scale, [*events, *last])


def model_of(history: History, device: str) -> Decoder:
    """The history's model in float64, with the same weights on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = Decoder(history.size)
        model = weighted(model, lambda name: name.rpartition(".")[2] in history.biases, history.output_scale)
    parameters = list(model.parameters())
    for number in history.frozen:
        parameters[number % len(parameters)].requires_grad_(False)
    return model.to(device)


def batch_of(seed: int, history: History, device: str) -> Batch:
    """Rows of several lengths, which the ranks divide if they divide the model's sizes. The memory of some lies in
    another order; targets are left out here and there, and in some batches everywhere; in most, positions begin again
    within a row."""
    random = torch.Generator().manual_seed(seed)
    ranks, length = history.mesh.size, seed // 3 % 8
    shape = 1 + seed % 3, ranks + length if history.uneven else ranks * (1 + length)
    tokens, targets = (torch.randint(history.size.vocabulary, shape, generator=random) for _ in range(2))
    targets[torch.rand(shape, generator=random) > 0.7] = IGNORED
    if seed % 16 == 15:
        targets.fill_(IGNORED)
    positions = packed(*shape, random) if seed % 4 else torch.arange(shape[1]).expand(shape)
    batch = tokens.to(device), positions.to(device), targets.to(device)
    if seed % 2:
        return batch
    tokens, positions, targets = (each.t().contiguous().t() for each in batch)
    return tokens, positions, targets


@dataclass
class Waiting:
    """The result of a call, and that of one process."""

    found: Tensor
    expected: Tensor


class Player(beside.ParametersChange):
    """A parallel model on this rank, beside one in one process."""

    def __init__(self, implementation: Implementation, history: History, device: str) -> None:
        super().__init__()
        self.implementation, self.history, self.device = implementation, history, device
        self.ranks = tuple(range(history.mesh.size))
        self.other: Player | None = None
        self.reference = model_of(history, device)
        self.waiting: list[Waiting] = []
        on = history.mesh.device_mesh(torch.device(device).type)
        try:
            self.model: nn.Module = implementation.watched(copy.deepcopy(self.reference), on["tp"])
        except Unsupported:
            self.is_refused = True

    def play(self, event: beside.Event) -> None:
        if event.kind in ENDS_WAITING:
            self.waiting.clear()
        super().play(event)

    def both(self) -> dict[str, list[nn.Parameter]]:
        found = dict(self.model.named_parameters())
        return {name: [parameter, found[name]] for name, parameter in self.reference.named_parameters()}

    def modules(self) -> list[nn.Module]:
        return [self.reference, self.model]

    def called(self, value: int, with_targets: bool, recomputed: bool = False) -> Waiting:
        batch = batch_of(value, self.history, self.device)
        given = batch if with_targets else batch[:2]
        call: Callable[..., Tensor] = partial(checkpoint, self.model, use_reentrant=False) if recomputed else self.model
        with left_as_they_are([given]):
            found = call(*given)
        logits = self.reference(*batch[:2])
        expected = losses_of(logits, batch[2]) if with_targets else logits
        what = "the loss" if with_targets else "of the logits, one"
        self.differ(what, found.detach(), expected.detach())
        self.keep(found)
        if with_targets:
            self.alike.append(Alike(self.after, "what a call returned:", self.ranks, {"the loss": found.item()}))
        return Waiting(found, expected)

    def losses(self, value: int) -> None:
        self.waiting.append(self.called(value, with_targets=True))

    def logits(self, value: int) -> None:
        self.waiting.append(self.called(value, with_targets=False))

    def recompute(self, value: int) -> None:
        self.waiting.append(self.called(value, with_targets=True, recomputed=True))

    def fail(self, value: int) -> None:
        tokens, positions, targets = batch_of(value, self.history, self.device)
        with suppress(Exception):
            self.model(tokens, torch.cat([positions, positions[:1]]), targets)

    def evaluate(self, value: int) -> None:
        with torch.inference_mode() if value % 3 == 2 else torch.no_grad():
            found = self.called(value, with_targets=bool(value % 2)).found
        if found.requires_grad:
            self.wrong = self.wrong or "what was computed without autograd requires a gradient"

    def backward(self, value: int) -> None:
        """Run the backward pass of a sum, whose gradient is expanded, or of the values by random weights."""
        number, again = value % len(self.waiting), value % 4 == 1
        each = self.waiting[number] if again else self.waiting.pop(number)
        random = torch.Generator().manual_seed(value)
        by = torch.randn(each.expected.shape, generator=random, dtype=torch.float64).to(self.device)
        for output in (each.found, each.expected):
            (output.sum() if value % 3 == 0 else (output * by).sum()).backward(retain_graph=again)
        for name, (right, own) in self.both().items():
            self.differ(f"the gradient of {name}", None if own.grad is None else full(own.grad), right.grad)

    def another(self, value: int) -> None:
        if self.other is None or value % 2 == 0:
            self.other = None
            self.other = Player(self.implementation, self.history, self.device)
            self.other.multiply_weights(-beside.FACTOR)
        for event, given in (("losses", value), ("backward", 0), ("clear", 0)):
            self.other.play(Event(event, given))
        problem = self.other.problem()
        self.wrong = self.wrong or (problem and f"of another model, {problem}")

    def multiply_weights(self, by: float) -> None:
        self.of_all(lambda p: local(p.detach()).mul_(by))

    def drop(self, value: int) -> None:
        self.waiting.pop(value % len(self.waiting))

    def step(self, value: int) -> None:
        for name, (right, own) in self.both().items():
            if own.grad is not None and right.grad is not None:
                grad = own.grad
                if isinstance(grad, DTensor) and isinstance(own, DTensor):
                    grad = grad.redistribute(own.device_mesh, own.placements)
                rate = beside.RATE / self.history.output_scale
                local(own.detach()).sub_(rate * local(grad))
                right.detach().sub_(rate * right.grad)
            self.differ(f"the parameter {name}", full(own.detach()), right.detach())
