"""`--simulate this`: a step's time on the machine at hand, from what its operators take there, each by itself."""

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn

from impl.data_parallel.workload import DataParallelStep
from impl.model.sizes import SIZES
from impl.training_step.cases import TrainingStepCase
from shardmark.api import registry
from shardmark.api.registry import Implementation
from shardmark.api.workload import Mark
from shardmark.meter.hardware import hardware
from shardmark.meter.plan import Plan
from shardmark.predict.simulation.on_ranks import Sent
from shardmark.predict.simulation.program import Event
from shardmark.predict.simulation.this_machine import Machine, Timeline
from shardmark.predict.worlds import simulated
from shardmark.ranks.worlds import Worlds


@pytest.fixture(scope="module")
def machine() -> Iterator[Machine]:
    worlds = Worlds("cpu")
    yield Machine(worlds)
    worlds.close()


class Products:
    """As many equal layers as the case says, forward and backward."""

    backend = "eager"

    def __init__(self, implementation: Implementation, case: int, device: str) -> None:
        self.model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(case)))
        self.x = torch.randn(256, 256)

    def prepare(self) -> None:
        self.model.zero_grad()

    def step(self, mark: Mark) -> None:
        loss = self.model(self.x).sum()
        mark("forward")
        loss.backward()
        mark("backward")


def _plan(workload: type[Any], case: Any, ranks: int = 1, implementation: Implementation | None = None) -> Plan:
    return Plan(workload, cast(Implementation, implementation), None, case, "cpu", ranks)


def test_twice_the_layers_take_about_twice_as_long(machine: Machine) -> None:
    few, many = (machine.step(_plan(Products, layers)) for layers in (8, 16))
    assert 1.5 < many.seconds / few.seconds < 2.7
    assert list(many.parts) == ["forward", "backward"]
    assert sum(many.parts.values()) == pytest.approx(many.seconds, rel=0.05)


@pytest.mark.parametrize("name", ["naive", "flat", "bucketed", "ddp"])
def test_two_ranks_send_their_gradients(machine: Machine, name: str) -> None:
    """Each way of data parallelism: its collectives take time, and none of them is left when the step is over."""
    implementation = registry.resolve("data_parallel", name)
    case = TrainingStepCase("tiny", batch=2, context=32)
    step = machine.step(_plan(DataParallelStep, case, 2, implementation))
    sent = [span for span in step.spans if span.cost is None]
    assert sum(span.nbytes for span in sent if span.name == "all_reduce") == 4 * SIZES["tiny"].parameters
    assert all(0 <= span.begin < span.end <= step.seconds for span in sent)


def test_an_operator_is_measured_once(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.step(_plan(Products, 8))
    monkeypatch.setattr(machine.worlds, "get", lambda size: pytest.fail("it measured again"))
    machine.step(_plan(Products, 9))


def test_what_a_collective_hides_behind() -> None:
    """A collective of 2 s, beside which the host gets half as much done."""
    timeline = Timeline()
    timeline.send(Event(name="all_reduce", ranks=2), Sent(0.0, alone=1.0, beside=2.0, pace=0.5))
    timeline.compute(0.5)
    assert timeline.now == 1.0  # half of the collective is done as well
    timeline.wait(1)
    assert timeline.now == 1.5
    timeline.compute(1.0)
    assert timeline.now == 2.5


def test_this_is_known_and_has_the_rules_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)  # a GPU's rates would be measured
    assert hardware("this").rules == hardware("cpu").rules
    assert simulated("this:2").ranks == 2
    with pytest.raises(ValueError, match=r"known is cpu, .*, this, or a TOML file of your own$"):
        hardware("thus")


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ("this:two", r"^--simulate this:two: the ranks are a number from 1 to 100,000, not 'two'$"),
        ("this:", r"^--simulate this:: the ranks are a number from 1 to 100,000, not ''$"),
        ("this:100000", r"^--simulate this:100000: 100000 ranks are more than this machine allows[^\n]*$"),
    ],
)
def test_bad_values_of_this(value: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=says):
        simulated(value)
