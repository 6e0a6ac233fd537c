"""Beginning together, several calls in one measurement, and a cold L2 cache: what is timed, and what is not."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from correctness.support.metering import plan_of
from shardmark.api.registry import Implementation
from shardmark.api.workload import Mark
from shardmark.meter import clock, l2
from shardmark.meter import measure_case as passes
from shardmark.meter.clock import Stopwatch
from shardmark.meter.memory import Memory
from shardmark.meter.plan import IMPLEMENTATION, Plan, Rounds
from tests.support.measured import stand_in

LOG: list[str] = []


class Ticking:
    """A step that takes a millisecond of a clock of its own, and logs its calls."""

    backend = "none"
    now = 0.0

    def __init__(self, implementation: Implementation, case: object, device: str) -> None:
        self.name = implementation.name

    def prepare(self) -> None:
        LOG.append(f"prepare {self.name}")

    def step(self, mark: Mark) -> None:
        LOG.append(f"step {self.name}")
        Ticking.now += 1e-3
        mark("all")


class FiveCalls(Ticking):
    calls = 5


@pytest.fixture(autouse=True)
def own_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    LOG.clear()
    Ticking.now = 0.0
    monkeypatch.setattr(clock.time, "perf_counter", lambda: Ticking.now)


def test_calls_are_back_to_back_and_the_time_is_that_of_one() -> None:
    plan = plan_of(FiveCalls, stand_in("mine"), None)
    workload = FiveCalls(plan.implementation, None, "cpu")
    laps = passes.timed_step(plan, workload, workload.step)
    assert ["prepare mine", *["step mine"] * 5] == LOG
    assert laps.seconds == laps.parts["all"] == pytest.approx(1e-3)


class OnCuda:
    """CUDA's functions that a stopwatch calls, logged; events are 2 ms apart."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        event = SimpleNamespace(record=lambda: LOG.append("event"), elapsed_time=lambda after: 2.0)
        monkeypatch.setattr(clock, "_cycles_per_second", lambda: 1e6)
        monkeypatch.setattr(clock, "_seconds", lambda before, after: 2e-3)
        monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: LOG.append("synchronize"))
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: LOG.append(f"spin {cycles}"))


def test_devices_meet_after_the_spin_and_before_the_first_event(monkeypatch: pytest.MonkeyPatch) -> None:
    """The spin is as long as the host takes to launch all calls, and the meeting."""
    OnCuda(monkeypatch)
    monkeypatch.setattr(dist, "barrier", lambda: LOG.append("barrier"))
    monkeypatch.setattr(passes, "_meet", lambda: LOG.append("meet"))
    plan = replace(plan_of(FiveCalls, stand_in("mine"), None), device="cuda", world_size=2)
    workload = FiveCalls(plan.implementation, None, "cuda")
    laps = passes.timed_step(plan, workload, lambda mark: LOG.append("step"), ahead=1e-3)
    begun = ["prepare mine", "barrier", "synchronize", "spin 5100", "meet", "event"]
    assert [*begun, *["step"] * 5, "event", "synchronize"] == LOG
    assert laps.seconds == pytest.approx(2e-3 / 5)


def test_one_rank_meets_nobody_and_a_warm_up_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    OnCuda(monkeypatch)
    monkeypatch.setattr(passes, "_meet", lambda: LOG.append("meet"))
    plan = replace(plan_of(Ticking, stand_in("mine"), None), device="cuda")
    passes.timed_step(plan, Ticking(plan.implementation, None, "cuda"), lambda mark: None)
    assert LOG == ["prepare mine", "synchronize", "event", "event", "synchronize"]


def with_l2(monkeypatch: pytest.MonkeyPatch, plan: Plan) -> list[str]:
    """The log of the timed rounds on a device that has an L2 cache."""
    monkeypatch.setattr(passes, "l2_bytes", lambda device: 50 * 2**20)
    monkeypatch.setattr(passes, "flush_l2", lambda device: LOG.append("flush"))
    measured = passes.timed_rounds(plan, Memory(), Ticking(plan.implementation, None, "cpu"))
    assert len(measured.laps[IMPLEMENTATION]) == 3
    assert all(lap.seconds == pytest.approx(1e-3) for lap in measured.laps[IMPLEMENTATION])
    return LOG


ROUNDS = Rounds(minimum=3, maximum=3)


def test_a_rate_is_of_a_warm_device_and_a_cold_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(plan_of(Ticking, stand_in("mine"), None), rounds=ROUNDS, rates=True)
    log = with_l2(monkeypatch, plan)
    warm = round(passes.WARM / 1e-3)
    assert log == ["prepare mine", "flush", "step mine"] * (1 + warm + 3)


def test_both_steps_of_a_pair_find_the_cache_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cold where the row states a rate; else as the other step leaves it."""
    plan = replace(plan_of(Ticking, stand_in("mine"), None), rounds=ROUNDS, peer=stand_in("theirs"))
    log = with_l2(monkeypatch, plan)
    assert "flush" not in log and log.count("step mine") < 10
    log.clear()
    with_l2(monkeypatch, replace(plan, rates=True))
    steps = [each for each in log if each.startswith("step")]
    assert log.count("flush") == len(steps) and {*steps} == {"step mine", "step theirs"}


def test_several_calls_find_the_cache_as_they_leave_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passes, "flush_l2", lambda device: LOG.append("flush"))
    plan = replace(plan_of(FiveCalls, stand_in("mine"), None), rates=True)
    laps = passes.timed_step(plan, workload := FiveCalls(plan.implementation, None, "cpu"), workload.step)
    assert "flush" not in LOG and laps.elapsed == pytest.approx(5 * laps.seconds)


def test_twice_the_cache_is_written_and_on_cpu_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    made = torch.empty

    def empty(size: int, dtype: torch.dtype, device: str) -> torch.Tensor:
        written.append(size * dtype.itemsize)
        return made(size, dtype=dtype)

    monkeypatch.setattr(torch, "empty", empty)
    l2.flush_l2("cpu")
    assert written == []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=4096))
    l2.flush_l2("cuda")
    assert written == [8192]


def test_a_stopwatch_on_cpu_does_not_meet() -> None:
    Stopwatch("cpu").start(lambda: 1 / 0)  # type: ignore[arg-type, return-value]
