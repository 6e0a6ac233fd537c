"""Verdicts as a user meets them: the rounds they need, the error they share, budgets and goals."""

from pathlib import Path
from typing import Any

import pytest

from shardmark.verdict.betting import fewest_rounds
from shardmark.verdict.budget import confidence
from tests.support.project import row_of, run_project

pytest_plugins = ["pytester", "tests.support.project"]

FEW = ("--benchmark-min-rounds=2", "--benchmark-max-time=0.000001")


def test_a_verdict_has_the_rounds_that_it_needs(project: pytest.Pytester) -> None:
    result, output = run_project(project, "--scale=smoke", "-k", "strict and alone", *FEW)
    result.assert_outcomes(failed=1)
    assert output["benchmarks"][0]["stats"]["rounds"] == fewest_rounds(confidence(1)) == 11


def test_rounds_are_added_while_a_time_budget_is_undecided_and_then_so_is_the_test(project: pytest.Pytester) -> None:
    few = ("--benchmark-min-rounds=2", "--benchmark-max-time=0.05")
    result, output = run_project(project, "--scale=smoke", "-v", "-k", "nap and torn", *few)
    result.assert_outcomes()
    assert result.ret == 0
    assert row_of(output, "torn")["verdict"] == "undecided"
    assert output["benchmarks"][0]["stats"]["rounds"] > 2 * fewest_rounds(confidence(1))
    result.stdout.fnmatch_lines(["undecided: torn 0.005s: *x plain's time, *", "*1 undecided*"])
    assert "against the budget of 2.0x" in " ".join(result.stdout.str().split())


def test_goals_are_reported_and_fail_nothing(project: pytest.Pytester) -> None:
    result, output = run_project(project, "--scale=smoke", "-k", "goal", "-v", "--benchmark-min-rounds=20")
    result.assert_outcomes(passed=3)
    outcomes = {name: row_of(output, name)["time"]["outcome"] for name in ("plain", "torn", "with_giant")}
    assert outcomes == {"plain": "reached", "torn": "undecided", "with_giant": "missed"}
    row = row_of(output, "plain")
    assert row["time"]["goal"] == 0.5 and row["time"]["budget"] is None and row["verdict"] == "pass"
    goals = {"mfu": {"goal": 0.5, "outcome": "missed"}, "fraction": {"goal": 1e-12, "outcome": "reached"}}
    assert row["limit"]["goals"] == goals
    result.stdout.fnmatch_lines(
        [
            "case * ratio to peer * goal * verdict",
            "0.005s * with_giant * slow *0.1 missed, mfu *",
            "0.005s * plain * slow *0.5 reached, mfu 50% missed, fraction 0% reached *pass",
            "0.005s * torn * slow *0.5 undecided, mfu *",
            "goals: 4 reached, 4 missed, 1 undecided",
        ]
    )


def test_a_goal_of_mfu_has_the_rounds_that_it_needs(project: pytest.Pytester) -> None:
    _, output = run_project(project, "--scale=smoke", "-k", "half_of_the_peak")
    (entry,) = output["benchmarks"]
    assert entry["extra_info"]["limit"]["goals"] == {"mfu": {"goal": 0.5, "outcome": "missed"}}
    assert entry["stats"]["rounds"] == fewest_rounds(0.95)  # more than the three that the test asks for


def test_the_verdicts_of_a_run_share_one_error(project: pytest.Pytester) -> None:
    """Each time budget counts, each absolute budget in seconds, and all other tests as one; no skipped test."""
    Path("budgets.toml").write_text('["*[plain*"]\nseconds = 9\n["*nap*"]\nbytes = 9_000\n["*count*"]\nseconds = 9')
    project.makepyfile(
        test_zlast="""
        import pytest
        from shardmark.plugin.session import SESSION

        def test_count(pytestconfig):
            assert pytestconfig.stash[SESSION].judgements == 2 + 1 + 1  # not itself

        @pytest.mark.skip(reason="its goals are of another device")
        def test_count_of_none(measure):
            raise AssertionError
        """
    )
    chosen = "nap and (plain or slow or elsewhere) or count"
    result, output = run_project(project, "--scale=smoke", "--budgets=budgets.toml", "-k", chosen)
    outcomes = result.parseoutcomes()
    slow = "undecided" if "undecided" in outcomes else "failed"  # on a busy machine it may be
    assert outcomes == {"passed": 2, slow: 1, "skipped": 2, "deselected": outcomes["deselected"]}
    for name in ("plain", "slow"):
        assert row_of(output, name)["time"]["judged_confidence"] >= confidence(4) > confidence(1)


def judged_confidences(output: dict[str, Any]) -> dict[str, float]:
    """Confidences of rows with a peer, by the beginning of the test's name."""
    rows = {entry["name"].partition("-")[0]: entry["extra_info"]["time"] for entry in output["benchmarks"]}
    return {name: time["judged_confidence"] for name, time in rows.items() if "judged_confidence" in time}


def test_budgets_that_tests_bring_along_have_one_share_together(project: pytest.Pytester) -> None:
    """`test_strict` gives "greedy" a budget that its registration lacks."""
    _, output = run_project(project, "--scale=smoke", "-k", "(nap or strict) and (plain or greedy)")
    found = judged_confidences(output)
    assert found.pop("test_strict[greedy") == confidence((2 + 1) * 2)
    assert found == dict.fromkeys(["test_nap[plain", "test_strict[plain"], confidence(2 + 1))


def test_beside_an_absolute_budget_they_have_one_each(project: pytest.Pytester) -> None:
    Path("budgets.toml").write_text('["*strict*"]\nseconds = 9')
    _, output = run_project(project, "--scale=smoke", "--budgets=budgets.toml", "-k", "strict and greedy")
    assert judged_confidences(output) == {"test_strict[greedy": confidence(2)}


def test_a_teams_own_budgets_are_held_to(project: pytest.Pytester) -> None:
    Path("budgets.toml").write_text(
        '["*[plain*"]\nseconds = 0.0005\n["*[greedy*"]\nbytes = 3_999\n["*nonesuch*"]\nseconds = 1\n'
    )
    result, _ = run_project(project, "--scale=smoke", "-k", "nap and (plain or greedy)", "--budgets=budgets.toml")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            '*peak of 4,000 bytes, over the 3,999 of "[*][[]greedy[*]"',
            '0.00* s, * interval *, against the 0.0005 s of "[*][[]plain[*]"',
            '--budgets: no measured test matches "[*]nonesuch[*]"',
        ]
    )


def test_a_time_budget_is_judged_where_it_applies_and_shown_elsewhere(project: pytest.Pytester) -> None:
    result, output = run_project(project, "--scale=smoke", "-k", "nap and excused")
    result.assert_outcomes(passed=1)
    time = row_of(output, "excused")["time"]
    assert time["peer"] == "plain" and time["ratio"] > 2 and time["budget"] is time["goal"] is time["outcome"] is None
