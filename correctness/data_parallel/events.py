"""Random programs for two data-parallel wrappers: what both are, and every event between their steps."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import torch

from correctness.data_parallel.random_modules import Kind, drawn_kinds

DEPTH = 3
OPTIONS: dict[str, list[Any]] = {
    "bucket_mb": [1e-5, 3e-4, 25],
    "reduce_dtype": [torch.bfloat16, torch.float16, torch.float32, torch.float64],
}


@dataclass(frozen=True)
class Event:
    """What happens to one wrapper, "A" or "B", on every rank of its group. `seed` draws all that it needs."""

    name: str
    wrapper: str
    seed: int

    def draw(self, *more: object) -> random.Random:
        return random.Random(" ".join(map(str, (self.seed, *more))))

    def __str__(self) -> str:
        return f"{self.wrapper} {self.name}"


@dataclass
class Setting:
    """How a module is wrapped. `every`: each backward pass reaches every parameter, and no option says otherwise."""

    kinds: list[Kind]
    tied: list[int]
    options: dict[str, Any]
    every: bool
    groups: list[list[int]] | None
    """Ranks of groups side by side, of which a rank is in one at most; None for the world."""

    def members(self, rank: int, ranks: int) -> list[int]:
        return [*range(ranks)] if self.groups is None else next((g for g in self.groups if rank in g), [])

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.options.items()]
        options += ["find_unused_parameters=False"] * self.every
        return ", ".join([*options, *([f"in groups of ranks {self.groups}"] if self.groups else [])]) or "no options"


@dataclass
class State:
    """What decides which event may come next."""

    contexts: list[bool] = field(default_factory=list)
    made: list[bool] = field(default_factory=list)
    """Whether each `no_sync()` that was made and not entered was made inside of another."""
    backward_outside: bool = False
    empty: bool = True
    averaged: bool = False
    frozen: bool = False
    hooked: bool = False


def drawn_setting(draw: random.Random, ranks: int, accepted: list[str], *, torchs: bool) -> Setting:
    options = {
        name: draw.choice(values) for name, values in OPTIONS.items() if name in accepted and draw.random() < 0.4
    }
    kinds = drawn_kinds(draw, ranks, vary_strides=not torchs, narrow="reduce_dtype" in options)
    tied = [i for i in range(len(kinds)) if draw.random() < 0.15]
    groups = draw.choice([None, None, "parts", "some"])
    if groups is not None:
        order = draw.sample(range(ranks), ranks)
        cut = draw.randint(1, ranks)
        groups = [sorted(part) for part in ([order[:cut], order[cut:]] if groups == "parts" else [order[:cut]]) if part]
    return Setting(kinds, tied, options, draw.random() < 0.3, groups)


def drawn_events(draw: random.Random, settings: dict[str, Setting], length: int, *, torchs: bool) -> list[Event]:
    """Both are wrapped, one of them perhaps later; last of all, a part of one is wrapped once more."""
    states = {"A": State()}
    events = [Event("wrap", "A", draw.randrange(2**40))]
    late, part = draw.choice([0, 0, draw.randrange(length)]), draw.choice([*settings, None, None])
    for i in range(length):
        # Ranks that lack gradients start some collectives in backward and some in `finish`, as many as they can.
        first = [name for name, state in states.items() if state.backward_outside and not settings[name].every]
        if i >= late and "B" not in states and not first:
            states["B"] = State()
            events.append(Event("wrap", "B", draw.randrange(2**40)))
        wrapper = draw.choice(first or [*states])
        name = draw.choice(_possible(states[wrapper], settings[wrapper], torchs))
        _follow(states[wrapper], name)
        events.append(Event(name, wrapper, draw.randrange(2**40)))
    for wrapper, state in sorted(states.items(), key=lambda each: not each[1].backward_outside):
        names = ["exit"] * len(state.contexts) + ["backward"] * (not state.backward_outside)
        names += ["wrap a part"] * (wrapper == part) + ["finish"]
        events += [Event(name, wrapper, draw.randrange(2**40)) for name in names]
    return events


def _possible(state: State, setting: Setting, torchs: bool) -> list[str]:
    """Once a backward pass outside of `no_sync` was made, only what does not change gradients comes before `finish`."""
    harmless = ["train", "eval", "eval on one rank", "forward in no_grad", "make no_sync()", "read the state"]
    if state.backward_outside:
        return ["finish"] * 6 + harmless
    inside = bool(state.contexts)
    names = [*harmless, *["backward"] * 6, "zero_grad(set_to_none=False)"]
    # PyTorch's own remembers which parameters no_sync() used, and raises an error where their gradients are gone.
    names += ["zero_grad()"] * (state.averaged or state.empty or not torchs)
    names += ["backward through two forward passes"]
    names += ["enter"] * 2 * (len(state.contexts) < DEPTH)
    names += ["enter one made before"] * 2 * (len(state.contexts) < DEPTH and inside in state.made)
    names += ["exit", "exit", "exit by an error", "finish", "two backward passes of one forward pass"] * inside
    names += ["forward without backward"] * (not torchs)  # PyTorch's own then waits for its backward in no_sync(), too
    names += ["unhook"] if state.hooked else ["hook"]
    if state.empty and not inside and not setting.every:
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
    elif name == "finish" and not inside:
        state.backward_outside, state.averaged = False, True
    elif name.startswith("zero"):
        state.empty, state.averaged = name == "zero_grad()", False
    elif name in ("freeze", "thaw"):
        state.frozen = name == "freeze"
    elif name in ("hook", "unhook"):
        state.hooked = name == "hook"
