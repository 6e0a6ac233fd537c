"""A process that was stopped finds its ranks' answers, and its deadlines as they were, when it goes on."""

import os
import subprocess
import time

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
