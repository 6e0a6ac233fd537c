"""Histories of a language model: calls, backward passes, modes, and weights that change in between."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from correctness.engine.calls import MODES
from correctness.engine.examples import autocast_takes
from correctness.engine.histories import Problem, hold, play, report
from correctness.model.language_models import CONTEXT, SIZE, assert_logits, copy_weights, draw, models, stale_weights
from correctness.support.contracts import Note, assert_unchanged, is_ours, may_raise
from shardmark.api import Implementation

pytestmark = pytest.mark.family("model")

BF16, F16 = torch.bfloat16, torch.float16
HALF = 16 * torch.finfo(BF16).eps


@contextmanager
def _both(context: AbstractContextManager[object], device: str) -> Iterator[None]:
    with context, torch.autocast(device, dtype=BF16):
        yield


CONTEXTS: dict[str, Callable[[str], AbstractContextManager[object]]] = {
    "with gradients": lambda device: nullcontext(),
    "in no_grad": lambda device: torch.no_grad(),
    "in inference_mode": lambda device: torch.inference_mode(),
    "under autocast to bfloat16": partial(torch.autocast, dtype=BF16),
    "under autocast to float16": partial(torch.autocast, dtype=F16),
    "in no_grad under autocast to bfloat16": lambda device: _both(torch.no_grad(), device),
    "in inference_mode under autocast to bfloat16": lambda device: _both(torch.inference_mode(), device),
}
"""Contexts of a call, by the name that a history prints: a context manager for a device."""
IN_HISTORIES = CONTEXTS | {
    f"in {name}": MODES[name] for name in ("default dtype bfloat16", "default dtype float64", "what is saved moves")
}

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "a slice": lambda x: torch.cat([x, x], dim=1)[:, : x.shape[1]],
    "every second": lambda x: x.repeat_interleave(2, dim=1)[:, ::2],
    "one for all": lambda x: x[:1].expand_as(x),
}

SHAPES = ((2, 13), (2, 13), (1, CONTEXT), (3, 1), (4, 5), (0, 5), (2, 0))


def _shift(weight: Tensor) -> Tensor:
    """Return the weight changed by more than half precision's tolerance."""
    return weight.mul(0.5).add(0.5 * torch.randn_like(weight) * weight.std(correction=0))


@torch.no_grad()
def _of_each(model: nn.Module, change: Callable[[Tensor, Tensor], object]) -> None:
    for p in model.parameters():
        change(p, _shift(p))


@torch.no_grad()
def _one(model: nn.Module) -> None:
    parameters = list(model.parameters())
    p = parameters[int(torch.randint(len(parameters), ()))]
    p.copy_(_shift(p))


def _loaded(model: nn.Module, assign: bool) -> None:
    with torch.no_grad():
        model.load_state_dict({name: _shift(x) for name, x in model.state_dict().items()}, assign=assign)


def _replaced(model: nn.Module) -> None:
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            setattr(module, name, nn.Parameter(_shift(p.detach()), requires_grad=p.requires_grad))


def _optimized(model: nn.Module) -> None:
    tokens = draw(next(model.parameters()).device.type)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    logits = model(tokens)
    if logits.requires_grad:
        logits.float().square().mean().backward()
    optimizer.step()


def _too_long(model: nn.Module) -> None:
    """A call that may raise: it leaves nothing behind. On CUDA the device's own assertion could end the process."""
    if (device := next(model.parameters()).device.type) == "cpu":
        with suppress(Exception), torch.no_grad():
            model(draw(device, 1, 2 * CONTEXT))


def _freeze(model: nn.Module, share: float) -> None:
    for p in model.parameters():
        p.requires_grad_(bool(torch.rand(()) >= share))


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "weights changed in place": partial(_of_each, change=lambda p, new: p.copy_(new)),
    # Autograd's version counters do not see this one.
    "weights changed by .data": partial(_of_each, change=lambda p, new: p.data.copy_(new)),
    "weights given other .data": partial(_of_each, change=lambda p, new: setattr(p, "data", new)),
    "one weight changed": _one,
    "a state_dict loaded": partial(_loaded, assign=False),
    "a state_dict assigned": partial(_loaded, assign=True),
    "parameters replaced": _replaced,
    "a step of AdamW": _optimized,
    "a call of a context that is too long": _too_long,
    "half of them frozen": partial(_freeze, share=0.5),
    "all frozen": partial(_freeze, share=1.0),
    "all thawed": partial(_freeze, share=0.0),
    "to bfloat16": lambda model: model.to(BF16),
    "to float32": lambda model: model.to(torch.float32),
    "to float64": lambda model: model.to(torch.float64),
    "train()": lambda model: model.train(),
    "eval()": lambda model: model.eval(),
}


class Event(NamedTuple):
    """A call (whose `kind` is a context), "backward" of a call that waits, "copied" (the copy
    goes on), "averaged" (a copy with other weights is evaluated), or a change."""

    kind: str
    tokens: int = 0
    """For a call: the index of its shape. For "backward": which of those that wait, modulo their number."""
    layout: str = "contiguous"
    waits: bool = False
    """For a call: if true, its backward waits for a "backward" event; else it runs at once."""

    def __str__(self) -> str:
        of = f" of {SHAPES[self.tokens]}{'' if self.layout == 'contiguous' else f' {self.layout}'}"
        nth = f" {self.tokens}" if self.kind == "backward" else ""
        return f"a call {self.kind}{of}" if self.kind in IN_HISTORIES else f"{self.kind}{nth}"


calls = st.builds(
    Event,
    st.sampled_from(list(IN_HISTORIES)),
    st.integers(0, len(SHAPES) - 1),
    st.just("contiguous") | st.sampled_from(list(LAYOUTS)),
    st.booleans(),
)
others = st.builds(Event, st.sampled_from([*CHANGES, "backward", "copied", "averaged"]), st.integers(0, 2))


@dataclass(frozen=True)
class History:
    events: list[Event]

    def __str__(self) -> str:
        return ""


@st.composite
def histories(draw_from: st.DrawFn) -> History:
    """Draw any events; or a call, changes, and the same call again without a mode change in between."""
    if draw_from(st.booleans()):
        return History(draw_from(st.lists(calls | calls | others, min_size=2, max_size=9)))
    mode, call = draw_from(st.sampled_from([[Event("eval()")], [], [Event("to bfloat16")]])), draw_from(calls)
    keeps_mode = others.filter(lambda event: event.kind not in ("train()", "eval()"))
    between = [draw_from(st.lists(keeps_mode, min_size=1, max_size=2)) for _ in range(2)]
    return History([*mode, call, *between[0], call, *between[1], call])


class Life:
    """A model, the float64 reference with equal weights, and calls that wait for backward."""

    def __init__(self, implementation: Implementation, device: str) -> None:
        self.implementation, self.device = implementation, device
        self.model, self.plain = models(implementation, device)
        self.plain.double()
        self.waiting: list[tuple[Tensor, Tensor, float]] = []
        self.returned: list[tuple[Tensor, Tensor]] = []
        self.tokens: dict[int, Tensor] = {}
        """The tokens of each shape, by its index in `SHAPES`: calls of one index have the same."""
        self.past = "nothing"
        self.earlier: dict[str, dict[str, Tensor]] = {}
        """The weights before each change, which an implementation may have kept."""

    def problem(self) -> str:
        return ""  # each event raises its own error

    def play(self, event: Event) -> None:
        if event.kind in IN_HISTORIES:
            self.call(event)
        elif event.kind == "averaged":
            self.average(event)
        elif event.kind == "backward":
            if self.waiting:
                self.backward(*self.waiting.pop(event.tokens % len(self.waiting)))
        else:
            self.earlier[event.kind] = {name: p.detach().clone() for name, p in self.plain.named_parameters()}
            self.waiting.clear()  # weights must not change between a forward and its backward
            self.model.zero_grad()
            if event.kind == "copied":
                old, self.model = self.model, copy.deepcopy(self.model)
                _of_each(old, lambda p, new: p.copy_(new))
            else:
                CHANGES[event.kind](self.model)
            copy_weights(self.model, self.plain)
        for found, before in self.returned:
            assert torch.equal(found, before), f"{event} changed the logits of an earlier call, after {self.past}"
        self.past = f"{self.past}, {event}" if self.past != "nothing" else str(event)

    @torch.no_grad()
    def average(self, event: Event) -> None:
        """Evaluate a deep copy with other weights, as averages of weights are; the model itself goes on."""
        own, plain, tokens = copy.deepcopy(self.model), copy.deepcopy(self.plain), draw(self.device)
        _of_each(own, lambda p, new: p.copy_(new))
        copy_weights(own, plain)
        half = next(own.parameters()).dtype not in (torch.float32, torch.float64)
        assert_logits(own(tokens), plain(tokens), HALF if half else 1e-5, f" of a copy, after {self.past},")

    def call(self, event: Event) -> None:
        if 0 in SHAPES[event.tokens] and not is_ours(self.implementation):
            return
        if not autocast_takes(event.kind, next(self.model.parameters()).dtype):
            return
        if event.tokens not in self.tokens:
            self.tokens[event.tokens] = draw(self.device, *SHAPES[event.tokens])
        tokens = LAYOUTS[event.layout](self.tokens[event.tokens])
        weights = dict(self.model.named_parameters())
        before = {name: x.detach().clone() for name, x in [*weights.items(), ("tokens", tokens)]}
        gradients = {name: None if p.grad is None else p.grad.clone() for name, p in weights.items()}
        training = self.model.training
        with IN_HISTORIES[event.kind](self.device):
            logits = self.model(tokens)
        where = f" {event.kind}, {'training' if training else 'evaluating'}, after {self.past},"
        now = {**dict(self.model.named_parameters()), "tokens": tokens}
        assert_unchanged(before, {name: x.detach() for name, x in now.items()}, f"a call{where}")
        assert self.model.training == training, f"a call{where} changed `training`"
        for name, p in self.model.named_parameters():
            same = p.grad is gradients[name] is None or torch.equal(p.grad, gradients[name])
            assert same, f"a call{where} changed the gradient of {name}"
        own = next(iter(weights.values())).dtype
        dtypes = {own, *([getattr(torch, event.kind.rpartition(" ")[2])] if "autocast" in event.kind else [])}
        assert logits.dtype in dtypes, f"logits{where} are {logits.dtype}, expected {' or '.join(map(str, dtypes))}"
        tolerance = 1e-5 if dtypes <= {torch.float32, torch.float64} else HALF
        with torch.no_grad():
            why = partial(stale_weights, logits, self.plain, tokens, self.earlier)
            assert_logits(logits, self.plain(tokens), tolerance, where, why)
        asked = not event.kind.startswith(("in no_grad", "in inference_mode"))
        needs = asked and any(p.requires_grad for p in weights.values())
        assert logits.requires_grad == needs, f"logits{where} require {'no' if needs else 'a'} gradient"
        self.returned.append((logits.detach(), logits.detach().clone()))
        if needs and tokens.numel():
            self.waiting.append((logits, tokens, tolerance))
            if not event.waits:
                self.backward(*self.waiting.pop())

    def backward(self, logits: Tensor, tokens: Tensor, tolerance: float) -> None:
        self.model.zero_grad()
        self.plain.zero_grad()
        for of in (logits, self.plain(tokens)):
            of.double().square().mean().backward()
        found, expected = [], []
        for name, p in self.plain.named_parameters():
            mine = self.model.get_parameter(name)
            given = "a gradient" if mine.grad is not None else "no gradient"
            assert (mine.grad is not None) == mine.requires_grad, f"{name} has {given}, after {self.past}"
            if mine.grad is not None:
                assert mine.grad.dtype == mine.dtype, f"{name}'s gradient is {mine.grad.dtype}, after {self.past}"
                found.append(mine.grad.double().flatten())
                expected.append(p.grad.flatten())
        off = (torch.cat(found) - torch.cat(expected)).norm() / torch.cat(expected).norm()
        allowed = max(1e-3, 2 * tolerance)
        assert off <= allowed, f"the gradients' relative error is {off:.2g}, allowed {allowed:.2g}, after {self.past}"


def _typed(name: str) -> str:
    """The name as an id that `-k` takes."""
    return name.replace(" ", "_")


@pytest.mark.parametrize(
    "change",
    ["weights changed in place", "weights changed by .data", "a state_dict loaded", "a step of AdamW"],
    ids=_typed,
)
@pytest.mark.parametrize("mode", ["train()", "eval()"], ids=["training", "evaluating"])
@pytest.mark.parametrize("context", CONTEXTS, ids=_typed)
def test_a_call_has_the_weights_of_now(
    implementation: Implementation, context: str, mode: str, change: str, device: str
) -> None:
    """The call is repeated with the same tokens: nothing cast or looked up in an earlier call may be reused."""
    call, changed = Event(context), Event(change)
    history = History([Event(mode), call, changed, call, changed, call])
    problem = play(Life(implementation, device), history)
    assert problem is None, report(history, problem)


def test_a_call_that_is_too_long_leaves_nothing_behind(implementation: Implementation, device: str) -> None:
    call = Event("with gradients")
    history = History([call, Event("a call of a context that is too long"), call])
    problem = play(Life(implementation, device), history)
    assert problem is None, report(history, problem)


@pytest.mark.examples(12, 80, 400)
def test_any_history_has_the_plain_models_logits_and_gradients(
    implementation: Implementation, examples: int, device: str
) -> None:
    start = torch.initial_seed()

    def plays(history: History) -> Problem | None:
        torch.manual_seed(start)  # equal weights each time that a history is replayed
        return play(Life(implementation, device), history)

    hold(histories(), plays, examples)


@pytest.mark.should("an empty batch is no error")
def test_an_empty_batch_trains(implementation: Implementation, device: str, record_property: Note) -> None:
    """Like an epoch's last batch, or a rank's share of a small one: gradients are zero."""
    for shape in ((0, 5), (2, 0)):
        model, _ = models(implementation, device)
        found = None
        with may_raise(implementation, f"a model of tokens {shape}", record_property):
            logits = model(draw(device, *shape))
            logits.sum().backward()
            found = tuple(logits.shape)
        assert found in (None, (*shape, SIZE.vocab)), f"logits of tokens {shape} are {found}"
        for name, p in model.named_parameters():
            assert p.grad is None or not p.grad.any(), f"tokens {shape} give {name} a gradient that is not zero"
