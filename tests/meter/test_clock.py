"""The device clock and the stopwatch."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from shardmark.meter import clock as clocks
from shardmark.meter.clock import MOST_AHEAD, DeviceClock, Stopwatch

pytest_plugins = ["pytester"]


@pytest.mark.parametrize("seconds", [-1e-9, float("nan")])
def test_the_clock_does_not_run_backwards(seconds: float) -> None:
    with pytest.raises(ValueError, match="cannot advance by"):
        DeviceClock().advance(seconds)


def test_pytest_benchmark_records_exactly_what_the_clock_was_advanced_by(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # or pytest-benchmark disables itself in there
    pytester.makepyfile(
        """
        import pytest
        from shardmark.meter.clock import DeviceClock

        clock = DeviceClock()

        @pytest.mark.benchmark(timer=clock)
        def test_advanced(benchmark):
            durations = [0.1, 0.7, 0.3]
            left = iter(durations)
            benchmark.pedantic(lambda: clock.advance(next(left)), setup=clock.reset, rounds=3)
            assert benchmark.stats.stats.data == durations
        """
    )
    pytester.runpytest_inprocess("--benchmark-quiet").assert_outcomes(passed=1)


def test_the_stopwatch_splits_a_step_into_its_parts(device: str) -> None:
    watch = Stopwatch(device, ahead=0.01)  # on a CPU nothing is launched ahead
    watch.start()
    time.sleep(0.02)
    watch.mark("forward")
    time.sleep(0.04)
    watch.mark("backward")
    watch.mark("forward")  # a part that comes again adds up
    laps = watch.stop()
    assert list(laps.parts) == ["forward", "backward"]
    if device == "cpu":  # a sleeping host is not work on a GPU
        assert laps.parts["forward"] >= 0.02 and laps.parts["backward"] >= 0.04
        assert sum(laps.parts.values()) <= laps.seconds < 10
        assert laps.host is None


class Stream:
    """A GPU's in-order queue: work begins once it is launched and the work before it has ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.host = 0.0
        self.free = 0.0
        self.slept: list[float] = []
        stream = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at = stream.launch(0.0)

            def elapsed_time(self, later: Event) -> float:
                return 1e3 * (later.at - self.at)

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", self.wait)
        monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: self.slept.append(cycles) or self.launch(cycles / 2e9))
        monkeypatch.setattr(time, "perf_counter", lambda: self.host)

    def launch(self, seconds: float, host: float = 0.0) -> float:
        """Queue `seconds` of work, whose launch takes `host` seconds. Returns the time at which it ends."""
        self.host += host
        self.free = max(self.free, self.host) + seconds
        return self.free

    def wait(self) -> None:
        self.host = max(self.host, self.free)


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stream]:
    clocks._cycles_per_second.cache_clear()
    yield Stream(monkeypatch)
    clocks._cycles_per_second.cache_clear()


def _step(stream: Stream, ahead: float) -> clocks.Laps:
    """A hundred kernels of 1 us each, which the host launches in 10 us each."""
    watch = Stopwatch("cuda", ahead)
    watch.start()
    for _ in range(100):
        stream.launch(1e-6, host=10e-6)
    watch.mark("forward")
    return watch.stop()


def test_a_step_that_is_launched_ahead_is_timed_without_its_launches(stream: Stream) -> None:
    idle = _step(stream, ahead=0.0)
    assert idle.host == pytest.approx(1000e-6) and idle.seconds == pytest.approx(1001e-6)  # it is Python's time
    busy = _step(stream, ahead=idle.host)
    assert busy.host == pytest.approx(1000e-6)
    assert busy.seconds == pytest.approx(100e-6) and busy.parts == {"forward": pytest.approx(100e-6)}


def test_the_device_is_not_kept_busy_for_long(stream: Stream) -> None:
    _step(stream, ahead=10.0)
    assert stream.slept[-1] == pytest.approx(MOST_AHEAD * 2e9)
