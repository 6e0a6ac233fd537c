"""Random programs of every event that the contract names, on two wrappers of random modules, against float64."""

from __future__ import annotations

import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

from correctness.data_parallel.averaging import assert_nothing_wrong, is_torchs, wrap
from correctness.data_parallel.events import OPTIONS, drawn_events, drawn_setting
from correctness.data_parallel.played_wrapper import Bits, Played
from shardmark.api import Implementation
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("data_parallel")

LENGTH = 26


def play(implementation: Implementation, seed: int, device: str) -> tuple[list[str], Bits]:
    """What is wrong on this rank after any event, and the bits of what must be the same on every rank."""
    draw, ranks = random.Random(seed), dist.get_world_size()
    torchs = is_torchs(wrap(implementation, nn.Linear(1, 1).to(device)))
    accepted = [name for name in OPTIONS if implementation.accepts(name)]
    settings = {name: drawn_setting(draw, ranks, accepted, torchs=torchs) for name in "AB"}
    events = drawn_events(draw, settings, LENGTH, torchs=torchs)
    again = [event.wrapper for event in events if event.name == "wrap a part"]
    wrappers = {
        name: Played(implementation, setting, device, torchs, name in again) for name, setting in settings.items()
    }
    said: list[str] = []
    bits: Bits = []
    for event in events:
        each = wrappers[event.wrapper]
        said.append(str(event))
        try:
            if each.members:
                each.do(event)
        except Exception as error:
            error.add_note(f"seed {seed}, wrapper {event.wrapper} with {each.setting}, after {', '.join(said)}")
            raise
        for name in dict.fromkeys(event.wrapper for event in events[: len(said)]):
            if not wrappers[name].members:
                continue
            if wrong := wrappers[name].look():
                where = f"(seed {seed}, wrapper {name} with {settings[name]}, after {', '.join(said)})"
                return [f"{line} {where}" for line in wrong], bits
        bits += [
            (f"{what} of wrapper {event.wrapper} with {each.setting} after {', '.join(said)}", m, x)
            for what, m, x in each.bits
        ]
        each.bits = []
    return [], bits


@pytest.mark.examples(2, 14, 30)
def test_random_programs(implementation: Implementation, world: World, examples: int, device: str) -> None:
    for seed in torch.randint(2**31, (examples,)).tolist():
        ranks = world.run(play, implementation, seed, device)
        assert_nothing_wrong([wrong for wrong, _ in ranks])
        first: dict[tuple[str, tuple[int, ...]], tuple[int, dict[str, int]]] = {}
        for rank, (_, bits) in enumerate(ranks):
            for when, members, of_rank in bits:
                of, expected = first.setdefault((when, tuple(members)), (rank, of_rank))
                for name in expected.keys() | of_rank.keys():
                    same = of_rank.get(name) == expected.get(name)
                    assert same, f"rank {rank} has other bits in {name!r} than rank {of}: {when} (seed {seed})"
