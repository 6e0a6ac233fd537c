"""Random histories of two data-parallel wrappers: their modules, their options, and events between their steps."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from hypothesis import strategies as st

from correctness.data_parallel.random_modules import Kind, kinds
from correctness.engine.histories import events_of, one_in
from correctness.engine.histories_on_ranks import UNSORTED

FINISH = "finish_gradient_synchronization()"
DEPTH = 3
"""Deepest nesting of `no_sync()` inside `no_sync()`."""
MOST = 27
"""Number of events besides the first and last ones."""
OPTIONS: dict[str, list[Any]] = {
    "bucket_mb": [1e-5, 3e-4, 25],
    "reduce_dtype": [torch.bfloat16, torch.float16, torch.float32, torch.float64],
}


@dataclass(frozen=True)
class Event:
    """One event on a wrapper, "A" or "B", on every rank of its group. `seed` draws its details."""

    name: str
    wrapper: str
    seed: int
    autocast: str = ""
    """The part of it that runs under the caller's autocast to bfloat16: "forward", "all" or none."""

    def draw(self, *more: object) -> random.Random:
        return random.Random(" ".join(map(str, (self.seed, *more))))

    def under_autocast(self, part: str, device: str) -> AbstractContextManager[object]:
        if self.autocast != part:
            return nullcontext()
        return torch.autocast(torch.device(device).type, torch.bfloat16)

    def __str__(self) -> str:
        how = {"forward": ", forward under autocast", "all": ", under autocast"}.get(self.autocast, "")
        return f"{self.wrapper}: {self.name}{how}"


@dataclass(frozen=True)
class Setting:
    """Options of wrapping. `every`: each backward pass reaches every parameter, and no option relaxes that."""

    kinds: list[Kind]
    tied: list[int]
    options: dict[str, Any]
    every: bool
    groups: list[list[int]] | None
    """Side-by-side groups of ranks, in any order, of which a rank is in one at most; None for the world."""

    def members(self, rank: int, ranks: int) -> list[int]:
        return [*range(ranks)] if self.groups is None else next((g for g in self.groups if rank in g), [])

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.options.items()]
        options += ["find_unused_parameters=False"] * self.every
        options += [f"process groups of ranks {self.groups}"] * bool(self.groups)
        return f"{', '.join(map(str, self.kinds))}{' with ' * bool(options)}{', '.join(options)}"


@dataclass(frozen=True)
class Limits:
    """Events that histories leave out."""

    torchs: bool = False
    """Left out: events that torch's DDP does not take, as the wrapper is one or contains it."""
    plain: bool = False
    """Left out: events that few users need: `no_sync()` inside another or made before it is entered, parameters frozen
    after wrapping, strides that differ by rank or have gaps, a rank without a backward pass, a part wrapped again, and
    the names of `state_dict` and buffers that forward changes."""


@dataclass(frozen=True)
class History:
    settings: dict[str, Setting]
    events: list[Event]
    limits: Limits

    def __str__(self) -> str:
        there = dict.fromkeys(event.wrapper for event in self.events)
        return "; ".join(f"{name} wraps {self.settings[name]}" for name in there)


@dataclass
class State:
    """State that decides which event may come next."""

    contexts: list[bool] = field(default_factory=list)
    made: list[bool] = field(default_factory=list)
    """For each unentered `no_sync()`: was it made inside another one?"""
    backward_outside: bool = False
    empty: bool = True
    averaged: bool = False
    frozen: bool = False
    hooked: bool = False


@st.composite
def settings(draw: st.DrawFn, ranks: int, accepted: list[str], limits: Limits) -> Setting:
    options = {name: draw(st.sampled_from(OPTIONS[name])) for name in accepted if draw(one_in(3))}
    odd = not (limits.torchs or limits.plain)
    of = draw(kinds(ranks, gaps=not limits.plain, vary_strides=odd, narrow="reduce_dtype" in options))
    tied = [i for i in range(len(of)) if draw(one_in(7))]
    groups: list[list[int]] | None = None
    if how := draw(st.sampled_from(["", "", "parts", "some"])):
        order, cut = draw(st.permutations(range(ranks))), draw(st.integers(1, ranks))
        parts = [order[:cut], order[cut:]] if how == "parts" else [order[:cut]]
        groups = [part if UNSORTED else sorted(part) for part in parts if part]
    return Setting(of, tied, options, draw(one_in(3)), groups)


@st.composite
def histories(draw: st.DrawFn, ranks: int, accepted: list[str], limits: Limits) -> History:
    """Draw a history: both modules are wrapped, one perhaps later; at the end, a part of one is wrapped again."""
    of = {name: draw(settings(ranks, accepted, limits)) for name in "AB"}
    states = {"A": State()}

    def event(name: str, wrapper: str) -> Event:
        return Event(name, wrapper, draw(st.integers(0, 2**40)), draw(autocasts(name, of[wrapper])))

    def following() -> list[Event]:
        # Ranks that lack gradients start some collectives in backward and the rest in `finish`.
        first = [name for name, state in states.items() if state.backward_outside and not of[name].every]
        if "B" not in states and not first and draw(one_in(3)):
            states["B"] = State()
            return [event("wrap", "B")]
        wrapper = draw(st.sampled_from(first or [*states]))
        name = draw(st.sampled_from(_possible(states[wrapper], of[wrapper], limits)))
        _follow(states[wrapper], name)
        return [event(name, wrapper)]

    part = None if limits.plain else draw(st.sampled_from([None, None, *of]))
    events = [event("wrap", "A"), *chain(*events_of(draw, MOST, following))]
    for wrapper, state in sorted(states.items(), key=lambda each: not each[1].backward_outside):
        names = ["exit"] * len(state.contexts) + ["backward"] * (not state.backward_outside)
        names += ["wrap a part"] * (wrapper == part) + [FINISH]
        events += [event(name, wrapper) for name in names]
    return History(of, events, limits)


def autocasts(name: str, setting: Setting) -> st.SearchStrategy[str]:
    """Autocast to bfloat16 refuses to concatenate tensors of float16, as a wrapper may."""
    without = not (name == FINISH or "ward" in name) or torch.float16 in {kind.dtype for kind in setting.kinds}
    return st.just("") if without else st.sampled_from(["", "", "all" if name == FINISH else "forward", "all"])


def _possible(state: State, setting: Setting, limits: Limits) -> list[str]:
    """List the events possible now; between a backward outside `no_sync` and FINISH none may change a gradient."""
    harmless = ["train", "eval", "eval on one rank", "forward in no_grad", "forward in inference_mode", "state_dict()"]
    harmless += ["make no_sync()"] * (not limits.plain)
    deepest = 1 if limits.plain else DEPTH
    if state.backward_outside:
        return [FINISH] * 6 + harmless
    inside = bool(state.contexts)
    names = [*harmless, *["backward"] * 6, "zero_grad(set_to_none=False)", "gradients are replaced"]
    # torch's DDP remembers parameters used in no_sync() and raises an error if their gradients are gone.
    names += ["zero_grad()"] * (state.averaged or state.empty or not limits.torchs)
    names += ["backward through two forward passes"]
    names += ["enter"] * 2 * (len(state.contexts) < deepest)
    names += ["enter one made before"] * 2 * (len(state.contexts) < deepest and inside in state.made)
    names += [
        "exit",
        "exit",
        *["exit by an error"] * (not limits.plain),
        FINISH,
        "two backward passes of one forward pass",
    ] * inside
    names += ["forward without backward"] * (
        not limits.torchs
    )  # torch's DDP then waits for its backward in no_sync() too
    names += ["unhook"] if state.hooked else ["hook"]
    if state.empty and not inside and not setting.every and not limits.plain:
        names += ["thaw"] * 2 if state.frozen else ["freeze"]
    if not inside and state.averaged:
        names += ["optimizer step"] * 2
    return names


def _follow(state: State, name: str) -> None:
    inside = bool(state.contexts)
    if name == "make no_sync()":
        state.made.append(inside)
    elif name == "enter one made before":
        state.made.remove(inside)
        state.contexts.append(inside)
    elif name == "enter":
        state.contexts.append(inside)
    elif name.startswith("exit"):
        state.contexts.pop()
    elif "backward" in name and name != "forward without backward":
        state.backward_outside, state.empty, state.averaged = not inside, False, False
    elif name == FINISH and not inside:
        state.backward_outside, state.averaged = False, True
    elif name.startswith("zero"):
        state.empty, state.averaged = name == "zero_grad()", False
    elif name in ("freeze", "thaw"):
        state.frozen = name == "freeze"
    elif name in ("hook", "unhook"):
        state.hooked = name == "hook"
