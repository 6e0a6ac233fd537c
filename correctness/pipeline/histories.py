"""Random pipelines and their histories, beside one process: stages that give one another any tensors, and steps between
which callers change what they like."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn

from correctness.engine import beside
from correctness.engine.histories import events_of, one_in
from correctness.engine.precision import EXACT, Precision, precisions
from correctness.pipeline.plain import CONTEXT, HIDDEN, VOCABULARY
from correctness.pipeline.stages import Tensors, loss
from correctness.pipeline.training import group_of, named
from correctness.support.batches import left_as_they_are
from correctness.support.default_dtype import default_dtype
from impl.mesh.decoder import IGNORED
from shardmark.api import Implementation, Mesh, Unsupported

MOST_STAGES = 9

OUTPUTS = (
    "rows", "number", "expanded", "rounded", "integers", "few bits", "mask", "constant", "at times", "given",
    "numbers of none", "infinite",
)  # fmt: skip
"""Tensors that a stage may give beside its values: a number of each row; one of all rows, and the same for each row in
one place; one in a half; integers that float64 does not have; some of fewer bits, which float32 or a half does not
have; a mask; floats that need no gradient, and some that need one in some micro-batches alone; the first tensor that it
was given; one without elements; and one that is minus infinity in some rows, as what is added to scores, and needs a
gradient."""

FEW_BITS = (torch.int32, torch.uint8, torch.int8)

UNUSUAL = ("cut", "spare", "again", "sometimes")
"""Ways in which gradients of a stage may not come, or come twice: its values are detached from those that it was given;
a layer that nobody calls; a weight that is in two layers; and a layer that some micro-batches use."""


class Event(beside.Event):
    WORDS = beside.ParametersChange.WORDS | {
        "step": "a step, without the caller's autocast if the number is 3 modulo 4",
        "another": "a step of another pipeline on the same ranks, which is made anew if the number is even",
        "memory": "a parameter gets other memory (.data)",
        "evaluate": "the caller passes a micro-batch through the stages, without autograd",
        "call": "the caller passes a micro-batch through each stage, and back",
        "update": "each parameter takes a step of its gradient",
    }


class Boundary(NamedTuple):
    """The tensors that a stage gives the next one, and which of them that one uses."""

    width: int
    beside: tuple[str, ...]
    """Some of `OUTPUTS`."""
    place: int
    """Number of the values among the tensors."""
    transposed: bool
    """The values are a view whose rows do not lie one after the other."""
    folded: bool
    """The values have six dimensions."""
    used: int
    """A mask of the tensors beside the values that the next stage uses."""

    def __str__(self) -> str:
        beside = f" and {', '.join(self.beside)}" if self.beside else ""
        values = f"{'transposed ' * self.transposed}{'folded ' * self.folded}values"
        return f"{values} at {self.place}{beside} (used: {self.used:b})"


@dataclass(frozen=True)
class History:
    mesh: Mesh
    micro_batches: int
    unequal: bool
    boundaries: tuple[Boundary, ...]
    """Behind stage 0, 1, and so on; more than there may be."""
    unusual: tuple[tuple[str, ...], ...]
    """Some of `UNUSUAL` for each stage; more than there may be."""
    frozen: tuple[int, ...]
    """Numbers of the parameters that are frozen from the start; a stage's begin at five times its own."""
    events: list[Event]
    precision: Precision = EXACT

    def __str__(self) -> str:
        words = [f"{self.micro_batches} micro-batches{' of any rows' * self.unequal}"]
        words += [f"stage {i} gives {each}" for i, each in enumerate(self.boundaries[: self.mesh.size - 1])]
        words += [f"stage {i} has {', '.join(each)}" for i, each in enumerate(self.unusual) if each]
        words += [f"parameters {', '.join(map(str, self.frozen))} frozen"] * bool(self.frozen)
        words += [f"in {self.precision}"] * (self.precision != EXACT)
        return "; ".join(words)


@st.composite
def histories(draw: st.DrawFn, mesh: Mesh) -> History:
    def boundary() -> Boundary:
        beside = tuple(draw(st.lists(st.sampled_from(OUTPUTS), max_size=3)))
        transposed, folded = draw(one_in(3)), draw(one_in(4))
        place, used = draw(st.integers(0, len(beside))), draw(st.integers(0, 7))
        return Boundary(2 * draw(st.integers(1, 4)), beside, place, transposed, folded, used)

    kinds = ["step"] * 4 + ["evaluate", "call", "update", "update", "clear", "zero", "scale", "weights", "mode"]
    kinds += ["freeze", "freeze", "another", "memory"]
    events = events_of(
        draw, draw(st.sampled_from([2, 4, 6, 8])), lambda: Event(draw(st.sampled_from(kinds)), draw(st.integers(0, 99)))
    )
    frozen = () if draw(st.booleans()) else tuple(draw(st.lists(st.integers(0, 20), max_size=5)))
    boundaries = tuple(boundary() for _ in range(MOST_STAGES))
    unusual = tuple(tuple(way for way in UNUSUAL if draw(one_in(6))) for _ in range(MOST_STAGES))
    count, unequal = draw(st.integers(1, 6)), draw(one_in(2))
    events.append(Event("step", draw(st.integers(0, 99))))
    return History(mesh, count, unequal, boundaries, unusual, frozen, events, draw(precisions()))


class Stage(nn.Module):
    """A stage between two boundaries: its values are those that it was given, through two layers, times a factor of
    their dtype, of its mode, of its hooks, and of each other tensor that it uses."""

    def __init__(
        self, before: Boundary | None, after: Boundary | None, stage: int, unusual: tuple[str, ...] = ()
    ) -> None:
        super().__init__()
        self.before, self.after, self.number, self.unusual = before, after, stage, unusual
        self.by = 1.0
        self.register_forward_pre_hook(lambda module, given: setattr(module, "by", 1.25))
        self.register_forward_hook(lambda module, given, found: setattr(module, "by", 1.0))
        width = 6 if before is None else before.width
        self.embedding = nn.Embedding(VOCABULARY, width) if before is None else None
        self.inner = nn.Linear(width, HIDDEN)
        self.outer = nn.Linear(HIDDEN, VOCABULARY if after is None else after.width, bias=stage % 2 == 0)
        self.more = nn.ModuleDict({way: nn.Linear(HIDDEN, HIDDEN) for way in ("spare", "sometimes") if way in unusual})
        if "again" in unusual:
            self.more["again"] = nn.Linear(HIDDEN, self.outer.out_features)
            self.more["again"].weight = self.outer.weight

    def forward(self, *given: Tensor) -> Any:
        if self.before is None:
            assert self.embedding is not None
            x, more = self.embedding(given[0]), []
        else:
            more = [*given]
            x = more.pop(self.before.place)
            x = x[:, 0, :, 0].flatten(2) if self.before.folded else x
            x = x.transpose(0, 1) if self.before.transposed else x
            more = [each for i, each in enumerate(more) if self.before.used >> i & 1]
        x, size = x.to(self.inner.weight.dtype), x.element_size()  # a cast would hide the dtype that came
        hidden = torch.tanh(self.inner(x.detach() if "cut" in self.unusual else x)) * (1 + size / 16)
        hidden = hidden * self.by * (1.0 if self.training else 0.75)
        if "sometimes" in self.unusual and _is_time(hidden):
            hidden = torch.tanh(self.more["sometimes"](hidden))
        for each in more:
            hidden = hidden * (1 + 0.1 * _factor(each)).to(hidden.dtype)
        values = self.outer(hidden)
        if "again" in self.unusual:
            values = values + self.more["again"](hidden.square())
        if self.after is None:
            return values
        if self.number % 2 == 0:  # as norms and residuals are of float32 at least, also under autocast
            values = values.to(torch.promote_types(values.dtype, torch.float32))
        found = [_beside(what, hidden, given[0], self.after.width) for what in self.after.beside]
        values = values.transpose(0, 1) if self.after.transposed else values
        values = values.unflatten(2, (-1, 2))[:, None, :, None] if self.after.folded else values
        found.insert(self.after.place, values)
        return tuple(found) if len(found) > 1 or self.number % 2 else found[0]


def _factor(x: Tensor) -> Tensor:
    """A number of each row of a tensor of one dimension, and one number of any other tensor, in which places count."""
    x = (x - 2**60).double() if x.dtype == torch.int64 and (x > 2**59).any() else _finite(x)
    if x.dim() == 1:
        return torch.sin(x)[:, None, None]
    return torch.sin(x.flatten() @ torch.arange(1, x.numel() + 1, dtype=x.dtype, device=x.device).cos())


def _finite(x: Tensor) -> Tensor:
    return x.double().masked_fill(x.isinf(), 0.5)


def _is_time(hidden: Tensor) -> bool:
    """In few bits it does not depend on values, whose last bits are those of memory's order."""
    return bool(hidden.detach().sum() > 0) if hidden.dtype == torch.float64 else len(hidden) % 2 > 0


def _beside(what: str, hidden: Tensor, first: Tensor, width: int) -> Tensor:
    match what:
        case "rows":
            return hidden.square().mean((1, 2))
        case "number":
            return hidden.square().mean()
        case "expanded":
            return hidden.square().mean().expand(len(hidden))
        case "rounded":
            return hidden.square().mean((1, 2)).to(torch.bfloat16 if width % 4 else torch.float16)
        case "integers":
            return 2**60 + torch.arange(len(hidden), device=hidden.device)
        case "few bits":
            dtype = FEW_BITS[width // 2 % 3]
            return torch.iinfo(dtype).max - torch.arange(len(hidden), device=hidden.device, dtype=dtype)
        case "mask":
            return torch.arange(len(hidden), device=hidden.device) % 2 == 0
        case "constant":
            return torch.linspace(0, 1, len(hidden), device=hidden.device, dtype=hidden.dtype)
        case "at times":
            rows = hidden.square().mean((1, 2))
            return rows if _is_time(hidden) else rows.detach()
        case "infinite":
            even = torch.arange(len(hidden), device=hidden.device) % 2 == 0
            return hidden.square().mean((1, 2)).masked_fill(even, -torch.inf)
        case "given":  # in a half the order of its gradients' sum would show
            return first.double() if first.dtype in (torch.bfloat16, torch.float16) else first
    return hidden[:, :, :0].flatten(1)


def build(history: History, device: str, stage: int, stages: int) -> Stage:
    """A stage with the same weights on every rank."""
    with torch.random.fork_rng(devices=[]), default_dtype(history.precision.dtype):
        torch.manual_seed(70 + stage)
        before = history.boundaries[stage - 1] if stage else None
        after = history.boundaries[stage] if stage < stages - 1 else None
        made = Stage(before, after, stage, history.unusual[stage])
    for i, parameter in enumerate(made.parameters(), 5 * stage):
        parameter.requires_grad_(i not in history.frozen)
    return made.to(device)


def batches_of(history: History, seed: int, device: str) -> tuple[list[Tensors], list[Tensor]]:
    """Tokens and targets, (rows, CONTEXT), of each micro-batch; in some all targets are left out."""
    random = torch.Generator().manual_seed(seed)
    inputs, targets = [], []
    for number in range(history.micro_batches):
        rows = 1 + (seed + number) % 3 if history.unequal else 3
        tokens, aims = (torch.randint(VOCABULARY, (rows, CONTEXT), generator=random) for _ in range(2))
        aims[torch.rand(aims.shape, generator=random) > (0.7 if (seed + number) % 5 else 0)] = IGNORED
        inputs.append((tokens.to(device),))
        targets.append(aims.to(device))
    return inputs, targets


def loss_by_dtype(output: Any, target: Tensor) -> Tensor:
    """The loss times a factor that depends on the logits' dtype, which is bfloat16 under the caller's autocast."""
    logits = output[0] if isinstance(output, tuple) else output
    return loss(output, target) * (1 + logits.element_size())


class Player(beside.ParametersChange):
    """A pipeline's stages on this rank, beside all of them in one process."""

    def __init__(self, implementation: Implementation, history: History, device: str) -> None:
        super().__init__()
        self.implementation, self.history, self.device = implementation, history, device
        self.other: Player | None = None
        group, make = group_of(history.mesh, device), partial(build, history, device)
        try:
            self.pipeline: Any = implementation.watched(
                make, group, history.micro_batches, loss=loss_by_dtype, unequal=history.unequal
            )
        except Unsupported:
            self.is_refused = True
            return
        every: list[Any] = [None] * group.size()
        dist.all_gather_object(every, max(self.pipeline.modules), group=group)
        self.reference = {stage: make(stage, max(every) + 1) for stage in range(max(every) + 1)}

    def both(self) -> dict[str, list[nn.Parameter]]:
        own = named(self.pipeline.modules)
        every = named(self.reference)  # type: ignore[arg-type]
        return {name: [parameter, own[name]] if name in own else [parameter] for name, parameter in every.items()}

    def modules(self) -> list[nn.Module]:
        return [*self.reference.values(), *self.pipeline.modules.values()]

    def another(self, value: int) -> None:
        """Its stages give one another other tensors."""
        if self.other is None or value % 2 == 0:
            self.other = None
            changed = replace(self.history, boundaries=self.history.boundaries[::-1], frozen=())
            self.other = Player(self.implementation, changed, self.device)
        for event in ("step", "clear"):
            self.other.play(Event(event, value))
        problem = self.other.problem()
        self.wrong = self.wrong or (problem and f"of another pipeline, {problem}")

    def memory(self, value: int) -> None:
        self.of_one(value, lambda p: setattr(p, "data", -beside.FACTOR * p.data))

    def step(self, value: int) -> None:
        given, precision = batches_of(self.history, value, self.device), self.history.precision
        if value % 4 == 3:
            precision = replace(precision, autocast=False)
        with left_as_they_are([*zip(*given, strict=True)]), precision.around(self.device):
            found = self.pipeline.step(*given)
        with precision.around(self.device):
            expected = sum(loss_by_dtype(self._passed(x), y) for x, y in zip(*given, strict=True))
            if isinstance(expected, Tensor) and expected.requires_grad:
                expected.backward()
        if isinstance(found, Tensor):
            self.keep(found)
            self.wrong = self.wrong or "the loss has a graph, which lives as long as it" * found.requires_grad
        both = (torch.as_tensor(x, dtype=torch.float64).detach() for x in (found, expected))
        self.differ("the loss", *both, within=precision.of_losses)
        self._compare_gradients()

    def evaluate(self, value: int) -> None:
        (x, *_), _ = batches_of(self.history, value, self.device)
        with torch.inference_mode() if value % 2 else torch.no_grad(), self.history.precision.around(self.device):
            for stage, module in self.reference.items():
                expected, own = module(*x), self.pipeline.modules.get(stage)
                found = expected if own is None else own(*x)
                x, others = (each if isinstance(each, tuple) else (each,) for each in (expected, found))
                for both in zip(others, x, strict=True):
                    if both[0].numel():
                        self.differ(f"what stage {stage} returns", *map(_finite, both))

    def call(self, value: int) -> None:
        (x, *_), _ = batches_of(self.history, value, self.device)
        with self.history.precision.around(self.device):
            for stage, module in self.reference.items():
                for each in (self.pipeline.modules.get(stage), module):
                    found = () if each is None else each(*x)
                    outputs = found if isinstance(found, tuple) else (found,)
                    if needed := [out for out in outputs if out.requires_grad]:
                        torch.autograd.backward(needed, [torch.ones_like(out) for out in needed])
                x = tuple(out.detach() for out in outputs)
        self._compare_gradients()

    def _compare_gradients(self) -> None:
        precision = self.history.precision
        for name, (right, *own) in self.both().items():
            for each in own:
                self.differ(f"the gradient of {name}", each.grad, right.grad, precision.within)
                if precision != EXACT and each.grad is not None and right.grad is not None:
                    each.grad.copy_(right.grad)  # roundings do not add up

    def _passed(self, x: Any) -> Any:
        for stage in self.reference.values():
            x = stage(*x) if isinstance(x, tuple) else stage(x)
        return x

    def update(self, value: int) -> None:
        self.of_all(lambda p: None if p.grad is None else p.detach().sub_(beside.RATE * p.grad))
        for name, (right, *own) in self.both().items():
            for each in own:
                self.differ(f"the parameter {name}", each.detach(), right.detach())
