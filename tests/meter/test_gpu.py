"""Clocks, power and heat of a GPU while a case is timed, by a fake of NVML's module."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from correctness.support.metering import plan_of
from shardmark.api.registry import Implementation
from shardmark.api.workload import Mark
from shardmark.meter import gpu as meter
from shardmark.meter import measure_case as passes
from shardmark.meter.disturbances import HEAT, POWER, SLOWDOWN, in_words
from shardmark.meter.gpu import GpuFigures, GpuWatch
from shardmark.meter.memory import Memory
from shardmark.meter.plan import Measured, Rounds
from shardmark.ranks import nvml
from shardmark.ranks.nvml import Device
from shardmark.rows import gpus
from shardmark.rows.fill import gpus_entry, throttled, time_entry
from tests.support.fake_nvml import HEALTHY, PER_SECOND, FakeGpu, install
from tests.support.measured import stand_in


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The host's clock, which stands at 0 seconds until a test sets it."""
    now = SimpleNamespace(seconds=0.0)
    monkeypatch.setattr(meter.time, "perf_counter", lambda: now.seconds)
    return now


def watched(gpu: FakeGpu, clock: SimpleNamespace, *after: dict[str, Any]) -> GpuFigures | None:
    """Figures of two seconds, with a sample at each of these changes of the GPU's answers."""
    watch = GpuWatch("cuda")
    for i, changed in enumerate(after):
        gpu.answers |= changed
        clock.seconds = 2.0 * (i + 1) / len(after)
        watch.sample()
    return watch.figures()


def test_the_figures_are_in_base_units_and_of_the_timed_rounds(
    monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    gpu = FakeGpu(answers=dict(HEALTHY))
    install(monkeypatch, gpu)
    found = watched(gpu, clock, {"Temperature": lambda sensor: 70}, {"TotalEnergyConsumption": 907_000})
    assert found == GpuFigures(
        sm_clock=1.98e9, memory_clock=2.619e9, power=450.0, temperature=70.0, energy=900.0, shared=False
    )


@pytest.mark.parametrize(
    ("bits", "policy", "cause"),
    [
        *((bits, None, POWER) for bits in (0x4, 0x80)),
        *((bits, None, HEAT) for bits in (0x20, 0x40 | 0x8)),
        (0x8, None, SLOWDOWN),
        (0, 0, POWER),
        (0, 1, HEAT),
    ],
)
def test_throttling_is_seen_in_samples_and_in_counters(
    bits: int, policy: int | None, cause: str, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    gpu = FakeGpu(answers=dict(HEALTHY))
    install(monkeypatch, gpu)
    lowered = {
        "CurrentClocksEventReasons": bits,
        "ViolationStatus": lambda asked: SimpleNamespace(violationTime=PER_SECOND if asked == policy else 0),
    }
    found = watched(gpu, clock, {}, lowered)
    assert found is not None and found.throttled == {cause: 0.5}
    entry = throttled([Measured("nccl", Memory(), gpu=found)])
    assert entry == {cause: 0.5} and "50% of the time" in in_words(entry)


def test_less_than_a_twentieth_is_no_remark_and_clocks_that_the_user_set_are_no_throttling(
    monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    gpu = FakeGpu(answers=HEALTHY | {"CurrentClocksEventReasons": 0x2})
    install(monkeypatch, gpu)
    found = watched(gpu, clock, {"ViolationStatus": lambda asked: SimpleNamespace(violationTime=PER_SECOND // 50)})
    assert found is not None and found.reasons == ["clocks set by the user"] and found.throttled[HEAT] == 0.01
    assert throttled([Measured("nccl", Memory(), gpu=found)]) == {}


@pytest.mark.parametrize("missing", sorted(HEALTHY))
def test_a_figure_that_this_gpu_does_not_support_is_none_and_the_others_stay(
    missing: str, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    gpu = FakeGpu(answers={name: answer for name, answer in HEALTHY.items() if name != missing})
    install(monkeypatch, gpu)
    found = watched(gpu, clock, {} if missing == "TotalEnergyConsumption" else {"TotalEnergyConsumption": 1_007_000})
    assert found is not None
    fields = {
        "ClockInfo": {"sm_clock", "memory_clock"},
        "Temperature": {"temperature"},
        "TotalEnergyConsumption": {"energy"},
    }
    names = ("sm_clock", "memory_clock", "power", "temperature", "energy")
    assert {name for name in names if vars(found)[name] is None} == fields.get(missing, set())
    assert found.power == 500.0  # of the energy, or the mean of the samples


def test_older_drivers_have_the_older_name_of_the_reasons(
    monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    answers = {name: answer for name, answer in HEALTHY.items() if name != "CurrentClocksEventReasons"}
    gpu = FakeGpu(answers=answers | {"CurrentClocksThrottleReasons": 0x20})
    install(monkeypatch, gpu)
    found = watched(gpu, clock, {})
    assert found is not None and found.throttled == {HEAT: 1.0} and found.reasons == ["heat"]


def test_a_partitioned_gpu_has_no_power_or_energy_of_its_own(
    monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    """CUDA's device is an instance, whose UUID only NVML's instances have; the clocks are the GPU's."""
    whole = FakeGpu(answers=HEALTHY | {"MigMode": [1, 1], "UUID": "GPU-of-all"})
    instance = FakeGpu(bus=7, answers={"UUID": "MIG-7", "parent": whole})
    install(monkeypatch, instance, whole, buses=False)
    found = watched(whole, clock, {})
    assert found is not None and found.shared and found.sm_clock == 1.98e9
    assert found.power is None and found.energy is None


@pytest.mark.parametrize("how", ["package absent", "library not loadable", "GPU unknown"])
def test_without_nvml_there_are_no_figures_and_no_error(
    how: str, monkeypatch: pytest.MonkeyPatch, clock: SimpleNamespace
) -> None:
    gpu = FakeGpu(answers=HEALTHY | ({"UUID": "GPU-another"} if how == "GPU unknown" else {}))
    install(monkeypatch, gpu, loads=how != "library not loadable", buses=False)
    if how == "package absent":
        monkeypatch.setitem(sys.modules, "pynvml", None)
    assert Device.of(0) is None and watched(gpu, clock, {}) is None
    assert gpus_entry([Measured("nccl", Memory())]) == []


def test_on_cpu_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, FakeGpu(answers=dict(HEALTHY)))
    watch = GpuWatch("cpu")
    watch.sample()
    assert watch.figures() is None


def test_the_gpu_is_sampled_in_each_round_and_reaches_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    class Watch:
        samples = 0

        def __init__(self, device: str) -> None:
            pass

        def sample(self) -> None:
            self.samples += 1

        def figures(self) -> GpuFigures:
            return GpuFigures(power=float(self.samples), throttled={POWER: 0.6})

    monkeypatch.setattr(passes, "GpuWatch", Watch)
    plan = plan_of(Step, stand_in("mine"), rounds=Rounds(minimum=3, maximum=3))
    measured = passes.timed_rounds(plan, Memory(), Step(plan.implementation, None, "cpu"))
    assert gpus_entry([measured])[0]["power"] == 3.0
    time, _ = time_entry([measured], None)
    assert time["machine"][POWER] == 0.6


class Step:
    """A step of nothing."""

    backend = "none"

    def __init__(self, implementation: Implementation, case: object, device: str) -> None:
        pass

    def prepare(self) -> None:
        pass

    def step(self, mark: Mark) -> None:
        pass


def test_a_row_has_every_ranks_gpu_or_none() -> None:
    ranks = [Measured("nccl", Memory(), gpu=GpuFigures(power=power)) for power in (400.0, 500.0)]
    assert [each["power"] for each in gpus_entry(ranks)] == [400.0, 500.0]
    assert gpus_entry([*ranks, Measured("nccl", Memory())]) == []
    assert ranks[0].at_pace(2.0).gpu == ranks[0].gpu


def test_the_package_has_every_function_and_constant_that_is_asked_for() -> None:
    """The fake has any; a misspelt name would read as a GPU that does not say."""
    pynvml = pytest.importorskip("pynvml")
    code = "".join(Path(module.__file__).read_text() for module in (meter, nvml, gpus))
    names = {f"nvmlDeviceGet{name}" for name in re.findall(r'ask\(\s*"(\w+)"', code)}
    names |= {f"nvmlDeviceGetHandle{name}" for name in re.findall(r'"(By\w+)"', code)}
    names |= set(re.findall(r"\bNVML_\w+", code))
    older = "nvmlDeviceGetCurrentClocksThrottleReasons"
    assert len(names) > 20 and older in names
    assert [name for name in sorted(names) if not hasattr(pynvml, name)] == []
