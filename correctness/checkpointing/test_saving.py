"""A policy saves memory: bytes that forward keeps for backward, and the peak of both."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from correctness.checkpointing.models import SIZE, Policy, loss_of, raising
from correctness.support.contracts import assert_freed_at_once, growth, held_outside_of_tensors
from impl.attention import eager_attention
from impl.checkpointing import none
from impl.checkpointing.contract import claims_to_save
from impl.model import Transformer
from impl.model.layers import Block
from shardmark.api import Implementation
from shardmark.meter.memory import meter

pytestmark = pytest.mark.family("checkpointing")

LAYERS, CONTEXT = 8, 48
LEAST = 0.04
"""Smallest share of the bytes that a policy saves: one checkpointed block of the eight saves more."""


FROZEN: dict[str, Callable[[str], bool]] = {  # by the parameter's name
    "nothing": lambda name: False,
    "embedding": lambda name: "embedding" in name,  # the first block's input needs no gradient
    "first_half": lambda name: (
        "embedding" in name or name.startswith(tuple(f"blocks.{i}." for i in range(LAYERS // 2)))
    ),
    "last_half": lambda name: name.startswith(tuple(f"blocks.{i}." for i in range(LAYERS // 2, LAYERS))),
    "all_blocks": lambda name: "blocks" in name,
    "all_but_first_block": lambda name: not name.startswith("blocks.0."),
    "all_but_embedding": lambda name: "embedding" not in name,
    "all_but_norms": lambda name: "norm" not in name,
    "every_second_block": lambda name: name.startswith(tuple(f"blocks.{i}." for i in range(1, LAYERS, 2))),
}

EVERY_TIME = [("train", "nothing"), ("train", "every_second_block"), ("eval", "first_half")]


def _marks(mode: str, frozen: str) -> list[pytest.MarkDecorator]:
    if (mode == "train") == (frozen in ("first_half", "all_blocks")):
        return [pytest.mark.sweep]
    return [] if (mode, frozen) in EVERY_TIME else [pytest.mark.judged]


MODES = [pytest.param(mode, frozen, marks=_marks(mode, frozen)) for mode in ("train", "eval") for frozen in FROZEN]


def _freeze(model: Transformer, frozen: str) -> None:
    for name, p in model.named_parameters():
        p.requires_grad_(not FROZEN[frozen](name))


@pytest.mark.parametrize(("mode", "frozen"), MODES)
def test_it_saves_in_each_mode_whatever_is_frozen(
    implementation: Implementation, mode: str, frozen: str, device: str
) -> None:
    """Nothing is kept after backward, after a forward without gradients, or once an output is freed; and no more than
    where nothing is frozen.

    The peak is not lower if backward recomputes all blocks before it frees any.
    """
    found = _in_mode(implementation.watched, mode, frozen, device)
    plain = _without(mode, frozen, device)
    when = f"in {mode} mode with {frozen} frozen"
    _assert_leaves_nothing(found, when)
    _assert_saves(implementation, found, plain, when)
    if frozen != "nothing":
        trained = _in_mode(implementation.watched, mode, "nothing", device)
        more = found["kept"] - trained["kept"]
        assert more <= LEAST * _without(mode, "nothing", device)["kept"], (
            f"{when} forward keeps {found['kept']:,} bytes, and {trained['kept']:,} where nothing is frozen"
        )


def test_it_saves_where_an_evaluation_came_first(implementation: Implementation, device: str) -> None:
    """An evaluation before training does not switch checkpointing off."""
    found = _in_mode(implementation.watched, "train", "nothing", device, evaluated=True)
    _assert_saves(implementation, found, _without("train", "nothing", device), "after an evaluation")


@pytest.mark.parametrize("part", ["forward", pytest.param("backward", marks=pytest.mark.judged)])
def test_it_saves_after_a_batch_that_raised_in_a_block(implementation: Implementation, part: str, device: str) -> None:
    """A training loop may leave out a batch whose activations are not finite, or for which there is no memory."""
    found = _in_mode(implementation.watched, "train", "nothing", device, raised=part)
    _assert_saves(implementation, found, _without("train", "nothing", device), f"after a {part} that raised in a block")


@pytest.mark.judged
@pytest.mark.parametrize("change", ["copied", "assigned"])
def test_it_saves_where_a_model_is_copied_or_gets_other_parameters(
    implementation: Implementation, change: str, device: str
) -> None:
    found = _in_mode(implementation.watched, "train", "nothing", device, changed=change)
    _assert_saves(implementation, found, _without("train", "nothing", device), f"once {change}")


class InTuples(Block):
    """A block that takes a tuple and a scale by name, and returns a tuple."""

    def forward(self, given: Any, *, scale: Tensor) -> Any:  # type: ignore[override]
        return super().forward(given[0]) * scale, None


class OfTuples(Transformer):
    def __init__(self, size: Any, **options: Any) -> None:
        super().__init__(size, **options)
        for block in self.blocks:
            block.__class__ = InTuples

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens), None
        for block in self.blocks:
            x = block(x, scale=torch.ones((), device=tokens.device))
        return self.output(self.norm(x[0]))


class Scaled(Block):
    """A block that takes a scale by position."""

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x) * scale


class ByPosition(Transformer):
    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, torch.ones((), device=tokens.device))
        return self.output(self.norm(x))


def _made(how: str, device: str) -> Transformer:
    kind = {"by_name_in_tuples": OfTuples, "by_position": ByPosition}.get(how, Transformer)
    model = kind(replace(SIZE, layers=LAYERS, vocab=8), context_length=CONTEXT, attention=eager_attention).to(device)
    for block in model.blocks:
        if how == "by_position":
            block.__class__ = Scaled
        elif how == "with_dropout":
            block.attention_norm = nn.Sequential(block.attention_norm, nn.Dropout(0.1))
        elif how == "with_hooks":
            block.register_forward_hook(lambda *_: None)
    return model.to(torch.bfloat16) if how == "in_bfloat16" else model


HOW = ("under_autocast", "by_name_in_tuples", "by_position", "in_bfloat16", "with_dropout", "with_hooks")


@pytest.mark.parametrize("how", [*HOW[:2], *(pytest.param(how, marks=pytest.mark.judged) for how in HOW[2:])])
def test_it_saves_however_blocks_are_called(implementation: Implementation, how: str, device: str) -> None:
    try:
        found = _in_mode(implementation.watched, "train", "nothing", device, how=how)
    except Exception as error:
        if how != "by_name_in_tuples":
            raise
        pytest.skip(f"its blocks take and return a tensor alone: {error}")
    if how == "by_name_in_tuples":  # autocast keeps what it casts until it ends
        _assert_leaves_nothing(found, how.replace("_", " "))
    _assert_saves(implementation, found, _without("train", "nothing", device, how), how.replace("_", " "))


def _assert_leaves_nothing(found: dict[str, int], when: str) -> None:
    for name in ("the first step", "a forward without gradients", "an output that is dropped", "backward"):
        assert found[name] < 1000, f"{when} {name} leaves {found[name]:,} bytes behind"


def _assert_saves(implementation: Implementation, found: dict[str, int], plain: dict[str, int], when: str) -> None:
    if not claims_to_save(implementation.target):
        return
    for name in ("kept", "peak"):
        what = "forward keeps" if name == "kept" else "the peak of forward and backward is"
        assert found[name] <= (1 - LEAST) * plain[name], (
            f"{when} {what} {found[name]:,} bytes, and {plain[name]:,} without the policy"
        )


def test_what_it_saves_is_freed_without_the_collector(implementation: Implementation, device: str) -> None:
    model = implementation.watched(Transformer(replace(SIZE, vocab=8), context_length=CONTEXT).to(device))
    tokens = torch.zeros(2, CONTEXT, dtype=torch.int64, device=device)

    def step() -> None:
        loss_of(model, tokens).backward()
        model.zero_grad()

    assert_freed_at_once(step, device)
    assert_freed_at_once(lambda: loss_of(model, tokens), device)


def test_nothing_is_kept_after_backward_by_a_loss_that_the_caller_keeps(
    implementation: Implementation, device: str
) -> None:
    """As one does to log it later: PyTorch frees what is saved when backward has read it. The states of generators,
    5,056 bytes each on a CPU, do no harm."""
    model = implementation.watched(Transformer(replace(SIZE, vocab=8), context_length=CONTEXT).to(device))
    tokens = torch.zeros(64, CONTEXT, dtype=torch.int64, device=device)
    losses: list[Tensor] = []

    def step() -> None:
        losses.append(loss_of(model, tokens))
        losses[-1].backward()
        model.zero_grad()

    left = growth(step, device, collect=True)
    states = 4 * SIZE.layers * 2**13
    assert left < states, f"four losses that are kept after their backward keep {left:,} bytes beside them"


def test_nothing_large_is_kept_outside_of_tensors(implementation: Implementation, device: str) -> None:
    """As in bytes or NumPy's arrays, which the meter of tensors does not see."""
    model = implementation.watched(Transformer(replace(SIZE, vocab=8), context_length=CONTEXT).to(device))
    tokens = torch.zeros(2, CONTEXT, dtype=torch.int64, device=device)
    held = held_outside_of_tensors(lambda: loss_of(model, tokens))
    plain = _without("train", "nothing", device)["kept"]
    assert held < 0.2 * plain, f"forward keeps {held:,} bytes outside of tensors; without the policy tensors, {plain:,}"


@cache
def _without(mode: str, frozen: str, device: str, how: str = "") -> dict[str, int]:
    return _in_mode(none, mode, frozen, device, how=how)


def _in_mode(
    policy: Policy,
    mode: str,
    frozen: str,
    device: str,
    evaluated: bool = False,
    raised: str = "",
    changed: str = "",
    how: str = "",
) -> dict[str, int]:
    """Bytes that are kept, at the peak and left behind; `evaluated`: the model's first call is an evaluation; `raised`:
    its "forward" or "backward" ends in an error in the second block; `changed`: the model is a copy, or a state_dict
    was assigned to it; `how` its blocks are called, or what they have: one of `HOW`."""
    model = _made(how, device)
    _freeze(model, frozen)  # before the policy: a loop over the blocks may give segments afterwards
    policy(model)
    if changed == "copied":
        model = deepcopy(model)
    elif changed == "assigned":
        model.load_state_dict({name: x.clone() for name, x in model.state_dict().items()}, assign=True)
    model.train(mode == "train")
    tokens = torch.zeros(2, CONTEXT, dtype=torch.int64, device=device)
    with meter(device) as memory, torch.autocast(device, dtype=torch.bfloat16, enabled=how == "under_autocast"):
        loss_of(_made(how, device), tokens).backward()
        memory.mark("start")  # the libraries' workspaces are there from now on
        if evaluated:
            with torch.no_grad():
                model(tokens)
        if raised == "forward":
            with raising(model.blocks[1]), pytest.raises(FloatingPointError):
                model(tokens)
        elif raised == "backward":
            loss = loss_of(model, tokens)
            with raising(model.blocks[1]), suppress(FloatingPointError):  # where it recomputes that part
                loss.backward()
            del loss
            model.zero_grad()
        loss_of(model, tokens).backward()
        model.zero_grad()
        memory.mark("before")
        with torch.no_grad():
            model(tokens)
        memory.mark("no grad")
        loss = loss_of(model, tokens)
        del loss
        memory.mark("dropped")
        memory.reset_peak()
        loss = loss_of(model, tokens)
        memory.mark("forward")
        loss.backward()
        model.zero_grad()
        del loss
        memory.mark("after")
    at = memory.phases
    return {
        "the first step": at["before"] - at["start"],
        "a forward without gradients": at["no grad"] - at["before"],
        "an output that is dropped": at["dropped"] - at["no grad"],
        "kept": at["forward"] - at["dropped"],
        "peak": memory.peak - at["dropped"],
        "backward": at["after"] - at["dropped"],
    }
