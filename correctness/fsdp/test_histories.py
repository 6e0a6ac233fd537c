"""Random histories of a sharded model, compared with an unsharded one event by event."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from correctness.engine.histories import events_of, one_in
from correctness.engine.histories_on_ranks import even_and_odd_ranks, hold_on_ranks
from correctness.fsdp.checks import SGDs, as_expected, contains, full, norm_tolerance, parameters_of, wrap
from correctness.fsdp.random_models import Recipe, Rows, recipes
from correctness.support.exact import exact
from impl.fsdp import norms_and_biases
from shardmark.api import Implementation
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("fsdp")

OPTIONS = ({}, {}, {"compute_dtype": torch.float32}, {"reduce_dtype": torch.float32})
VALUED = ("forward", "backward", "drop", "load")
"""Events that have a value."""
HISTORIES_EACH = 8
"""Histories per example that the test's mark counts."""


class Traits(NamedTuple):
    """Traits of a wrapper that decide which histories it takes."""

    of_torch: bool
    """Built on PyTorch's FSDP, which has limits of its own."""
    without: tuple[str, ...]
    """Kinds of layers that it cannot take."""
    recomputes: bool
    """Takes layers that are recomputed where the model calls them. One without units gathers in its own call alone."""
    saves: bool
    clips: bool


def traits(implementation: Implementation, device: str) -> Traits:
    model = wrap(implementation, nn.Linear(2, 2).to(device))
    of_torch = contains(model, FSDPModule) or contains(model, FSDP1)
    without: tuple[str, ...] = ("some rows", "tied") if of_torch else ()
    if not of_torch and any(isinstance(p, DTensor) for p in model.parameters()):
        without = ("some rows",)  # DTensors are reduced one by one, so every rank must have each gradient
    clips = hasattr(model, "clip_grad_norm_") and not contains(model, FSDP1)
    if contains(model, FSDP1):  # docs/pytorch-defects.md; on one rank it no longer gathers such a unit after a backward
        without += ("unused",)
    return Traits(of_torch, without, implementation.accepts("wrap"), hasattr(model, "state_dict"), clips)


class Event(NamedTuple):
    """One event. `value`: the index of the loss whose backward runs, or a seed; an odd one loads into a new model."""

    kind: str
    value: int = 0

    def __str__(self) -> str:
        return self.kind.replace("_", " ")


@dataclass(frozen=True)
class History:
    recipe: Recipe
    options: dict[str, Any]
    in_groups: bool
    """Even and odd ranks each have their own model, in separate process groups."""
    events: list[Event]
    autocast: bool = False
    """Events run under the caller's autocast to bfloat16, which leaves products of float64 alone."""

    def __str__(self) -> str:
        options = [f"{name}={getattr(value, '__name__', value)}" for name, value in self.options.items()]
        options += ["even and odd ranks in process groups of their own"] * self.in_groups
        options += ["under autocast"] * self.autocast
        return "; ".join(["layers: " + str(self.recipe), *options])


@st.composite
def histories(draw: st.DrawFn, of: Traits) -> History:
    in_groups = draw(one_in(3))
    options = dict(draw(st.sampled_from(OPTIONS)))
    if not of.of_torch and draw(one_in(3)):
        options["reshard_after_forward"] = False
    if draw(one_in(3)):
        options["ignored_params"] = norms_and_biases
    waiting, unsynchronized, used = 0, False, False

    def event(kind: str) -> Event:
        nonlocal waiting, unsynchronized, used
        waiting += {"forward": 1, "backward": -1, "drop": -1, "step": -waiting, "load": -waiting}.get(kind, 0)
        unsynchronized = kind == "backward" or (unsynchronized and kind != "finish")
        used = kind in ("forward", "evaluate") or (used and kind != "backward")
        return Event(kind, draw(st.integers(0, 1023)) if kind in VALUED else 0)

    def following() -> Event:
        """Draw the next event. PyTorch's FSDP keeps what a call gathered, also in inference mode, until the next
        backward, so that backward must come before the weights change; and it takes one forward at a time."""
        kinds = ["evaluate", "switch_mode"] + ["forward"] * 2 * (waiting < (1 if of.of_torch else 2))
        kinds += ["infer"] * (not of.of_torch)
        kinds += ["backward"] * 3 * bool(waiting) + ["finish"] * 2 * unsynchronized
        kinds += ["drop"] * (bool(waiting) and not of.of_torch)
        if not (of.of_torch and (waiting or used)):
            kinds += ["gather"]
            if not unsynchronized:
                kinds += ["step", "step", "clear_gradients", *["save", "load"] * of.saves, *["clip"] * of.clips]
        return event(draw(st.sampled_from(kinds)))

    first = [event("evaluate" if of.of_torch else "infer")] * draw(one_in(3))  # as a trainer that tries its validation
    events = first + events_of(draw, draw(st.sampled_from([6, 8, 10, 12, 14, 16, 20, 24])), following)
    if of.of_torch and waiting:
        events.append(event("backward"))
    unused = [] if of.of_torch else ["forward"]  # a forward without backward
    events += [event(kind) for kind in ("forward", "backward", "finish", *unused, "step", "evaluate", "gather")]
    autocast = not {"compute_dtype", "reduce_dtype"} & options.keys() and draw(one_in(3))
    return History(draw(recipes(of.without, of.recomputes)), options, in_groups, events, autocast)


class Beside:
    """A sharded and an unsharded model with equal weights on this rank; each event runs on both."""

    def __init__(self, implementation: Implementation, history: History, device: str) -> None:
        self.implementation, self.history, self.device = implementation, history, device
        self.group = even_and_odd_ranks()[1] if history.in_groups else None
        self.ranks, self.rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        in_float32 = exact() == torch.float32 or {"compute_dtype", "reduce_dtype"} & history.options.keys()
        self.tolerance = 1e-3 if in_float32 else 1e-9
        self._make(0)
        self.open: list[tuple[Rows, Tensor, Rows, Tensor]] = []  # losses whose backward has not run yet
        self.kept: list[object] = []
        self.returned: list[tuple[Tensor, Tensor]] = []
        """Outputs of the wrapper, and copies: users read them late."""
        self.step_number = 0
        self.saved = self._state()
        self.wrong = self.starts_right()

    def _make(self, seed: int) -> None:
        seeds = [seed + rank for rank in dist.get_process_group_ranks(self.group or dist.group.WORLD)]
        recipe = self.history.recipe
        self.plain = recipe.make(seeds[0], self.device)
        options: dict[str, Any] = {"process_group": self.group, "wrap": recipe.wrap, **self.history.options}
        self.model = wrap(self.implementation, recipe.make(seeds[self.rank], self.device), **options)
        self.optimizers = SGDs(self.model, self.plain)

    def play(self, event: Event) -> None:
        autocast = self.history.autocast and exact() == torch.float64
        with torch.autocast(torch.device(self.device).type, torch.bfloat16, enabled=autocast):
            found = getattr(self, event.kind)(*[event.value] * (event.kind in VALUED))
        self.wrong = self.wrong or found or ""

    def problem(self) -> str:
        """Return the problem of this event, or of the buffers after it, else ""."""
        if not self.wrong and any(not torch.equal(output, copy) for output, copy in self.returned):
            return "what an earlier call returned is another value now"
        return self.wrong or self.buffers()

    def starts_right(self) -> str:
        """Check that parameters equal the first rank's to the bit, whatever the compute dtype."""
        return as_expected("at the start, the", full(self.model), parameters_of(self.plain), 0) or self.buffers()

    def buffers(self) -> str:
        """Check that forward changed the buffers as without a wrapper, in their own dtypes."""
        names = [name for name, _ in self.plain.named_buffers()]
        found, expected = (
            dict(zip(names, module.buffers(), strict=True)) for module in (self.model.module, self.plain)
        )
        for name in names:
            if found[name].dtype != expected[name].dtype:
                return f"the buffer {name} is of {found[name].dtype}, expected {expected[name].dtype}"
        return as_expected("the buffer", found, expected)

    def _state(self) -> Any:
        if not hasattr(self.model, "state_dict"):
            return None
        states = self.model.state_dict(), self.plain.state_dict()
        return tree_map(lambda x: x.detach().clone() if isinstance(x, Tensor) else x, states)

    def forward(self, value: int) -> str:
        self.step_number += 1
        every = Rows.of(self.step_number, self.ranks, self.device)
        mine = every.share(self.rank)
        inputs = {name for i, name in enumerate(("x", "shift")) if value >> i & 1}
        sides = {i for i in range(8) if value >> 2 + i & 1}
        for rows in (mine, every):
            rows.require_gradients(inputs)
        torch.manual_seed(value)
        outputs = mine.outputs(self.model)
        drawn = torch.get_rng_state()
        self.returned += [(each.detach(), each.detach().clone()) for each in (*outputs["output"], *outputs["sides"])]
        torch.manual_seed(value)
        plains = every.outputs(self.plain)
        if not torch.equal(drawn, torch.get_rng_state()):
            return "a call draws other random numbers than without the wrapper"
        if outputs["found"][1] != plains["found"][1]:
            return "a call does not run under the caller's autocast, or runs under one of its own"
        self.open.append((mine, mine.loss(outputs, sides), every, every.loss(plains, sides)))
        found, expected = ([each.requires_grad for each in tree_leaves(of)] for of in (outputs, plains))
        return "" if found == expected else f"which outputs require a gradient: {found}, without the wrapper {expected}"

    def backward(self, value: int) -> str:
        mine, own, every, whole = self.open.pop(value % len(self.open))
        own.backward()
        whole.backward()
        share = slice(self.rank * len(mine.x), (self.rank + 1) * len(mine.x))
        for name in ("x", "shift"):
            found, expected = getattr(mine, name).grad, getattr(every, name).grad
            if expected is None:
                continue
            if found is None:
                return f"the input {name} has no gradient"
            wanted = {name: self.ranks * expected[share]}
            if problem := as_expected("the gradient of the input", {name: found}, wanted, self.tolerance):
                return problem
        return ""

    def drop(self, value: int) -> None:
        """A forward pass has no backward; every second rank keeps its graph, as one that logs losses."""
        dropped = self.open.pop(value % len(self.open))
        if self.rank % 2:
            self.kept.append(dropped)
        gc.collect()

    def finish(self) -> None:
        self.model.finish_gradient_synchronization()

    def step(self) -> None:
        self.optimizers.step()
        self.open.clear()  # autograd refuses the backward of a forward with other weights

    def clear_gradients(self) -> None:
        self.optimizers.zero_grad()

    def clip(self) -> str:
        if all(p.grad is None for p in self.plain.parameters()):
            return ""
        gradients = [p.grad for p in self.plain.parameters() if p.grad is not None]
        now = nn.utils.get_total_norm(gradients).item()
        most = 0.05 if abs(now - 0.1) < 0.01 else 0.1  # torch scales a little where the norm is just below, too
        expected = nn.utils.clip_grad_norm_(self.plain.parameters(), most)
        norm = self.model.clip_grad_norm_(most)
        self.tolerance = max(self.tolerance, norm_tolerance())
        return as_expected("the returned", {"norm": norm.cpu()}, {"norm": expected.cpu()}, self.tolerance)

    def save(self) -> None:
        self.saved = self._state()

    def load(self, value: int) -> str:
        if value % 2:
            self._make(value)
        mine, plains = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, self.saved)
        self.model.load_state_dict(mine)
        self.plain.load_state_dict(plains)
        self.open.clear()
        return self.gather()

    def switch_mode(self) -> None:
        training = not self.plain.training
        self.plain.train(training)
        self.model.module.train(training)

    def evaluate(self, inference: bool = False) -> str:
        rows = Rows.of(99, self.ranks, self.device)
        with torch.inference_mode() if inference else torch.no_grad():
            torch.manual_seed(0)
            found = rows.loss(rows.outputs(self.model), {0, 1})
            torch.manual_seed(0)
            expected = rows.loss(rows.outputs(self.plain), {0, 1})
        return as_expected("without gradients, the", {"loss": found}, {"loss": expected}, self.tolerance)

    def infer(self) -> str:
        """Evaluate in inference mode."""
        return self.evaluate(inference=True)

    def gather(self) -> str:
        return as_expected("the gathered", full(self.model), parameters_of(self.plain), self.tolerance)


@pytest.mark.large
@pytest.mark.examples(1, 4, 40)
def test_any_history_is_as_without_sharding(
    implementation: Implementation, world: World, examples: int, device: str
) -> None:
    of = world.run(traits, implementation, device)[0]
    hold_on_ranks(world, histories(of), Beside, implementation, device, HISTORIES_EACH * examples)
