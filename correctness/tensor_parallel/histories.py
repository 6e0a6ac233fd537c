"""Random histories of a parallel model, beside the same model in one process: what it holds for, event by event."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from correctness.engine.histories import events_of, one_in
from correctness.engine.histories_on_ranks import Alike
from correctness.support.batches import left_as_they_are, packed
from correctness.tensor_parallel.training import weighted
from impl.distributed import full
from impl.mesh import Decoder, DecoderSize
from impl.mesh.decoder import IGNORED, Batch, losses_of
from impl.tensor_parallel.placing import local
from shardmark.api import Implementation, Mesh, Unsupported

WITHIN = 1e-9
"""Relative to the largest value of a tensor, in float64, after several steps."""
RATE, FACTOR = 0.02, 0.75

EVENTS = {
    "losses": "a call with targets, which waits for its backward pass",
    "logits": "a call without targets, which waits for its backward pass",
    "recompute": "a call with targets that backward runs again (checkpoint), and which waits for it",
    "evaluate": "a call without autograd",
    "backward": "the backward pass of a waiting call",
    "drop": "a waiting call is freed",
    "step": "each parameter takes a step of its gradient; what waits is dropped",
    "clear": "gradients to None",
    "zero": "gradients to zero, in place",
    "scale": "gradients scaled in place, as clipping does",
    "freeze": "a parameter frozen, or thawed, while no call waits",
    "weights": "a parameter changed in place by the caller, while no call waits",
    "mode": "train() or eval(), while no call waits",
}


class Event(NamedTuple):
    kind: str
    """A key of `EVENTS`."""
    value: int = 0
    """A seed of the batch, or the number of a waiting call or of a parameter, modulo how many there are."""

    def __str__(self) -> str:
        return f"{self.kind}({self.value}): {EVENTS[self.kind]}"


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
    events: list[Event]

    def __str__(self) -> str:
        size = self.size
        words = [f"{size.layers} layers of {size.dim}", f"{size.heads} heads, {size.kv_heads} of keys and values"]
        words += [f"{size.hidden} hidden", f"a vocabulary of {size.vocabulary}"]
        words += ["tied embeddings"] * size.tied + ["fused products"] * size.fused
        words += [f"biases of {', '.join(sorted(self.biases))}"] * bool(self.biases)
        words += [f"parameters {', '.join(map(str, self.frozen))} frozen"] * bool(self.frozen)
        return ", ".join(words)


@st.composite
def histories(draw: st.DrawFn, mesh: Mesh) -> History:
    """More than half are of plain models, as an implementation may refuse others."""
    ranks = mesh.size
    kv_heads, per_group = ranks * draw(st.integers(1, 2)), draw(st.integers(1, 3))
    head_dim, plain = 2 * draw(st.integers(1, 2)), not draw(one_in(3))
    if not plain and draw(one_in(3)):
        kv_heads, per_group = 1, ranks * draw(st.integers(1, 2))
    uneven = not plain and draw(one_in(3))
    heads = kv_heads * per_group
    size = DecoderSize(
        dim=heads * head_dim,
        layers=draw(st.integers(1, 2)),
        heads=heads,
        kv_heads=kv_heads,
        hidden=ranks * draw(st.integers(1, 9)) + uneven,
        vocabulary=ranks * draw(st.integers(2, 9)) + uneven * draw(st.integers(0, 1)),
        tied=not plain and draw(one_in(3)),
        fused=not plain and draw(one_in(3)),
    )
    linear = ["w1", "w2", "w3", "wo", "output", *(["wqkv"] if size.fused else ["wq", "wk", "wv"])]
    biases = draw(st.frozensets(st.sampled_from(linear))) if not plain and draw(one_in(2)) else frozenset()
    frozen = tuple(draw(st.lists(st.integers(0, 30), max_size=6))) if not plain and draw(one_in(2)) else ()
    waiting = 0

    def following() -> Event:
        nonlocal waiting
        kinds = ["losses", "logits", "evaluate", "recompute"] + ["backward"] * 4 * bool(waiting)
        kinds += ["drop"] * bool(waiting) + ["step", "clear", "zero", "scale", "weights", "mode"] + ["freeze"] * 2
        kind = draw(st.sampled_from(kinds))
        waiting += {"losses": 1, "logits": 1, "recompute": 1, "backward": -1, "drop": -1}.get(kind, 0)
        waiting = 0 if kind in ("step", "freeze", "weights", "mode") else waiting
        return Event(kind, draw(st.integers(0, 255)))

    events = events_of(draw, draw(st.sampled_from([4, 6, 8, 10, 12])), following)
    last = [Event("losses", draw(st.integers(0, 255))), Event("backward"), Event("step"), Event("evaluate", 1)]
    return History(mesh, size, biases, frozen, uneven, [*events, *last])


def model_of(history: History, device: str) -> Decoder:
    """The same model on every rank, in float64. Its norms' weights are not 1, nor its biases 0."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        model = weighted(Decoder(history.size), lambda name: name.rpartition(".")[2] in history.biases)
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


class Beside:
    """A parallel model, and one in one process, on this rank; each event runs on both."""

    def __init__(self, implementation: Implementation, history: History, device: str) -> None:
        self.history, self.device, self.after, self.wrong = history, device, 0, ""
        self.plain = model_of(history, device)
        self.waiting: list[Waiting] = []
        self.returned: list[tuple[Tensor, Tensor]] = []
        """Results of calls, and copies: users read them late."""
        self.alike: list[Alike] = []
        self.model: nn.Module | None = None
        on = history.mesh.device_mesh(torch.device(device).type)
        self.ranks = tuple(range(history.mesh.size))
        with suppress(Unsupported):  # no event says anything then
            self.model = implementation.watched(copy.deepcopy(self.plain), on["tp"])

    def play(self, event: Event) -> None:
        self.after += 1
        if self.model is not None:
            getattr(self, event.kind)(event.value)

    def problem(self) -> str:
        if not self.wrong and any(not torch.equal(output, kept) for output, kept in self.returned):
            return "what an earlier call returned is another value now"
        return self.wrong

    def differ(self, what: str, found: Tensor | None, expected: Tensor | None) -> None:
        """Note the first difference."""
        if self.wrong or (found is None and (expected is None or not expected.any())):
            return
        if found is None or expected is None:
            if expected is not None:
                self.wrong = f"{what} is missing"
            elif found is not None and found.any():
                self.wrong = f"{what} is there, and one process has none"
        elif found.shape != expected.shape or found.dtype != expected.dtype:
            self.wrong = f"{what} is {found.dtype} {tuple(found.shape)}, not {expected.dtype} {tuple(expected.shape)}"
        else:
            error, largest = (found - expected).abs().max(), expected.abs().max().clamp(min=1e-3)
            if not error <= WITHIN * largest:
                self.wrong = f"{what} is off by {error / largest:.3g} of its largest value"

    def pairs(self) -> Iterator[tuple[str, nn.Parameter, nn.Parameter]]:
        """Parameters by name: of the parallel model, and of the plain one."""
        assert self.model is not None
        found = dict(self.model.named_parameters())
        for name, parameter in self.plain.named_parameters():
            yield name, found[name], parameter

    def compare_gradients(self) -> None:
        every = [(name, p.grad, right.grad) for name, p, right in self.pairs()]
        for name, found, expected in every:
            whole = None if found is None else full(found)
            self.differ(f"the gradient of {name}", whole, expected)

    def compare_parameters(self) -> None:
        for name, found, expected in self.pairs():
            self.differ(f"the parameter {name}", full(found.detach()), expected.detach())

    def called(self, value: int, with_targets: bool, recomputed: bool = False) -> Waiting:
        assert self.model is not None
        batch = batch_of(value, self.history, self.device)
        given = batch if with_targets else batch[:2]
        call: Callable[..., Tensor] = partial(checkpoint, self.model, use_reentrant=False) if recomputed else self.model
        with left_as_they_are([given]):
            found = call(*given)
        logits = self.plain(*batch[:2])
        expected = losses_of(logits, batch[2]) if with_targets else logits
        what = "the loss" if with_targets else "of the logits, one"
        self.differ(what, found.detach(), expected.detach())
        self.returned.append((found.detach(), found.detach().clone()))
        if with_targets:
            self.alike.append(Alike(self.after, "what a call returned:", self.ranks, {"the loss": found.item()}))
        return Waiting(found, expected)

    def losses(self, value: int) -> None:
        self.waiting.append(self.called(value, with_targets=True))

    def logits(self, value: int) -> None:
        self.waiting.append(self.called(value, with_targets=False))

    def recompute(self, value: int) -> None:
        self.waiting.append(self.called(value, with_targets=True, recomputed=True))

    def evaluate(self, value: int) -> None:
        with torch.no_grad():
            found = self.called(value, with_targets=bool(value % 2)).found
        if found.requires_grad:
            self.wrong = self.wrong or "what was computed without autograd requires a gradient"

    def backward(self, value: int) -> None:
        """Run the backward pass of a sum, whose gradient is expanded, or of the values by random weights."""
        if not self.waiting:
            return
        each = self.waiting.pop(value % len(self.waiting))
        random = torch.Generator().manual_seed(value)
        by = torch.randn(each.expected.shape, generator=random, dtype=torch.float64).to(self.device)
        for output in (each.found, each.expected):
            (output.sum() if value % 3 == 0 else (output * by).sum()).backward()
        self.compare_gradients()

    def drop(self, value: int) -> None:
        if self.waiting:
            self.waiting.pop(value % len(self.waiting))

    def step(self, value: int) -> None:
        self.waiting.clear()
        for _, own, right in self.pairs():
            if own.grad is not None and right.grad is not None:
                grad = own.grad
                if isinstance(grad, DTensor) and isinstance(own, DTensor):
                    grad = grad.redistribute(own.device_mesh, own.placements)
                local(own.detach()).sub_(RATE * local(grad))
                right.detach().sub_(RATE * right.grad)
        self.compare_parameters()

    def clear(self, value: int) -> None:
        for _, own, right in self.pairs():
            own.grad = right.grad = None

    def zero(self, value: int) -> None:
        self.scale(0)

    def scale(self, value: int) -> None:
        for _, own, right in self.pairs():
            for each in (own, right):
                if each.grad is not None:
                    local(each.grad).mul_(FACTOR * bool(value))

    def freeze(self, value: int) -> None:
        self.waiting.clear()
        every = list(self.pairs())
        _, own, right = every[value % len(every)]
        if not right.requires_grad or sum(p.requires_grad for _, _, p in every) > 1:
            for each in (own, right):
                each.requires_grad_(not each.requires_grad)

    def weights(self, value: int) -> None:
        self.waiting.clear()
        every = list(self.pairs())
        _, own, right = every[value % len(every)]
        for each in (own, right):
            local(each.detach()).mul_(-FACTOR)

    def mode(self, value: int) -> None:
        assert self.model is not None
        self.waiting.clear()
        for each in (self.model, self.plain):
            each.train(bool(value % 2))
