"""The plugin as a user meets it: rows, verdicts, tables and files."""

import sys
from typing import Any

import pytest

from shardmark.verdict.budget import confidence
from tests.support.project import SLEEPS, row_of, run_project

pytest_plugins = ["pytester", "tests.support.project"]

OWN_TEST = """
from dataclasses import replace

import pytest
from shardmark.api import Race, Work
from test_sleeps import GRID, Sleep

@pytest.mark.family("sleep", only=("plain",))
@pytest.mark.cases(GRID)
def test_own(implementation, case, measure):
    measure(Sleep, {arguments})
"""


def measured_with(project: pytest.Pytester, arguments: str) -> tuple[pytest.RunResult, dict[str, Any]]:
    """A run of one test of "plain", which calls `measure` with those arguments."""
    project.makepyfile(test_own=OWN_TEST.format(arguments=arguments))
    return run_project(project, "--scale=smoke", "test_own.py")


def test_verdicts_are_outcomes_and_every_row_lands(project: pytest.Pytester) -> None:
    result, output = run_project(
        project,
        *(
            "--scale=smoke",
            "-v",
            "-rs",
            "-k",
            "(nap or test_dream) and (plain or slow or greedy or elsewhere or dreamt)",
        ),
        "--benchmark-max-time=0.1",
    )
    result.assert_outcomes(passed=1 + 4, failed=2, skipped=2 + 1)  # what is not to be measured runs in `test_dream`
    assert row_of(output, "plain")["verdict"] == "pass"
    assert row_of(output, "slow")["verdict"] == row_of(output, "greedy")["verdict"] == "fail"
    result.stdout.fnmatch_lines(
        [
            "4,000 bytes of tensors at the peak, over the budget of 2,100 bytes (formula 2,000 bytes x 1.05)",
            "*x plain's time, * interval [[]*[]], against the budget of 2.0x and 1%, the smallest effect that matters",
            "*How long is a nap?*",
            "case * implementation * time ms * ratio to peer * tensors MiB * budget MiB * verdict",
            "0.005s * plain * [[]*, *[]] * slow * pass",
            "0.005s * slow * [[]*, *[]] * plain * fail",
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
    assert row["work"]["flops_per_second"] == pytest.approx(10 / entry["stats"]["median"])
    assert row["limit"]["seconds"] > 0 and 0 < row["limit"]["fraction"] < 1
    time = row["time"]
    assert (time["peer"], time["peer_called"]) == ("slow", "a slow nap")
    assert time["budget"] == 0.9 and time["judged_confidence"] >= confidence(1)
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
    assert limit["mfu"] == pytest.approx(5 / (entry["stats"]["median"] * limit["peak_flops_per_second"]))
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
    roomy = "replace(implementation, workspace=lambda case, device: 10**17), case, work=Work(flops=10)"
    _, output = measured_with(project, roomy)
    (entry,) = output["unmeasured"]
    memory = entry["extra_info"]["memory"]
    assert memory["needed"] == memory["formula"] + 10**17 and memory["expected_workspace"] == 10**17


def test_a_goal_whose_peer_would_not_fit_is_not_started(project: pytest.Pytester) -> None:
    race = 'implementation, case, work=Work(flops=10), time=Race("giant", goal=1.0)'
    result, output = measured_with(project, race)
    result.assert_outcomes(skipped=1)
    (entry,) = output["unmeasured"]
    row = entry["extra_info"]
    assert row["verdict"] == "not started" and row["memory"]["needed"] == row["memory"]["formula"] + 10**17


def test_a_peer_that_would_not_fit_does_not_stop_the_implementation(project: pytest.Pytester) -> None:
    result, output = run_project(project, "--scale=smoke", "-k", "nap and giant")
    result.assert_outcomes(passed=1, skipped=1, warnings=1)
    result.stdout.fnmatch_lines(["*measured without its peer giant: both need 95,367,431,641 MiB of * MiB"])
    time = row_of(output, "with_giant")["time"]
    assert time["peer"] is None and time["ratio"] is None and time["median_by_rank"][0] > 0.005


def test_running_out_of_memory_is_a_row_and_a_failure(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardmark.plugin.measure.Measure._admit", lambda self, identity, memory: 10**18)
    result, output = run_project(project, "--scale=paper", "-k", "nap and greedy")
    result.assert_outcomes(passed=0, failed=2)
    (row,) = [entry["extra_info"] for entry in output["unmeasured"]]
    assert row["verdict"] == "out of memory" and row["why"].startswith("on rank 0: ")
    result.stdout.fnmatch_lines(["out of memory on rank 0: *DefaultCPUAllocator: can't allocate memory*"])


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


def test_full_scale_has_as_many_rounds_as_were_published(project: pytest.Pytester) -> None:
    grid = "GRID = Grid(smoke=[Naps(0.005)], laptop=[], paper=[], full=[Naps(0.005)], full_rounds=20)"
    project.makepyfile(test_sleeps=SLEEPS.replace("GRID = Grid(", f"{grid}\nOTHER = Grid("))
    for scale, rounds in (("smoke", 10), ("full", 20)):
        _, output = run_project(project, f"--scale={scale}", "-k", "nap and plain")
        assert output["benchmarks"][0]["stats"]["rounds"] == pytest.approx(rounds, abs=3)


def test_more_flops_than_the_machine_can_compute_are_no_pass(project: pytest.Pytester) -> None:
    """A step that leaves work out is fast."""
    result, output = measured_with(project, "implementation, case, work=Work(flops=10**18)")
    result.assert_outcomes(failed=1)
    row = row_of(output, "own")
    assert row["verdict"] == "fail"
    result.stdout.fnmatch_lines(["*% of what this machine can compute: the work was not done*"])
