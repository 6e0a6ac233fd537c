"""What does a test on real ranks cost: on a warm world, on a fresh one, and with a plain spawn?"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist

from shardmark.api import Race
from shardmark.meter.clock import Laps
from shardmark.meter.measure_case import shuffled
from shardmark.meter.memory import Memory
from shardmark.meter.plan import IMPLEMENTATION, PEER, Identity, Measured
from shardmark.plugin.measure import Measure
from shardmark.plugin.session import SESSION
from shardmark.ranks.world import World
from shardmark.report.answers import fastest

pytestmark = pytest.mark.question("What does a test on two real ranks cost?", short="test on two ranks", answer=fastest)

RANKS = 2
SPAWNS = 8  # of seconds each: the fewest that a 95% interval can be told from
FEW = 2  # at smoke scale, which tells none
ROUNDS = 20  # enough for a verdict among hundreds
CALLED = {
    "spawn": "a test that spawns its ranks",
    "fresh": "a test with a fresh world",
    "warm": "a test in a warm world",
}


@dataclass(frozen=True)
class OneCollective:
    """The work of the test: an all-reduce of one element."""

    dtype: str = "float32"

    def __str__(self) -> str:
        return f"{RANKS}ranks-one-all-reduce"


def all_reduce_one() -> float:
    """Runs on every rank."""
    ones = torch.ones(1)
    dist.all_reduce(ones)
    return ones.item()


def _spawned(rank: int, directory: str) -> None:
    store = dist.FileStore(f"{directory}/rendezvous", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    assert all_reduce_one() == RANKS
    dist.destroy_process_group()


def spawn() -> None:
    """Start two new interpreters, as PyTorch's documentation does in its tests."""
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(_spawned, args=(directory,), nprocs=RANKS)


def fresh() -> None:
    """A new world for the test, from the warm forkserver."""
    with World(RANKS) as world:
        assert world.run(all_reduce_one) == [RANKS] * RANKS


@pytest.fixture(scope="module")
def times(pytestconfig: pytest.Config) -> dict[str, dict[str, list[Laps]]]:
    """Paired times by way: spawn and warm each beside fresh in the same rounds, and fresh beside spawn."""
    spawns = FEW if pytestconfig.stash[SESSION].scale == "smoke" else SPAWNS
    fresh()  # starts the forkserver
    with World(RANKS) as world:

        def warm() -> None:
            assert world.run(all_reduce_one) == [RANKS] * RANKS

        ways: dict[str, Callable[[], None]] = {"spawn": spawn, "fresh": fresh, "warm": warm}
        warm()
        laps: dict[str, dict[str, list[Laps]]] = {}
        for way, rounds in (("spawn", spawns), ("warm", ROUNDS)):
            laps[way] = {IMPLEMENTATION: [], PEER: []}
            for _ in range(rounds):
                for name in shuffled([IMPLEMENTATION, PEER]):
                    began = time.perf_counter()
                    ways[way if name == IMPLEMENTATION else "fresh"]()
                    laps[way][name].append(Laps(time.perf_counter() - began))
    fresh_and_spawn = {IMPLEMENTATION: laps["spawn"][PEER], PEER: laps["spawn"][IMPLEMENTATION]}
    return {**laps, "fresh": fresh_and_spawn}


@pytest.mark.parametrize(
    ("way", "race"),
    [
        pytest.param("spawn", Race("fresh"), id="spawn"),
        pytest.param("fresh", Race("spawn", goal=1 / 4), id="fresh"),  # torch is imported already
        pytest.param("warm", Race("fresh", budget=1 / 4), id="warm"),
    ],
)
def test_world(way: str, race: Race, times: dict[str, dict[str, list[Laps]]], measure: Measure) -> None:
    identity = Identity("world", way, OneCollective(), "cpu", RANKS, called=CALLED[way])
    measure.record(identity, [Measured("gloo", Memory(), times[way])], time=race)
