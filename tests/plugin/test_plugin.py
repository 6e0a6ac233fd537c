"""The plugin as a user meets it: rows, verdicts, tables and files."""

import sys
from pathlib import Path
from typing import Any

import pytest

from shardmark.verdict.betting import fewest_rounds
from shardmark.verdict.budget import confidence
from tests.support.project import SLEEPS, row_of, run_project

pytest_plugins = ["pytester", "tests.support.project"]


def test_verdicts_are_outcomes_and_every_row_lands(project: pytest.Pytester) -> None:
    result, output = run_project(
        project,
        *("--scale=smoke", "-v", "-rs", "-k", "nap and (plain or slow or greedy or elsewhere or dreamt)"),
        "--benchmark-max-time=0.1",
    )
    result.assert_outcomes(passed=1, failed=2, skipped=2)
    assert row_of(output, "plain")["verdict"] == "pass"
    assert row_of(output, "slow")["verdict"] == row_of(output, "greedy")["verdict"] == "fail"
    result.stdout.fnmatch_lines(
        [
            "*x plain's time, * interval [[]*[]], against the budget of 2.0x and 1%, the smallest effect that matters",
            "4,000 bytes of tensors at the peak, over the budget of 2,100 bytes (formula 2,000 bytes x 1.05)",
            "*How long is a nap?*",
            "case * implementation * time ms * ratio to peer * tensors MiB * budget MiB * verdict",
            "0.005s * plain * ± * slow * pass",
            "0.005s * slow * ± * plain * fail",
            "3 rows in out.json",
            "SKIPPED * elsewhere: needs another planet",
            "SKIPPED * dreamt: dreams take no time",
        ]
    )


def test_a_row_says_what_the_design_lists(project: pytest.Pytester) -> None:
    _, output = run_project(project, "--scale=smoke", "-k", "nap and plain")
    (entry,) = output["benchmarks"]
    row = entry["extra_info"]
    assert entry["group"] == "How long is a nap?"
    assert entry["params"] == {"implementation": "plain", "case": "0.005s"}
    assert entry["options"]["timer"] == "device_clock"
    assert row["case"] == {"id": "0.005s", "length": 0.005, "nbytes": 4000, "dtype": "float32"}
    phases = ["after_init", "before_step", "after_forward", "after_backward", "after_step"]
    assert row["memory"]["phases"] == dict.fromkeys(phases, 4000)
    assert row["memory"]["peak"] == row["memory"]["tensors"] == row["memory"]["formula"] == 4000
    assert row["memory"]["workspace"] == 0 and row["memory"]["workspace_operator"] is None
    assert row["memory"]["budget"] == 4200
    assert {"flops": 10, "bytes_moved": 10, "bytes_communicated": 0}.items() < row["work"].items()
    assert row["work"]["flops_per_second"] == pytest.approx(10 / entry["stats"]["mean"])
    assert row["limit"]["seconds"] > 0 and 0 < row["limit"]["fraction"] < 1
    time = row["time"]
    assert time["peer"] == "slow" and time["budget"] == 0.9 and time["judged_confidence"] >= confidence(1)
    assert time["goal"] is time["outcome"] is None
    assert time["interval"][0] <= time["ratio"] <= time["interval"][1] < 0.9
    assert time["machine"].keys() <= {"waited", "bursts", "warm-up", "drift", "level"}
    rest = ("family", "implementation", "device", "backend", "world_size", "dtype", "scale", "simulated", "hardware")
    assert [row[name] for name in rest] == ["sleep", "plain", "cpu", "none", 1, "float32", "smoke", False, None]
    assert len(entry["stats"]["data"]) >= 7 and min(entry["stats"]["data"]) >= 0.005
    assert {"torch", "triton", "gpus", "driver"} <= set(output["machine_info"])


def test_a_tests_own_rounds_are_kept_to_and_mfu_is_shown(project: pytest.Pytester) -> None:
    result, output = run_project(project, "--scale=smoke", "-k", "rounds", "-v")
    (entry,) = output["benchmarks"]
    assert len(entry["stats"]["data"]) == 3
    limit = entry["extra_info"]["limit"]
    assert limit["mfu"] == pytest.approx(5 / (entry["stats"]["mean"] * limit["peak_flops_per_second"]))
    result.stdout.fnmatch_lines(["case * MFU *", f"0.005s * {limit['mfu']:.1%} *"])


def test_steps_that_a_test_times_itself_are_rows_too(project: pytest.Pytester) -> None:
    """With an observer and a column of the test's own."""
    result, output = run_project(project, "--scale=smoke", "-v", "-k", "first_steps")
    result.assert_outcomes(passed=1, skipped=1)
    (entry,) = output["benchmarks"]
    assert len(entry["stats"]["data"]) == 4
    assert entry["extra_info"]["time"]["first"] == pytest.approx(entry["stats"]["data"][0])
    (unmeasured,) = output["unmeasured"]
    assert unmeasured["extra_info"]["verdict"] == "not started"
    result.stdout.fnmatch_lines(["case * first s*", "0.005s * 0.0?*", "2 rows of first steps"])


def test_rows_are_on_disk_as_soon_as_they_are_measured(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_zlast="""
        import json
        def test_last():
            output = json.load(open("out.json"))
            assert [entry["name"] for entry in output["benchmarks"]] == ["test_nap[plain-0.005s]"]
        """
    )
    result, _ = run_project(project, "--scale=smoke", "-k", "nap and plain or last")
    result.assert_outcomes(passed=2)
    assert not list(project.path.glob("*.partial"))


def test_a_case_that_would_not_fit_is_not_started(project: pytest.Pytester) -> None:
    result, output = run_project(project, "--scale=paper", "-v", "-k", "nap and plain", "-rs")
    result.assert_outcomes(passed=1, skipped=1)
    (entry,) = output["unmeasured"]
    row = entry["extra_info"]
    assert row["verdict"] == "not started" and row["memory"]["needed"] == 10**17
    assert 0 < row["memory"]["available"] < row["memory"]["needed"]
    assert row["why"].startswith("needs 95,367,431,641 MiB of ")
    result.stdout.fnmatch_lines(["*plain * needs 95,367,431,640.62 of * not started", "*not started: needs * MiB of *"])


def test_a_case_that_its_workspace_leaves_no_room_for_is_not_started(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_roomy="""
        from dataclasses import replace
        import pytest
        from shardmark.api import Work
        from test_sleeps import GRID, Sleep

        @pytest.mark.family("sleep", only=("plain",))
        @pytest.mark.cases(GRID)
        def test_roomy(implementation, case, measure):
            roomy = replace(implementation, workspace=lambda case, device: 10**17)
            measure(Sleep, roomy, case, work=Work(flops=10))
        """
    )
    _, output = run_project(project, "--scale=smoke", "test_roomy.py")
    (entry,) = output["unmeasured"]
    memory = entry["extra_info"]["memory"]
    assert memory["needed"] == memory["formula"] + 10**17 and memory["expected_workspace"] == 10**17


def test_a_goal_whose_peer_would_not_fit_is_not_started(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_race="""
        import pytest
        from shardmark.api import Work
        from shardmark.api.registry import Race
        from test_sleeps import GRID, Sleep

        @pytest.mark.family("sleep", only=("plain",))
        @pytest.mark.cases(GRID)
        def test_race(implementation, case, measure):
            measure(Sleep, implementation, case, work=Work(flops=10), time=Race("giant", goal=1.0))
        """
    )
    result, output = run_project(project, "--scale=smoke", "test_race.py")
    result.assert_outcomes(skipped=1)
    (entry,) = output["unmeasured"]
    row = entry["extra_info"]
    assert row["verdict"] == "not started" and row["memory"]["needed"] == row["memory"]["formula"] + 10**17


def test_a_peer_that_would_not_fit_does_not_stop_the_implementation(project: pytest.Pytester) -> None:
    result, output = run_project(project, "--scale=smoke", "-k", "nap and giant")
    result.assert_outcomes(passed=1, skipped=1, warnings=1)
    result.stdout.fnmatch_lines(["*measured without its peer giant: both need 95,367,431,641 MiB of * MiB"])
    time = row_of(output, "with_giant")["time"]
    assert time["peer"] is None and time["ratio"] is None and time["mean_by_rank"][0] > 0.005


def test_running_out_of_memory_is_a_row_and_a_failure(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardmark.plugin.measure.Measure._admit", lambda self, identity, memory: 10**18)
    result, output = run_project(project, "--scale=paper", "-k", "nap and greedy")
    result.assert_outcomes(passed=0, failed=2)
    (row,) = [entry["extra_info"] for entry in output["unmeasured"]]
    assert row["verdict"] == "out of memory" and row["why"].startswith("on rank 0: ")
    result.stdout.fnmatch_lines(["out of memory on rank 0: *DefaultCPUAllocator: can't allocate memory*"])


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
    line = "  torn 0.005s *x plain's time, * interval *, against the budget of 2.0x *"
    result.stdout.fnmatch_lines(["undecided: 1", line, "*1 undecided*"])


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
            "0.005s * plain * slow *0.5 reached, mfu 50% missed, fraction 0% reached *pass",
            "0.005s * with_giant * slow *0.1 missed, mfu *",
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
    """Each budget in time counts, each absolute one in seconds, and all other tests together once; but none skipped."""
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
    result.assert_outcomes(passed=2, failed=1, skipped=2)
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
            '0.00* s, * interval *, against the 0.0005 s of "[*][[]plain[*]"',
            '*peak of 4,000 bytes, over the 3,999 of "[*][[]greedy[*]"',
            '--budgets: no measured test matches "[*]nonesuch[*]"',
        ]
    )


def test_disabled_benchmarks_still_hold_memory_to_its_budget(project: pytest.Pytester) -> None:
    result, output = run_project(
        project,
        "--scale=smoke",
        "--benchmark-disable",
        "-k",
        "nap and (plain or slow or greedy or elsewhere or dreamt)",
    )
    result.assert_outcomes(passed=2, failed=1, skipped=2)
    assert not output


@pytest.mark.sweep
def test_pytest_benchmarks_compare_reads_the_file(project: pytest.Pytester) -> None:
    run_project(project, "--scale=paper", "-k", "plain")
    compared = project.run(sys.executable, "-m", "pytest_benchmark", "compare", "out.json")
    assert compared.ret == 0
    compared.stdout.fnmatch_lines(["*test_nap[[]plain-0.005s0[]]*"])


def test_inputs_that_an_implementation_does_not_take_skip_its_test(project: pytest.Pytester) -> None:
    result, output = run_project(project, "--scale=smoke", "-k", "nap and light", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * light sleeps are not timed"])
    assert not output.get("benchmarks")


def test_a_peer_that_does_not_take_the_case_does_not_stop_the_implementation(project: pytest.Pytester) -> None:
    result, output = run_project(project, "--scale=smoke", "-k", "nap and alone")
    result.assert_outcomes(passed=1)
    assert row_of(output, "alone")["time"]["ratio"] is None


def test_a_time_budget_is_judged_where_it_applies_and_shown_elsewhere(project: pytest.Pytester) -> None:
    result, output = run_project(project, "--scale=smoke", "-k", "nap and excused")
    result.assert_outcomes(passed=1)
    time = row_of(output, "excused")["time"]
    assert time["peer"] == "plain" and time["ratio"] > 2 and time["budget"] is time["goal"] is time["outcome"] is None


def test_a_test_may_set_its_own_time_budget(project: pytest.Pytester) -> None:
    result, output = run_project(project, "--scale=smoke", "-k", "strict and plain")
    result.assert_outcomes(failed=1)
    assert row_of(output, "plain")["time"]["peer"] == "slow"


def test_what_is_not_to_be_measured_runs_elsewhere(project: pytest.Pytester) -> None:
    result, _ = run_project(project, "--scale=smoke", "-k", "dreamt and not strict")
    result.assert_outcomes(passed=1, skipped=1)


def test_full_scale_has_as_many_rounds_as_were_published(project: pytest.Pytester) -> None:
    grid = "GRID = Grid(smoke=[Naps(0.005)], laptop=[], paper=[], full=[Naps(0.005)], full_rounds=20)"
    project.makepyfile(test_sleeps=SLEEPS.replace("GRID = Grid(", f"{grid}\nOTHER = Grid("))
    for scale, rounds in (("smoke", 10), ("full", 20)):
        _, output = run_project(project, f"--scale={scale}", "-k", "nap and plain")
        assert output["benchmarks"][0]["stats"]["rounds"] == pytest.approx(rounds, abs=3)


def test_more_flops_than_the_machine_can_compute_are_no_pass(project: pytest.Pytester) -> None:
    """A step that leaves work out is fast."""
    project.makepyfile(
        test_lazy="""
        import pytest
        from shardmark.api import Work
        from test_sleeps import GRID, Sleep

        @pytest.mark.family("sleep", only=("plain",))
        @pytest.mark.cases(GRID)
        def test_lazy(implementation, case, measure):
            measure(Sleep, implementation, case, work=Work(flops=10**18), time=None)
        """
    )
    result, output = run_project(project, "--scale=smoke", "test_sleeps.py", "test_lazy.py", "-k", "lazy")
    result.assert_outcomes(failed=1)
    row = row_of(output, "lazy")
    assert row["verdict"] == "fail"
    result.stdout.fnmatch_lines(["*% of what this machine can compute: the work was not done*"])
