"""The device clock and the stopwatch."""

from __future__ import annotations

import time

import pytest

from shardmark.clock import DeviceClock, Stopwatch

pytest_plugins = ["pytester"]


def test_the_clock_moves_only_when_told_to() -> None:
    clock = DeviceClock()
    assert clock() == clock() == 0.0
    clock.advance(1.5)
    assert clock() == 1.5
    clock.reset()
    assert clock() == 0.0


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
        from shardmark.clock import DeviceClock

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
    watch = Stopwatch(device)
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
