"""Histories of a training step: forward, backward, update and call, and what callers do in between."""

from __future__ import annotations

import gc
import warnings
from itertools import chain

import pytest
import torch
from hypothesis import strategies as st

from correctness.engine.histories import Problem, hold, report
from correctness.training_step.events import AROUND, EVENTS, Event, History
from correctness.training_step.models import KINDS
from correctness.training_step.player import OPTIONS, problem_of
from correctness.training_step.stepping import (
    assert_gradients,
    batch,
    setting,
    skip_where_graphs_own_gradients,
    values,
)
from shardmark.api import Implementation, requires_compiler
from shardmark.meter.memory import meter

pytestmark = pytest.mark.family("training_step")

ORDERS = {
    "a_step_after_an_update": ["call", "forward", "backward", "update"],
    "a_scheduler": ["call", "rate", "call", "clear", "rate", "forward", "backward", "update"],
    "two_updates": ["forward", "backward", "update", "update", "forward", "backward"],
    "gradients_over_calls": ["call", "call", "clear", "call", "forward", "backward", "backward", "update"],
    "cleared_before_an_update": ["forward", "backward", "clear", "update", "forward", "backward", "update"],
    "accumulation": [*["forward"] * 2, *["backward"] * 2, "update", "zero", "forward", "backward", "replace", "update"],
    "skipped_while_a_loss_waits": ["forward", "overflow", "backward", "update"],
    "errors": ["forward", "backward", "update_fails", "clear", "call", "forward", "backward_fails", "call"],
    "thawed": ["call", "freeze", "forward", "backward", "update", "freeze", "call"],
    "validation_in_between": ["forward", "drop", "call", "modes", "forward", "drop", "data", "weights", "call"],
}


BFLOAT16 = pytest.param("bfloat16", marks=pytest.mark.judged)
"""For those that refuse float16."""


@pytest.mark.parametrize("precision", ["float32", "float16", BFLOAT16])
@pytest.mark.parametrize("order", ORDERS)
def test_orders_that_trainings_have(implementation: Implementation, order: str, precision: str, device: str) -> None:
    skip_where_graphs_own_gradients(implementation)
    events = [Event(kind, 4 * i + 1) for i, kind in enumerate(ORDERS[order])]
    kind = "tracking" if order == "validation_in_between" else "plain"
    history = History(events, frozen=(2,) * (order == "thawed"), kind=kind, mixed=order == "accumulation")
    problem = problem_of(implementation, history, precision, device)
    assert problem is None, report(history, problem)


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_an_update_after_ignored_targets_is_one_step(
    implementation: Implementation, precision: str, device: str
) -> None:
    """The gradients are zero; momentum and weight decay still change parameters."""
    of = setting(implementation, device, precision, **OPTIONS)
    of.step(of.tokens, of.targets)
    of.optimizer.zero_grad()
    before = values(of.model)
    momenta = {name: of.optimizer.state[p]["momentum_buffer"].clone() for name, p in of.model.named_parameters()}
    of.step(of.tokens, torch.full_like(of.targets, -100))
    for name, value in before.items():  # v = momentum * v + decay * p; p = p - lr * v
        velocity = OPTIONS["momentum"] * momenta[name] + OPTIONS["weight_decay"] * value
        before[name] = value - OPTIONS["lr"] * velocity
    assert_gradients(values(of.model), before, 1e-6, "value after an update on targets of -100 alone")


PREFIXES = {
    "forward": "f",
    "forward_without_autograd": "v",
    "forward_and_backward": "fb",
    "all_three": "fbu",
    "two_forwards_one_backward": "ffb",
    "two_forwards_the_last_ones_backward": "ffl",
    "forward_after_a_step": "fbuf",
    "full_step": "c",
}


@pytest.mark.parametrize("prefix", PREFIXES)
def test_no_activations_are_left_once_losses_are_freed(
    implementation: Implementation, prefix: str, device: str
) -> None:
    of = setting(implementation, device)
    tokens, targets = batch(device, (8, 64))  # logits of 128 KiB
    of.step(tokens, targets)
    of.optimizer.zero_grad()
    with meter(device) as memory:
        memory.mark("before")
        losses = []
        for part in PREFIXES[prefix]:
            if part in "fv":
                with torch.set_grad_enabled(part == "f"):
                    losses.append(of.step.forward(tokens, targets))
            elif part == "u":
                of.step.update()
            elif part == "c":
                of.step(tokens, targets)
            else:
                of.step.backward(losses[0 if part == "b" else -1])
        losses.clear()
        of.optimizer.zero_grad()
        gc.collect()
        memory.mark("after")
    left = memory.phases["after"] - memory.phases["before"]
    parts = prefix.replace("_", " ")
    assert left <= 1024, f"{left:,} bytes are left after {parts}, when the losses and the gradients are freed"


events = st.builds(Event, st.sampled_from(list(EVENTS)), st.integers(0, 15), st.sampled_from(AROUND))
steps = st.builds(
    lambda event, forwards: [
        *(Event("forward", *each) for each in forwards),
        event,
        *(Event("backward") for _ in forwards),
        Event("update"),
    ],
    events,
    st.lists(st.tuples(st.integers(0, 15), st.sampled_from(AROUND)), min_size=1, max_size=2),
)
"""A step on one batch or two, with another event between the forward passes and their backward passes."""
histories = st.builds(
    lambda pieces, *options: History(list(chain(*pieces)), *options),
    st.lists(steps | st.lists(events, min_size=1, max_size=6), min_size=2, max_size=5),
    st.lists(st.integers(0, 11), max_size=2),
    st.sampled_from(KINDS),
    st.sampled_from([False, False, True]),
    st.booleans(),
    st.booleans(),
)


@pytest.mark.parametrize("precision", ["float32", "float16", BFLOAT16])
@pytest.mark.examples(8, 40, 300)
def test_any_history_is_that_of_autograd_and_sgd(
    implementation: Implementation, examples: int, precision: str, device: str
) -> None:
    """Losses, gradients, parameters and momentum are compared after each event."""
    skip_where_graphs_own_gradients(implementation)
    if requires_compiler in implementation.requires:
        pytest.skip("it compiles anew for each example; the orders above stand for them")

    def plays(history: History) -> Problem | None:
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)  # none overflows
            return problem_of(implementation, history, precision, device)

    hold(histories, plays, examples, bounded=False)
