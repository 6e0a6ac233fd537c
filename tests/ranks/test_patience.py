"""A process that was stopped finds its ranks' answers, and its deadlines as they were, when it goes on."""

import inspect
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardmark.ranks.deadline import Hung, within
from shardmark.ranks.patience import SLICE, Patience
from shardmark.ranks.world import World

STOPPED = 3.0


def stop_this_process() -> subprocess.Popen[bytes]:
    """Have another process stop this one in a moment, and let it go on after `STOPPED` seconds."""
    own = os.getpid()
    return subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -STOP {own}; sleep {STOPPED}; kill -CONT {own}"])


def sleep(seconds: float) -> str:
    time.sleep(seconds)
    return "done"


def test_answers_that_came_while_it_was_stopped_are_there(pair: World) -> None:
    pair.run(sleep, 0.0)
    with stop_this_process():
        began = time.monotonic()
        assert pair.run(sleep, 0.5, deadline=STOPPED / 2) == ["done", "done"]
        assert time.monotonic() - began > STOPPED


def test_a_step_in_this_process_has_its_time_as_well() -> None:
    with stop_this_process(), within(STOPPED / 2):
        began = time.monotonic()
        while time.monotonic() - began < STOPPED + 0.3:
            time.sleep(0.01)
    with pytest.raises(Hung, match=r"had not ended after 0\.2 s"), within(0.2):
        time.sleep(10)


def test_an_alarm_within_the_answer_to_the_last_is_passed_by(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the answer takes longer than the next alarm is away."""
    depths = []

    def slow(patience: Patience) -> bool:
        depths.append(sum(frame.function == "slow" for frame in inspect.stack()))
        time.sleep(0.05)  # an alarm ends no sleep
        return len(depths) > 5

    monkeypatch.setattr(Patience, "is_over", slow)
    with pytest.raises(Hung), within(0.1):
        time.sleep(10)
    assert set(depths) == {1}


def test_patience_counts_waits_and_no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    patience = Patience(10.0)
    for _ in range(4):
        now += SLICE
        assert not patience.is_over()
    now += 1000.0
    assert not patience.is_over() and patience.waited == 5 * SLICE
    patience.shorten(SLICE)
    assert patience.slice == SLICE
    now += SLICE
    assert patience.is_over()


def spin(seconds: float) -> float:
    """Compute for that long, in time of this process."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    return seconds


@contextmanager
def _busy_machine(cores: set[int], share: int) -> Iterator[None]:
    """Keep each of these cores at work for that many others."""
    loops = [
        subprocess.Popen([sys.executable, "-c", f"import os\nos.sched_setaffinity(0, {{{core}}})\nwhile True: pass"])
        for core in cores
        for _ in range(share)
    ]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


@pytest.fixture
def one_busy_core() -> Iterator[None]:
    """This process, and all that it starts, on one core with eight others."""
    before = os.sched_getaffinity(0)
    core = {min(before)}
    with _busy_machine(core, 8):
        os.sched_setaffinity(0, core)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


@pytest.mark.sweep
def test_others_on_the_machine_bring_no_deadline_nearer(one_busy_core: None) -> None:
    began = time.monotonic()
    with within(1.5):
        spin(0.75)
    if time.monotonic() - began < 1.5:
        pytest.skip("the machine gave it more than a ninth of the core")
    with pytest.raises(Hung), within(0.5):
        spin(60)
    began = time.monotonic()
    with pytest.raises(Hung), within(0.5):
        time.sleep(60)
    assert time.monotonic() - began < 10
