"""The summary of an `--impl` run: each target's verdict, what was not run, and what hung."""

import signal
import time
from contextlib import suppress

import pytest

from shardmark.ranks.deadline import AFTER_THE_FIRST, Deadlines, Hung, within
from shardmark.ranks.worlds import LocalWorld
from tests.support.doubling import judged, make_doubling

pytest_plugins = ["pytester"]

MEASURED = """
from dataclasses import dataclass

import pytest
from shardmark.api import Grid, Work

pytestmark = pytest.mark.family("double")


@dataclass(frozen=True)
class Number:
    number: int
    dtype: str = "float32"

    def __str__(self):
        return str(self.number)


class Doubling:
    backend = "none"

    def __init__(self, implementation, case, device):
        self.double, self.number = implementation.target, case.number

    def prepare(self): ...

    def step(self, mark):
        self.double(self.number)


@pytest.mark.cases(Grid(smoke=[Number(1), Number(2), Number(3)], laptop=[], paper=[]))
def test_cost(implementation, case, measure):
    measure(Doubling, implementation, case, work=Work(flops=1))
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    return make_doubling(pytester, monkeypatch)


def test_a_refused_target_does_not_end_the_others(project: pytest.Pytester) -> None:
    result = judged(project, "number", "plain")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stdout.fnmatch_lines(
        ["double=*own.py:number does not meet the double contract: it is not callable", "double=plain is right: *"]
    )
    alone = judged(project, "number")
    assert alone.ret == pytest.ExitCode.USAGE_ERROR and not alone.outlines


def test_two_targets_of_one_name_are_told_apart(project: pytest.Pytester) -> None:
    project.mkdir("other").joinpath("own.py").write_text("def plain(x):\n    return 3 * x\n")
    result = judged(project, "plain", options=("--impl=double=other/own.py:plain", "-k", "of_three"))
    result.stdout.fnmatch_lines(["double=plain is not judged: 1 of 5 *", "double=own.plain is WRONG: 0 of 5 *"])


def test_a_hang_costs_one_deadline_and_from_then_on_little(project: pytest.Pytester) -> None:
    start = time.monotonic()
    result = judged(project, "hangs", options=("--deadline=1",))
    assert time.monotonic() - start < 60
    result.stdout.fnmatch_lines(
        [
            "double=hangs is WRONG: 0 of 5 contract checks passed, 3 failed, 2 not run",
            "  had not ended after 1 s",
            "    at own.py:1*: *",
            "    3 of 3 failed checks, such as test_of_one[[]hangs]",
            "  not asked: 1 checks: it has hung in another check of the claim",
        ]
    )


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("hangs", "*Hung: had not ended after 9 s"),
        ("hangs_on_ranks", "*RankError: rank 0 of 1 had not answered after [1-9]*.[0-9] s; it was in hangs_on_ranks *"),
    ],
)
def test_of_what_hung_nothing_more_is_measured(project: pytest.Pytester, name: str, line: str) -> None:
    """Whether it hangs while its memory is predicted, or on the ranks."""
    project.makepyfile(test_cost=MEASURED)
    options = ("--deadline=0.3", "--scale=smoke", "-rs", "--benchmark-min-rounds=2", "test_cost.py")
    result = judged(project, name, "plain", options=options)
    result.assert_outcomes(passed=3, failed=1, skipped=2)
    result.stdout.fnmatch_lines([f"E * {line}", f"SKIPPED ?2? *: {name}: it hung before"])


def test_what_hung_once_has_little_time() -> None:
    deadlines = Deadlines(20.0, measured=600.0)
    deadlines.note_hang("mine", "test_it")
    assert deadlines.of("mine") == AFTER_THE_FIRST and deadlines.of("another") == 20.0
    assert Deadlines(1.0, measured=30.0).of("mine") == 1.0


def test_what_has_not_ended_in_time_is_hung() -> None:
    with pytest.raises(Hung, match=r"had not ended after 0\.05 s"), within(0.05):
        time.sleep(10)
    with within(0.05):
        pass
    time.sleep(0.1)  # and the alarm is off


def test_a_world_of_one_in_this_process_has_a_deadline_too() -> None:
    """torchrun's rank 0 has such a world, for single-device cases."""
    with pytest.raises(Hung, match=r"had not ended after 0\.05 s"):
        LocalWorld().run(time.sleep, 10, deadline=0.05)


@pytest.mark.parametrize(
    ("inner", "nap"), [(0.1, 0.2), (5.0, 0.2), (0.1, 0.5)], ids=["hangs", "does_not", "hangs_past_the_outer"]
)
def test_a_deadline_within_another_does_not_put_it_off(inner: float, nap: float) -> None:
    """It does not put off pytest-timeout's deadline either, which uses the same timer."""
    before = signal.getitimer(signal.ITIMER_REAL)[0]
    left: list[float] = []

    def naps() -> None:
        with suppress(Hung), within(inner):
            try:
                time.sleep(nap)
            except Hung:
                time.sleep(nap - inner)
        left.append(signal.getitimer(signal.ITIMER_REAL)[0])
        time.sleep(10)

    with pytest.raises(Hung, match=r"had not ended after 0\.3 s"), within(0.3):
        naps()
    assert max(left, default=0.0) <= 0.3 - 0.2
    assert (signal.getitimer(signal.ITIMER_REAL)[0] > 0) == (before > 0)


def test_the_seed_repeats_the_inputs_here_and_on_the_ranks(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_seed="""
        import torch, pytest

        def draw():
            return torch.rand(()).item()

        def test_inputs(worlds):
            first, second = worlds(2).run(draw)
            assert first != second, "each rank draws its own"
            print("drew", torch.rand(()).item(), first, second)
        """
    )

    def drawn(*options: str) -> str:
        lines = project.runpytest_inprocess("-s", "-p", "no:cacheprovider", "test_seed.py", *options).outlines
        return next(line for line in lines if "drew" in line)

    assert drawn("--seed=1") == drawn("--seed=1") != drawn("--seed=2")
    assert drawn() == drawn() == drawn("--seed=0")
