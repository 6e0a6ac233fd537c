"""Right, wrong or not judged: what an `--impl` run says of its target."""

import pytest

from shardmark.plugin.judge import EXIT_NOT_JUDGED
from tests.support.doubling import judged, make_doubling, verdict_of

pytest_plugins = ["pytester"]


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    return make_doubling(pytester, monkeypatch)


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
        f"        pytest 'test_double.py::test_of_three[squares]' --impl 'double={own}:squares' --device=cpu",
        "  assert 16 == (2 * 4)",
        "    1 of 2 failed checks",
        "  not run: 1 because its signature has no option 'exactly'",
        "double=unsupported is WRONG: 0 of 5 contract checks passed, 2 failed, 3 not run",
        "  raised Unsupported for what every implementation takes: it doubles nothing. The contract lets it",
        "    refuse, each as a whole: odd numbers",
        '    at own.py:23: raise Unsupported("it doubles nothing")',
        "    2 of 2 failed checks, such as test_even[unsupported-2]",
        "    to run it alone:",
        f"        pytest 'test_double.py::test_even[unsupported-2]' --impl 'double={own}:unsupported' --device=cpu",
        "  not run: 2 because it refuses odd numbers",
        "  not run: 1 because its signature has no option 'exactly'",
        "--seed 7 draws the same inputs again",
    ]


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


def test_a_crash_of_a_worker_is_a_failed_check(project: pytest.Pytester) -> None:
    options = ["--impl=double=own.py:dies", "-p", "no:cacheprovider", "-n1", "--max-worker-restart=0"]
    result = project.runpytest_subprocess("--device=cpu", *options)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    assert verdict_of(result)[:2] == [
        "double=dies is WRONG: 1 of 2 contract checks passed, 1 failed",
        "  it ends the process that it runs in, as abort() or a segmentation fault does",
    ]
    result.stdout.fnmatch_lines(["  not asked: 3 tests: the run ended before them"])


def test_a_crash_is_of_the_target_that_ran(project: pytest.Pytester) -> None:
    """The other one is judged to its end, by another worker."""
    targets = ["--impl=double=own.py:plain", "--impl=double=own.py:dies", "-n1", "-p", "no:cacheprovider"]
    result = project.runpytest_subprocess("--device=cpu", *targets)
    assert result.ret == pytest.ExitCode.TESTS_FAILED
    result.stdout.fnmatch_lines_random(["double=plain is right: *", "double=dies is WRONG: *1 failed*"])


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
