"""The summary of an `--impl` run: each target's verdict, what was not run, and what hung."""

import signal
import time
from contextlib import suppress

import pytest

from shardmark.plugin.judge import EXIT_NOT_JUDGED
from shardmark.ranks.deadline import AFTER_THE_FIRST, Deadlines, Hung, within
from shardmark.ranks.torchrun import LocalWorld
from tests.support.project import make_project

pytest_plugins = ["pytester"]

CONFTEST = """
import pytest
from shardmark.api.finding import RegistryError
from shardmark.api import Family, Refusable, add_family, register

pytest_plugins = ["shardmark.plugin"]


class Contract: ...


def check(target, device):
    if not callable(target):
        raise RegistryError("it is not callable")


odd = Refusable("odd numbers", lambda x, **_: "odd numbers" if x % 2 else None)
add_family(Family("double", Contract, reference="plain", check=check, may_refuse=(odd,)))
register("double", "plain", lambda x, exactly=True: 2 * x)
"""

TESTS = """
import time
import pytest
from shardmark.api.registry import Unsupported

pytestmark = pytest.mark.family("double")


def test_of_one(implementation, record_property):
    record_property("note", "one is doubled in one step")
    assert implementation.watched(1) == 2, "twice 1 is 2"


def test_of_three(implementation):
    assert implementation.watched(3) == 6, "twice 3 is 6"


@pytest.mark.family("double", option="exactly")
def test_exactly(implementation):
    assert implementation.watched(1, exactly=True) == 2


@pytest.mark.parametrize("number", [2, 4])
def test_even(implementation, number):
    assert implementation.watched(number) == 2 * number
"""

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

OWN = """
import multiprocessing
import time
from shardmark.api.registry import Unsupported

def plain(x):
    return x + x

def squares(x):
    return 2 if x == 1 else x**2

def hangs(x):
    while x != 2:
        time.sleep(0.01)
    while True:
        time.sleep(0.01)

def hangs_on_ranks(x):
    while multiprocessing.parent_process() is not None:
        time.sleep(0.01)

def unsupported(x):
    raise Unsupported("it doubles nothing")

def even_alone(x):
    if x % 2:
        raise Unsupported("it doubles even numbers")
    return 2 * x

def all_but_three(x):
    if x == 3:
        raise Unsupported("it does not double 3")
    return 2 * x

def interrupted(x):
    if x == 3:
        raise KeyboardInterrupt
    return 2 * x

number = 3
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A family whose implementations double a number."""
    return make_project(pytester, monkeypatch, CONFTEST, test_double=TESTS, own=OWN)


def judged(project: pytest.Pytester, *names: str, options: tuple[str, ...] = ()) -> pytest.RunResult:
    targets = [f"--impl=double=own.py:{name}" for name in names]
    return project.runpytest_inprocess("--device=cpu", "-p", "no:cacheprovider", *targets, *options)


def test_a_verdict_for_each_target_and_what_was_not_run(project: pytest.Pytester) -> None:
    result = judged(project, "plain", "squares", "unsupported", options=("--seed=7",))
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    verdicts = result.outlines[
        result.outlines.index(next(x for x in result.outlines if "what its contract says" in x)) :
    ]
    own = project.path / "own.py"
    assert verdicts[1:-1] == [
        "double=plain is right: 4 of 5 contract checks passed, 1 not run",
        "  not run: 1 because its signature has no option 'exactly'",
        "  note: one is doubled in one step",
        "double=squares is WRONG: 2 of 5 contract checks passed, 2 failed, 1 not run",
        "  twice 3 is 6",
        "    of own.py:9: def squares(x):",
        "    1 of 2 failed checks, such as test_of_three[squares]",
        "    to run it alone:",
        f"        pytest 'test_double.py::test_of_three[squares]' --impl 'double={own}:squares'",
        "  assert 16 == (2 * 4)",
        "    1 of 2 failed checks",
        "  not run: 1 because its signature has no option 'exactly'",
        "double=unsupported is WRONG: 0 of 5 contract checks passed, 2 failed, 3 not run",
        "  raised Unsupported for what every implementation takes: it doubles nothing. The contract lets it",
        "    refuse, each as a whole: odd numbers",
        '    at own.py:21: raise Unsupported("it doubles nothing")',
        "    2 of 2 failed checks, such as test_even[unsupported-2]",
        "    to run it alone:",
        f"        pytest 'test_double.py::test_even[unsupported-2]' --impl 'double={own}:unsupported'",
        "  not run: 2 because it refuses odd numbers",
        "  not run: 1 because its signature has no option 'exactly'",
        "--seed 7 draws the same inputs again",
    ]


def verdict_of(result: pytest.RunResult) -> list[str]:
    """The lines from the verdict on."""
    return result.outlines[[" is " in line and line.startswith("double=") for line in result.outlines].index(True) :]


def test_what_a_contract_lists_may_be_refused(project: pytest.Pytester) -> None:
    result = judged(project, "even_alone")
    assert result.ret == pytest.ExitCode.OK
    assert verdict_of(result)[:2] == [
        "double=even_alone is right: 2 of 5 contract checks passed, 3 not run",
        "  not run: 2 because it refuses odd numbers",
    ]


def test_what_is_taken_in_one_call_is_not_refused_in_another(project: pytest.Pytester) -> None:
    result = judged(project, "all_but_three")
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert verdict_of(result)[:2] == [
        "double=all_but_three is WRONG: 3 of 5 contract checks passed, 1 failed, 1 not run",
        "  raised Unsupported for argument 0=3, and takes odd numbers elsewhere. The contract lets it refuse,",
    ]


def test_a_subset_of_the_checks_is_no_verdict(project: pytest.Pytester) -> None:
    result = judged(project, "plain", options=("-k", "even or one"))
    assert result.ret == EXIT_NOT_JUDGED
    assert verdict_of(result)[:2] == [
        "double=plain is not judged: 3 of 5 contract checks were run, all 3 passed",
        "  not asked: 2 checks: deselected, as by -k or -m",
    ]
    one = judged(project, "plain", options=("test_double.py::test_of_one",))
    assert one.ret == EXIT_NOT_JUDGED
    one.stdout.fnmatch_lines(["double=plain is not judged: *", "  not asked: checks outside of *::test_of_one"])
    failed = judged(project, "squares", options=("-k", "three"))
    assert failed.ret == pytest.ExitCode.TESTS_FAILED
    failed.stdout.fnmatch_lines(["double=squares is WRONG: 0 of 5 *"])


def test_an_interrupted_run_is_no_verdict(project: pytest.Pytester) -> None:
    targets = ["--impl=double=own.py:interrupted", "-p", "no:cacheprovider"]
    result = project.runpytest_subprocess("--device=cpu", *targets)
    assert result.ret == pytest.ExitCode.INTERRUPTED
    assert verdict_of(result)[:2] == [
        "double=interrupted is not judged: 1 of 5 contract checks were run, all 1 passed",
        "  not asked: 4 checks: the run ended before them",
    ]


def test_what_is_too_slow_to_be_asked_is_no_verdict(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_slow="""
        import pytest
        from shardmark.api import note_unasked

        @pytest.mark.family("double")
        def test_slow(implementation):
            note_unasked("too slow")
            pytest.skip("too slow, by 7")
        """
    )
    result = judged(project, "plain")
    assert result.ret == EXIT_NOT_JUDGED
    assert verdict_of(result)[1] == "  not asked: 1 checks: too slow"


def test_an_import_that_fails_is_told_with_its_line(project: pytest.Pytester) -> None:
    project.makepyfile(broken="x = 1\ny = x / 0\n")
    result = project.runpytest_inprocess("--impl=double=broken.py:x")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(["*: ZeroDivisionError: division by zero, which fails at broken.py:2: y = x / 0"])


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
        ("hangs_on_ranks", "*RankError: rank 0 of 1 had not answered after 9.0 s; it was in hangs_on_ranks *"),
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
