"""Seconds of a step on this machine: each operator and collective is measured by itself, and their times are added up.

    here = Machine(Worlds("cpu"))
    here.step(plan).seconds

A simulation first records the step's launches and the program's time between them; ranks of this machine then measure
the operators and collectives that have no rate yet. A CPU is its own host: operators run one after another, and a
collective beside them, as far as the cores and the link allow.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, cast

import torch
from torch import nn

from shardmark.api.registry import Implementation, Unsupported
from shardmark.api.workload import Mark
from shardmark.meter.hardware import CPU, Hardware
from shardmark.meter.measure_case import WARMUPS
from shardmark.meter.plan import Plan
from shardmark.predict.simulation.on_ranks import Sent, collective_seconds, mean_of, operator_seconds, step_seconds
from shardmark.predict.simulation.predict import routing_of, simulation
from shardmark.predict.simulation.program import Call, Event, Recorder, typical
from shardmark.predict.simulation.schedule import FIRST_STREAM, Span, Step
from shardmark.ranks.worlds import Worlds

STEPS = 9
"""Simulated steps; the median of their times is the program's."""
SECONDS = 2.0
"""Seconds for which a rank measures one program's operators."""
_COLLECTIVES = "collectives"


class Machine:
    """This machine's rates, measured as they are needed."""

    def __init__(self, worlds: Worlds) -> None:
        self.worlds = worlds
        self._operators: dict[tuple[int, Call], float] = {}
        self._collectives: dict[tuple[int, Call], Sent] = {}
        self._launch: float | None = None

    def forget(self) -> None:
        """Measure operators and collectives anew."""
        self._operators.clear()
        self._collectives.clear()

    def step(self, plan: Plan) -> Step:
        """The steady-state step of the plan on the first rank."""
        events = events_of(plan)
        self.measure(events, plan.world_size)
        return self._assembled(events, plan.world_size, self._per_launch())

    def peer(self, plan: Plan) -> Step | None:
        """A step of the plan's peer; None without a peer, or where it cannot be predicted."""
        if plan.peer is None:
            return None
        try:
            return self.step(replace(plan, implementation=plan.peer, peer=None))
        except Unsupported:
            return None

    def measure(self, events: Sequence[Event], ranks: int) -> None:
        """Measure the operators and collectives that have no rate yet."""
        calls = dict.fromkeys(each.call for each in events if each.call is not None)
        known = self._operators.keys() | self._collectives.keys()
        unknown = [call for call in calls if (ranks, call) not in known]
        if operators := [call for call in unknown if not call.name.startswith("c10d::")]:
            world = self.worlds.get(ranks)
            found = world.run(operator_seconds, operators, SECONDS, world.device)
            for call, *seconds in zip(operators, *found, strict=True):
                self._operators[ranks, call] = max(seconds)
        if collectives := [call for call in unknown if call.name.startswith("c10d::")]:
            world = self.worlds.get(ranks)
            sent = world.run(collective_seconds, collectives, SECONDS, world.device)
            for call, *each in zip(collectives, *sent, strict=True):
                self._collectives[ranks, call] = mean_of(each)

    def _per_launch(self) -> float:
        """Seconds by which a simulated launch of a known program takes longer than a real one."""
        if self._launch is None:
            plan = Plan(Small, cast(Implementation, None), None, None, self.worlds.device, 1)
            events = events_of(plan)
            self.measure(events, 1)
            [steps] = self.worlds.get(1).run(step_seconds, plan, 60)
            real = median(seconds - waited for seconds, waited in steps[10:])
            self._launch = (self._assembled(events, 1, 0.0).seconds - real) / sum(each.launches for each in events)
        return self._launch

    def _assembled(self, events: Sequence[Event], ranks: int, per_launch: float) -> Step:
        timeline = Timeline()
        for event in events:
            timeline.compute(event.between - per_launch * event.launches)
            if event.wait:
                timeline.wait(event.wait)
            elif event.ranks:
                assert event.call is not None
                timeline.send(event, self._collectives[ranks, event.call])
            elif event.call is not None:
                began = timeline.now
                timeline.compute(self._operators[ranks, event.call])
                timeline.spans.append(Span(event.name, FIRST_STREAM, began, timeline.now, 0.0, event.cost))
            elif event.name:
                timeline.mark(event.name)
        timeline.wait(len(events))  # collectives that the step never waits for delay the next one
        return Step(timeline.now, timeline.now, timeline.parts, timeline.spans)


@dataclass
class _Pending:
    event: Event
    sent: Sent
    left: float = 1.0
    """Share of the collective that is not done."""
    began: float | None = None


class Timeline:
    """A host that computes, and collectives that go on meanwhile, one after another."""

    def __init__(self) -> None:
        self.now = 0.0
        self.spans: list[Span] = []
        self.parts: dict[str, float] = {}
        self._marked = 0.0
        self._pending: list[_Pending] = []
        self._done = 0

    def compute(self, seconds: float) -> None:
        """The host works for that long; a collective under way slows it down."""
        while seconds > 0 and self._pending:
            first = self._first()
            rest = first.left * first.sent.beside
            pace = max(first.sent.pace, 1e-3)
            if seconds / pace < rest:
                first.left -= seconds / pace / first.sent.beside
                self.now += seconds / pace
                return
            self.now += rest
            seconds -= rest * pace
            self._end()
        self.now = max(self.now, self.now + seconds)

    def send(self, event: Event, sent: Sent) -> None:
        self.compute(sent.launch)
        self._pending.append(_Pending(event, sent))

    def wait(self, number: int) -> None:
        while self._pending and self._done < number:
            first = self._first()
            self.now += first.left * first.sent.alone
            self._end()

    def mark(self, part: str) -> None:
        self.parts[part] = self.parts.get(part, 0.0) + self.now - self._marked
        self._marked = self.now

    def _first(self) -> _Pending:
        first = self._pending[0]
        if first.began is None:
            first.began = self.now
        return first

    def _end(self) -> None:
        first = self._pending.pop(0)
        self._done += 1
        began = self.now if first.began is None else first.began
        self.spans.append(Span(first.event.name, _COLLECTIVES, began, self.now, 0.0, None, first.event.nbytes))


def events_of(plan: Plan, on: Hardware = CPU) -> list[Event]:
    """The events of the plan's steady-state step on the first rank, by the rules of that hardware."""
    recorder = Recorder()
    with simulation(plan.world_size, on=on, schedule=recorder, routing=routing_of(plan)):
        workload = plan.workload(plan.implementation, plan.case, "cpu")
        for _ in range(WARMUPS):
            workload.prepare()
            workload.step(lambda part: None)
        steps = []
        for _ in range(STEPS):
            workload.prepare()
            steps.append(recorder.record(workload.step))
        del workload
    return typical(steps)


class Small:
    """A known program of tiny operators, which shows the seconds of a launch."""

    backend = "eager"

    def __init__(self, implementation: Implementation, case: Any, device: str) -> None:
        blocks = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16), nn.GELU()) for _ in range(16)]
        self.model = nn.Sequential(*blocks).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.x = torch.randn(8, 16, device=device)

    def prepare(self) -> None:
        self.optimizer.zero_grad()

    def step(self, mark: Mark) -> None:
        loss = self.model(self.x).square().mean()
        mark("forward")
        loss.backward()
        mark("backward")
        self.optimizer.step()
        mark("optimizer")
