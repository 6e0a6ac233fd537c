"""The metered pass and the timed rounds, and what rows make of them."""

import math
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._inductor.runtime.cache_dir_utils import cache_dir

from correctness.support.metering import plan_of
from shardmark.api.registry import Implementation
from shardmark.api.workload import Mark
from shardmark.meter import recompile as cold
from shardmark.meter.clock import Laps
from shardmark.meter.measure_case import measure
from shardmark.meter.memory import Memory
from shardmark.meter.plan import COMMUNICATION, COMPUTE, IMPLEMENTATION, PEER, Measured, Plan, Rounds
from shardmark.plugin import WorldsBySize
from shardmark.rows.fill import time_entry
from shardmark.rows.observers import Compile, ExposedCommunication, HiddenCommunication
from shardmark.verdict.budget import MemoryBudget
from tests.support.measured import row_by, stand_in

LOG: list[str] = []


class Logged:
    """Logs its calls. Keeps 400 bytes, allocates 800 more in its first step, and 1200 for a moment in every step."""

    backend = "none"

    def __init__(self, implementation: Implementation, case: object, device: str) -> None:
        self.name = implementation.name
        self.kept = torch.empty(100)
        self.state: torch.Tensor | None = None
        LOG.append(f"init {self.name}")

    def prepare(self) -> None:
        LOG.append(f"prepare {self.name}")

    def step(self, mark: Mark) -> None:
        LOG.append(f"step {self.name}")
        if self.state is None:
            self.state = torch.empty(200)
        temporary = torch.empty(300)
        mark("backward")
        del temporary
        mark("communication")

    def compute_step(self, mark: Mark) -> None:
        LOG.append(f"compute {self.name}")
        mark("backward")

    def communication_step(self, mark: Mark) -> None:
        LOG.append(f"communicate {self.name}")


@pytest.fixture(autouse=True)
def empty_log() -> Iterator[None]:
    LOG.clear()
    yield
    LOG.clear()


ROUNDS = Rounds(minimum=3, maximum=3, warmups=1)
PLAN = plan_of(Logged, stand_in("mine"), peer=stand_in("theirs"), rounds=ROUNDS, observers=(HiddenCommunication,))


def test_in_a_round_all_take_turns_and_the_two_that_are_compared_stand_together() -> None:
    measured = measure(PLAN)
    kinds = ("step", "compute", "communicate")
    steps = [entry for entry in LOG[LOG.index("init theirs") :] if entry.startswith(kinds)]
    there = ["step mine", "compute mine", "communicate mine", "step theirs"]
    counted = 4 * ["step mine"]
    assert steps[:4] == there and steps[-4:] == counted  # first a warm-up
    rounds = [steps[i : i + 5] for i in range(4, len(steps) - 4, 5)]
    assert len(rounds) == 3
    for each in rounds:  # an untimed step of the second goes before the first
        assert sorted(each[:2]) == ["step mine", "step theirs"] and each[2] == each[0]
        assert sorted(each[3:]) == ["communicate mine", "compute mine"]
    timed = (IMPLEMENTATION, COMPUTE, COMMUNICATION, PEER)
    assert {name: len(laps) for name, laps in measured.laps.items()} == dict.fromkeys(timed, 3)
    assert all(LOG[i - 1].startswith("prepare") for i, entry in enumerate(LOG) if entry.startswith(kinds))


def test_memory_is_metered_apart_after_a_warm_up() -> None:
    memory = measure(PLAN).memory
    assert memory.phases == {
        "after_init": 400,
        "before_step": 1200,
        "after_backward": 2400,
        "after_communication": 1200,
        "after_step": 1200,
    }
    assert memory.peak == 2400
    assert LOG[:7] == ["init mine", *["prepare mine", "step mine"] * 3]  # none of the timed pass among them


class Warms(Logged):
    """Allocates 4000 bytes for a moment in its first step and 2000 in its second; both take 0.05 s longer."""

    def __init__(self, implementation: Implementation, case: object, device: str) -> None:
        super().__init__(implementation, case, device)
        self.extra = [1000, 500]

    def step(self, mark: Mark) -> None:
        if self.extra:
            torch.empty(self.extra.pop(0))
            time.sleep(0.05)
        super().step(mark)


class Overstated(Logged):
    """Holds 4000 bytes more in its first pass on the ranks in the case, as if a thread released a tensor late."""

    def __init__(self, implementation: Implementation, case: tuple[int, ...], device: str) -> None:
        late = dist.get_rank() in case and not LOG
        super().__init__(implementation, case, device)
        self.late = torch.empty(1000) if late else None


def passes_and_peak(plan: Plan) -> tuple[int, int]:
    """The number of metered passes, and the peak."""
    LOG.clear()
    peak = measure(plan).memory.peak
    return sum(entry.startswith("init") for entry in LOG), peak


@pytest.mark.parametrize(
    ("late_ranks", "formula", "before", "passes", "peaks"),
    [
        pytest.param((1,), 2400, None, 2, [2400, 2400], id="over_the_formula"),
        pytest.param((1,), 6400, None, 2, [2400, 2400], id="unlike_the_other_rank"),
        pytest.param((1,), 1000, None, 10, [2400, 2400], id="never_within_the_formula"),
        pytest.param((1,), None, None, 1, [2400, 6400], id="no_formula"),
        pytest.param((0, 1), 10**4, None, 1, [6400, 6400], id="no_older_row"),
        pytest.param((0, 1), 10**4, 6400, 1, [6400, 6400], id="as_before"),
        pytest.param((0, 1), 10**4, 6399, 2, [2400, 2400], id="a_byte_more_than_before"),
        pytest.param((0, 1), 10**4, 2399, 10, [2400, 2400], id="always_more_than_before"),
    ],
)
def test_ranks_meter_again_what_is_overstated(
    late_ranks: tuple[int, ...],
    formula: int | None,
    before: int | None,
    passes: int,
    peaks: list[int],
    worlds: WorldsBySize,
) -> None:
    """A peak is overstated if it exceeds the formula, the older row or the other rank."""
    memory = None if formula is None else MemoryBudget(formula)
    rounds = Rounds(minimum=1, maximum=1)
    plan = plan_of(Overstated, case=late_ranks, ranks=2, rounds=rounds, memory=memory, tensors_before=before)
    assert worlds(2).run(passes_and_peak, plan) == [(passes, peak) for peak in peaks]


def test_first_steps_are_observed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold, "_load_compiler", lambda device: None)  # nothing is compiled here
    plan = replace(PLAN, workload=Warms, observers=(Compile,))
    assert measure(plan).observed[Compile] is None
    monkeypatch.setattr("shardmark.rows.observers.compile.has_compiled", lambda: True)
    LOG.clear()
    measured = measure(plan)
    assert LOG.count("init mine") == 1  # what was metered is timed, as a new one might be compiled again
    assert measured.memory.peaks == {"first": 4400, "second": 3200, "median": 2400}
    assert measured.memory.peak == 2400 and measured.memory.phases["before_first_step"] == 400
    assert measured.first_step is not None and 0.05 <= measured.first_step < 0.5


def _compiled_files() -> int:
    """The number of files in the compiler's current cache."""
    return sum(path.is_file() for path in Path(cache_dir()).rglob("*"))


def test_a_cold_compiler_remembers_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold, "_load_compiler", lambda device: None)
    compiles: list[object] = []

    def backend(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        compiles.append(graph)
        return graph

    function, before = torch.compile(torch.neg, backend=backend), cache_dir()
    for _ in range(2):
        with cold.cold_compiler("cpu"):
            assert not cold.has_compiled()
            function(torch.ones(1)), function(torch.ones(1))
            assert cold.has_compiled()
            assert cache_dir() != before and _compiled_files() == 0
    assert len(compiles) == 2 and cache_dir() == before


def compilers_files() -> list[str]:
    """The compiler's folders that this rank uses; each rank's own are named after it."""
    own = dict.fromkeys(cold.CACHES, f"rank {dist.get_rank()}")
    with patch.dict(os.environ, own), cold._shared_files():
        return [os.environ[name] for name in cold.CACHES]


def test_ranks_of_a_host_share_the_first_ones_files(worlds: WorldsBySize) -> None:
    assert worlds(2).run(compilers_files) == 2 * [2 * ["rank 0"]]


@pytest.mark.parametrize(
    ("seconds", "count"), [(1.0, 5), (0.25, 5), (0.1, 10), (0.001, 40), (0.0, 40)], ids=lambda x: str(x)
)
def test_rounds_go_on_until_the_time_is_spent(seconds: float, count: int) -> None:
    assert Rounds(minimum=5, maximum=40, max_seconds=1.0).count(seconds) == count


def test_warm_ups_end_with_their_time() -> None:
    started = time.perf_counter()
    measure(replace(PLAN, rounds=Rounds(minimum=1, maximum=1, warmups=10**9, max_warmup_seconds=0.05)))
    assert 0.05 <= time.perf_counter() - started < 10


class Uneven(Logged):
    """Rank 1 is slower, so each rank alone would choose another number of rounds."""

    def step(self, mark: Mark) -> None:
        time.sleep(0.002 + 0.01 * dist.get_rank())


def count_and_fastest(plan: Plan) -> tuple[int, float]:
    """The number of rounds that this rank timed, and the seconds of its fastest."""
    laps = measure(plan).laps[IMPLEMENTATION]
    return len(laps), min(lap.seconds for lap in laps)


def test_ranks_agree_on_the_rounds_and_time_themselves(worlds: WorldsBySize) -> None:
    plan = plan_of(Uneven, ranks=2, rounds=Rounds(minimum=2, maximum=100, max_seconds=0.1))
    (count, fast), (same_count, slow) = worlds(2).run(count_and_fastest, plan)
    assert count == same_count and 2 <= count <= math.ceil(0.1 / 0.012)  # the slowest rank's time decides
    assert fast >= 0.002 and slow >= 0.012


def _measured(**seconds: list[tuple[float, float]]) -> Measured:
    """Measurements with laps of these (backward, communication) seconds."""
    laps = {name: [Laps(b + c, {"backward": b, "communication": c}) for b, c in s] for name, s in seconds.items()}
    return Measured("gloo", Memory(), laps)


def test_exposed_communication_is_what_compute_alone_does_not_take() -> None:
    """Backward took 5, of which 3 are computation; afterwards communication took 1 more."""
    time = row_by(ExposedCommunication(), [_measured(implementation=[(5, 1)], compute=[(3, 0)])])["time"]
    assert time["parts"] == {"backward": 3, "communication": 3}
    time, _ = time_entry([_measured(implementation=[(5, 1)])], None)
    assert time["parts"] == {"backward": 6} and "hidden" not in time  # a wait at the end of backward is no measure


def test_hidden_is_the_share_of_communication_alone_that_a_step_does_not_take_beyond_compute_alone() -> None:
    alone = {"compute": [(4, 0), (3, 0)] * 9, "communication": [(0, 7), (0, 9)] * 9}
    time = row_by(HiddenCommunication(), [_measured(implementation=[(4, 1), (5, 1)] * 9, **alone)])["time"]
    assert (time["compute_alone"], time["communication_alone"]) == (3.5, 8)
    assert time["hidden"] == 1 - (5.5 - 3.5) / 8


@pytest.mark.parametrize("step", [11.0, 14.0], ids=["in turn", "longer than that"])
def test_nothing_is_hidden_by_a_step_that_takes_as_long_as_both_in_turn(step: float) -> None:
    """Noise of 3% is no overlap."""
    noise = [math.exp(0.03 * (-1) ** i) for i in range(18)]
    alone = {"compute": [(3.0, 0.0)] * 18, "communication": [(0.0, 8.0)] * 18}
    steps = [(step * each, 0.0) for each in noise]
    assert row_by(HiddenCommunication(), [_measured(implementation=steps, **alone)])["time"]["hidden"] == 0.0
