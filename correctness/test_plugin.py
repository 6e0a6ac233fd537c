"""The plugin as a user meets it: options, usage errors, rows, verdicts, tables and files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from correctness.test_link import makes_links
from shardmark import registry

pytest_plugins = ["pytester"]

ROOT = Path(__file__).parent.parent

CONFTEST = """
import impl
pytest_plugins = ["shardmark.plugin"]
"""

SLEEPS = """
import time
from dataclasses import dataclass

import pytest
import torch
from shardmark.cases import Grid, Work
from shardmark.memory import Memory
from shardmark.passes import IMPLEMENTATION, Measured, Plan, Rounds, timed_steps
from shardmark.registry import Family, TimeBudget, Unsupported, add_family, register


class Contract: ...


@dataclass(frozen=True)
class Naps:
    length: float
    nbytes: int = 4000
    dtype: str = "float32"

    def __str__(self):
        return f"{self.length}s"


add_family(Family("sleep", Contract, reference="plain", check=lambda target, device: None))


def formula(case):
    return case.nbytes


register("sleep", "plain", 1.0, memory=formula, time=TimeBudget("slow", 0.9))
register("sleep", "slow", 4.0, memory=formula, time=TimeBudget("plain", 2.0))
register("sleep", "greedy", 1.0, memory=lambda case: formula(case) // 2)
register("sleep", "with_giant", 1.0, memory=formula, time=TimeBudget("giant", 0.9))
register("sleep", "giant", 2.0, memory=lambda case: 10**17, requires=(lambda device: None,))
register("sleep", "elsewhere", 1.0, memory=formula, requires=(lambda device: "needs another planet",))
register("sleep", "dreamt", 1.0, memory=formula, requires_to_measure=(lambda device: "dreams take no time",))
register("sleep", "light", None, memory=formula)
long = TimeBudget("plain", 2.0, applies=lambda case, device: case.length > 1)
register("sleep", "excused", 4.0, memory=formula, time=long)
register("sleep", "alone", 1.0, memory=formula, time=TimeBudget("light", 1.0))


class Sleep:
    backend = "none"

    def __init__(self, implementation, case, device):
        self.length = implementation.target and implementation.target * case.length
        self.kept = torch.empty(1000) if case.nbytes < 2**50 else torch.empty(case.nbytes)

    def prepare(self):
        pass

    def step(self, mark):
        if self.length is None:
            raise Unsupported("light sleeps are not timed")
        time.sleep(self.length)
        mark("forward")
        mark("backward")


GRID = Grid(smoke=[Naps(0.001)], laptop=[Naps(0.001), Naps(0.002)], paper=[Naps(0.001), Naps(0.001, nbytes=10**17)])


@pytest.mark.family("sleep")
@pytest.mark.question("How long is a nap?")
@pytest.mark.cases(GRID)
def test_nap(implementation, case, measure):
    rates = lambda seconds: {"flops_per_second": 10 / seconds}
    measure(Sleep, implementation, case, work=Work(flops=10, bytes_moved=10), rates=rates)


@pytest.mark.family("sleep")
@pytest.mark.cases(GRID)
def test_goal(implementation, case, measure):
    measure(Sleep, implementation, case, work=Work(flops=10), time=TimeBudget("slow", 1e-6))


@pytest.mark.family("sleep")
def test_dream(implementation): ...


@pytest.mark.family("sleep", only=("plain", "slow"))
def test_some(implementation): ...


@pytest.mark.family("sleep", only=("slow",))
def test_another(implementation): ...


@pytest.mark.family("sleep", only=("plain",))
@pytest.mark.cases(GRID)
def test_rounds(implementation, case, measure):
    amount = Work(flops=10, model_flops=5)
    measure(Sleep, implementation, case, work=amount, rounds=Rounds(minimum=3, maximum=3, warmups=1))


@pytest.mark.family("sleep", only=("plain", "giant"))
@pytest.mark.cases(GRID)
def test_first_steps(implementation, case, device, measure):
    plan = Plan(Sleep, implementation, None, case, device, 1, Rounds())
    laps = measure.attempt(plan, lambda plan: timed_steps(plan, 4))
    after = {"0": {"mean": 0.5, "stddev": 0.25}, "1": {"mean": laps[1].seconds, "stddev": 0.0}}
    measured = Measured("none", Memory(), {IMPLEMENTATION: laps})
    measure.record(plan, [measured], times={"after_warmups": after})
"""


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project of one's own that uses the plugin, with a family of its own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # or pytest-benchmark disables itself in there
    monkeypatch.syspath_prepend(str(ROOT))
    monkeypatch.setattr(registry, "FAMILIES", dict(registry.FAMILIES))  # its own family goes with it
    pytester.makeconftest(CONFTEST)
    pytester.makepyfile(test_sleeps=SLEEPS)
    return pytester


def _run(project: pytest.Pytester, *args: str) -> tuple[pytest.RunResult, dict[str, Any]]:
    """A run in this process, and its JSON."""
    rounds = ("--benchmark-min-rounds=7", "--benchmark-max-time=0.01", "--benchmark-quiet")
    result = project.runpytest_inprocess("--device=cpu", *rounds, "--benchmark-json=out.json", *args)
    out = project.path / "out.json"
    return result, json.loads(out.read_text()) if out.exists() else {}


def _row(output: dict[str, Any], name: str) -> dict[str, Any]:
    entries = [*output["benchmarks"], *output["unmeasured"]]
    (row,) = [entry["extra_info"] for entry in entries if name in entry["name"]]
    return row


def test_verdicts_are_outcomes_and_every_row_lands(project: pytest.Pytester) -> None:
    result, output = _run(
        project, "--scale=smoke", "-rs", "-k", "nap and (plain or slow or greedy or elsewhere or dreamt)"
    )
    result.assert_outcomes(passed=1, failed=2, skipped=2)
    assert _row(output, "plain")["verdict"] == "pass"
    assert _row(output, "slow")["verdict"] == _row(output, "greedy")["verdict"] == "fail"
    result.stdout.fnmatch_lines(
        [
            "*x plain's time, * interval [[]*[]], against the budget of 2.0x",
            "peak of 0.00 MiB, over the budget of 0.00 MiB (formula 0.00 MiB x 1.05)",
            "*How long is a nap?*",
            "case * implementation * time ms * forward * backward * TFLOP/s * ratio to peer * of limit *"
            " before backward * peak MiB * budget MiB * verdict",
            "0.001s * plain * ± * slow * pass",
            "0.001s * slow * ± * plain * fail",
            "3 rows in out.json",
            "SKIPPED * elsewhere: needs another planet",
            "SKIPPED * dreamt: dreams take no time",
        ]
    )


def test_a_row_says_what_the_design_lists(project: pytest.Pytester) -> None:
    _, output = _run(project, "--scale=smoke", "-k", "nap and plain")
    (entry,) = output["benchmarks"]
    row = entry["extra_info"]
    assert entry["group"] == "How long is a nap?"
    assert entry["params"] == {"implementation": "plain", "case": "0.001s"}
    assert entry["options"]["timer"] == "device_clock"
    assert row["case"] == {"id": "0.001s", "length": 0.001, "nbytes": 4000, "dtype": "float32"}
    phases = ["after_init", "before_step", "after_forward", "after_backward", "after_step"]
    assert row["memory"]["phases"] == dict.fromkeys(phases, 4000)
    assert row["memory"]["peak"] == row["memory"]["formula"] == 4000 and row["memory"]["budget"] == 4200
    assert {"flops": 10, "bytes_moved": 10, "bytes_communicated": 0}.items() < row["work"].items()
    assert row["work"]["flops_per_second"] == pytest.approx(10 / entry["stats"]["mean"])
    assert row["limit"]["seconds"] > 0 and 0 < row["limit"]["fraction"] < 1
    time = row["time"]
    assert time["peer"] == "slow" and time["budget"] == 0.9 and time["coverage"] >= 0.95
    assert time["interval"][0] <= time["ratio"] <= time["interval"][1] < 0.9
    rest = ("family", "implementation", "device", "backend", "world_size", "dtype", "scale", "simulated")
    assert [row[name] for name in rest] == ["sleep", "plain", "cpu", "none", 1, "float32", "smoke", False]
    assert len(entry["stats"]["data"]) >= 7 and min(entry["stats"]["data"]) >= 0.001
    assert {"torch", "triton", "gpus", "driver", "attention_backend"} <= set(output["machine_info"])


def test_only_some_implementations_and_a_users_own_where_the_reference_is(project: pytest.Pytester) -> None:
    collect = ("--collect-only", "-q", "-k", "some or another")
    names = [
        "test_sleeps.py::test_some[plain]",
        "test_sleeps.py::test_some[slow]",
        "test_sleeps.py::test_another[slow]",
    ]
    assert [line for line in project.runpytest_inprocess(*collect).outlines if "::" in line] == names
    chosen = project.runpytest_inprocess(*collect, "--impl", "sleep=greedy").outlines  # the family is registered by now
    assert [line for line in chosen if "::" in line and "greedy" in line] == ["test_sleeps.py::test_some[greedy]"]


def test_a_tests_own_rounds_are_kept_to_and_mfu_is_shown(project: pytest.Pytester) -> None:
    result, output = _run(project, "--scale=smoke", "-k", "rounds")
    (entry,) = output["benchmarks"]
    assert len(entry["stats"]["data"]) == 3
    limit = entry["extra_info"]["limit"]
    assert limit["mfu"] == pytest.approx(5 / (entry["stats"]["mean"] * limit["peak_flops_per_second"]))
    result.stdout.fnmatch_lines(["case * MFU *", f"0.001s * {limit['mfu']:.1%} *"])


def test_steps_that_a_test_times_itself_are_rows_too_with_what_came_after_each_warmup(project: pytest.Pytester) -> None:
    result, output = _run(project, "--scale=smoke", "-k", "first_steps")
    result.assert_outcomes(passed=1, skipped=1)
    (entry,) = output["benchmarks"]
    assert len(entry["stats"]["data"]) == 4
    assert entry["extra_info"]["time"]["after_warmups"]["0"] == {"mean": 0.5, "stddev": 0.25}
    (unmeasured,) = output["unmeasured"]
    assert unmeasured["extra_info"]["verdict"] == "not started"
    result.stdout.fnmatch_lines(["case * after 0 warm-ups * after 1 warm-up *", "0.001s * 500.0 ± 250.0 *"])


def test_rows_are_on_disk_as_soon_as_they_are_measured(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_zlast="""
        import json
        def test_last():
            output = json.load(open("out.json"))
            assert [entry["name"] for entry in output["benchmarks"]] == ["test_nap[plain-0.001s]"]
        """
    )
    result, _ = _run(project, "--scale=smoke", "-k", "nap and plain or last")
    result.assert_outcomes(passed=2)
    assert not list(project.path.glob("*.partial"))


def test_a_case_that_would_not_fit_is_not_started(project: pytest.Pytester) -> None:
    result, output = _run(project, "--scale=paper", "-k", "nap and plain", "-rs")
    result.assert_outcomes(passed=1, skipped=1)
    (entry,) = output["unmeasured"]
    row = entry["extra_info"]
    assert row["verdict"] == "not started" and row["memory"]["needed"] == 10**17
    assert 0 < row["memory"]["available"] < row["memory"]["needed"]
    result.stdout.fnmatch_lines(["*plain * needs 95,367,431,640.62 of * not started", "*not started: needs * MiB of *"])


def test_a_peer_that_would_not_fit_does_not_stop_the_implementation(project: pytest.Pytester) -> None:
    result, output = _run(project, "--scale=smoke", "-k", "nap and giant")
    result.assert_outcomes(passed=1, skipped=1, warnings=1)
    result.stdout.fnmatch_lines(["*measured without its peer giant: both need 95,367,431,641 MiB of * MiB"])
    time = _row(output, "with_giant")["time"]
    assert time["peer"] is None and time["ratio"] is None and time["mean_by_rank"][0] > 0.001


def test_running_out_of_memory_is_a_row_and_a_failure(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardmark.measure.Measure._admit", lambda self, plan, budget: plan)
    result, output = _run(project, "--scale=paper", "-k", "nap and greedy")
    result.assert_outcomes(passed=0, failed=2)
    assert [entry["extra_info"]["verdict"] for entry in output["unmeasured"]] == ["out of memory"]
    result.stdout.fnmatch_lines(["out of memory: *DefaultCPUAllocator: can't allocate memory*"])


def test_too_few_rounds_leave_a_time_budget_undecided(project: pytest.Pytester) -> None:
    result, output = _run(project, "--scale=smoke", "-k", "nap and slow", "--benchmark-min-rounds=2", "-rs")
    result.assert_outcomes(skipped=1)
    assert _row(output, "slow")["verdict"] == "undecided"
    result.stdout.fnmatch_lines(["*undecided: *x plain's time, * interval *, against the budget of 2.0x"])


def test_a_teams_own_budgets_are_held_to(project: pytest.Pytester) -> None:
    Path("budgets.toml").write_text(
        '["*[plain*"]\nseconds = 0.0005\n["*[greedy*"]\nbytes = 3_999\n["*nonesuch*"]\nseconds = 1\n'
    )
    result, _ = _run(project, "--scale=smoke", "-k", "nap and (plain or greedy)", "--budgets=budgets.toml")
    result.assert_outcomes(failed=2)
    result.stdout.fnmatch_lines(
        [
            '0.00* s, * interval *, against the 0.0005 s of "[*][[]plain[*]"',
            '*peak of 4,000 bytes, over the 3,999 of "[*][[]greedy[*]"',
            '--budgets: no measured test matches "[*]nonesuch[*]"',
        ]
    )


def test_impl_runs_that_family_alone(project: pytest.Pytester) -> None:
    project.makepyfile(own="from torch.nn.functional import scaled_dot_product_attention as mine")
    project.makepyfile(
        test_attention="""
        import pytest
        @pytest.mark.family("attention")
        def test_it(implementation): print("ran", implementation.name)
        @pytest.mark.family("collectives")
        def test_other(implementation): pass
        def test_no_family(): pass
        """
    )
    result, _ = _run(project, "--scale=smoke", "--impl", "attention=own.py:mine", "--impl", "attention=sdpa", "-s")
    result.assert_outcomes(passed=2)  # and the rest is deselected
    result.stdout.fnmatch_lines(["*ran mine*", "*ran sdpa*"])


def test_impl_reaches_the_ranks(project: pytest.Pytester) -> None:
    project.makepyfile(
        own="""
        from impl.data_parallel import NaiveDataParallel

        class Mine(NaiveDataParallel):
            pass
        """,
        test_ranks="""
        import pytest
        from torch import nn

        def wrap(implementation):
            return type(implementation.adapted(nn.Linear(2, 2))).__name__

        @pytest.mark.family("data_parallel")
        def test_it(implementation, world):
            assert world.run(wrap, implementation) == ["Mine"] * world.size
        """,
    )
    result, _ = _run(project, "--impl=data_parallel=own.py:Mine", "--ranks=2", "test_ranks.py")
    result.assert_outcomes(passed=1)


def test_a_test_may_choose_its_own_worlds(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_own="""
        import pytest

        @pytest.mark.parametrize("world", [2], indirect=True)
        def test_size(world):
            assert world.size == 2

        @pytest.mark.family("nonesuch")
        def test_family(implementation): pass
        """
    )
    result, _ = _run(project, "--ranks=1", "test_own.py", "-k", "size", "--continue-on-collection-errors")
    result.assert_outcomes(errors=1)
    result.stdout.fnmatch_lines(["test_own.py::test_family: no family 'nonesuch'; the families are *"])


def test_ranks_and_cases_parametrize_tests(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_ranks="""
        import torch.distributed as dist
        def test_size(world):
            assert world.run(dist.get_world_size) == [world.size] * world.size
        """
    )
    result, _ = _run(project, "--ranks=1,3,1", "-v", "test_ranks.py")
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["*test_size[[]1ranks[]] PASSED*", "*test_size[[]3ranks[]] PASSED*"])
    result, _ = _run(project, "--scale=laptop", "--collect-only", "-q", "test_sleeps.py")
    result.stdout.fnmatch_lines(["*test_nap[[]plain-0.001s[]]", "*test_nap[[]plain-0.002s[]]"])


def test_disabled_benchmarks_still_hold_memory_to_its_budget(project: pytest.Pytester) -> None:
    result, output = _run(
        project,
        "--scale=smoke",
        "--benchmark-disable",
        "-k",
        "nap and (plain or slow or greedy or elsewhere or dreamt)",
    )
    result.assert_outcomes(passed=2, failed=1, skipped=2)
    assert not output


def test_pytest_benchmarks_compare_reads_the_file(project: pytest.Pytester) -> None:
    _run(project, "--scale=paper", "-k", "plain")
    compared = project.run(sys.executable, "-m", "pytest_benchmark", "compare", "out.json")
    assert compared.ret == 0
    compared.stdout.fnmatch_lines(["*test_nap[[]plain-0.001s0[]]*"])


def test_inputs_that_an_implementation_does_not_take_skip_its_test(project: pytest.Pytester) -> None:
    result, output = _run(project, "--scale=smoke", "-k", "nap and light", "-rs")
    result.assert_outcomes(skipped=1)
    result.stdout.fnmatch_lines(["SKIPPED * light sleeps are not timed"])
    assert not output.get("benchmarks")


def test_a_peer_that_does_not_take_the_case_does_not_stop_the_implementation(project: pytest.Pytester) -> None:
    result, output = _run(project, "--scale=smoke", "-k", "nap and alone")
    result.assert_outcomes(passed=1)
    assert _row(output, "alone")["time"]["ratio"] is None


def test_a_time_budget_is_judged_where_it_applies_and_shown_elsewhere(project: pytest.Pytester) -> None:
    result, output = _run(project, "--scale=smoke", "-k", "nap and excused")
    result.assert_outcomes(passed=1)
    time = _row(output, "excused")["time"]
    assert time["peer"] == "plain" and time["ratio"] > 2 and time["budget"] is None


def test_a_test_may_set_its_own_time_budget(project: pytest.Pytester) -> None:
    result, output = _run(project, "--scale=smoke", "-k", "goal and plain")
    result.assert_outcomes(failed=1)
    assert _row(output, "plain")["time"]["peer"] == "slow"


def test_what_is_not_to_be_measured_runs_elsewhere(project: pytest.Pytester) -> None:
    result, _ = _run(project, "--scale=smoke", "-k", "dreamt and not goal")
    result.assert_outcomes(passed=1, skipped=1)


def test_paper_scale_has_as_many_rounds_as_were_published(project: pytest.Pytester) -> None:
    grid = "GRID = Grid(smoke=[Naps(0.001)], laptop=[], paper=[Naps(0.001)], paper_rounds=20)"
    project.makepyfile(test_sleeps=SLEEPS.replace("GRID = Grid(", f"{grid}\nOTHER = Grid("))
    for scale, rounds in (("smoke", 10), ("paper", 20)):
        _, output = _run(project, f"--scale={scale}", "-k", "nap and plain")
        assert output["benchmarks"][0]["stats"]["rounds"] == pytest.approx(rounds, abs=3)


def test_the_listing_is_printed_and_nothing_runs(project: pytest.Pytester) -> None:
    result, output = _run(project, "--implementations")
    assert result.ret == 0 and not output
    result.stdout.fnmatch_lines(
        [
            "torch *, device cpu",
            "attention (reference: eager)",
            "  flash_triton * runs here, and is not measured: on CPU it runs in Triton's interpreter, *",
            "  sdpa * runs here",
            "  flex * does not run here: PyTorch's FlexAttention has no backward pass on CPU",
        ]
    )
    result.stdout.no_fnmatch_line("*passed*")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device=tpu"], "--device is one of auto, cpu, cuda, not 'tpu'"),
        (["--scale=huge"], "--scale is one of auto, smoke, laptop, paper, not 'huge'"),
        (["--ranks=two"], "--ranks takes world sizes such as 2,4, not 'two'"),
        (["--ranks=2,9999"], "--ranks 2,9999: 9999 ranks are more than this machine allows: *"),
        (["--ranks=0"], "--ranks 0: a world has at least one rank, not 0"),
        (["--impl=attention"], "--impl takes FAMILY=TARGET, not 'attention'"),
        (["--impl=optimiser=adam"], "no family 'optimiser'; the families are *"),
        (["--impl=attention=nonesuch"], "attention has no implementation 'nonesuch'; registered are *"),
        (["--impl=attention=missing.py:f"], "attention=missing.py:f: cannot import *missing.py: FileNotFoundError*"),
        (["--impl=attention=math:cos"], "attention=math:cos does not meet the attention contract: TypeError: *"),
        (["--impl=attention=exits.py:f"], "attention=exits.py:f: cannot import *exits.py: SystemExit: 3"),
        (["--link=fast"], "--link fast: a link's rate is written as 1gbit or 100mbit, not 'fast'"),
        (["--budgets=missing.toml"], "missing.toml: No such file or directory"),
        (["--benchmark-json=missing/out.json"], "--benchmark-json missing/out.json: there is no folder missing"),
    ],
)
def test_a_bad_option_is_one_line_and_status_4(project: pytest.Pytester, arguments: list[str], message: str) -> None:
    Path("exits.py").write_text("raise SystemExit(3)")
    result = project.runpytest_inprocess(*arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR == 4
    errors = [line for line in result.errlines if line]
    assert len(errors) == 1 and not result.outlines
    result.stderr.fnmatch_lines([f"ERROR: {message}"])


@makes_links
def test_rows_and_tables_tell_of_the_link_between_the_ranks(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_hosts="""
        import os

        def host():
            return os.readlink("/proc/self/ns/net")

        def test_two(link, worlds):
            assert link.rate == "1gbit" and len(set(worlds(2).run(host))) == 2
        """
    )
    result, output = _run(project, "--scale=smoke", "--link=1gbit", "-k", "first_steps and plain or two")
    result.assert_outcomes(passed=2)
    assert _row(output, "plain")["link"] == "1gbit"
    result.stdout.fnmatch_lines(
        ["link: the ranks live on two hosts, joined at 1gbit", "*other measurements (two hosts, joined at 1gbit)*"]
    )
    result, output = _run(project, "--scale=smoke", "-k", "first_steps and plain or two", "-rs")
    result.assert_outcomes(passed=1, skipped=1)
    assert _row(output, "plain")["link"] is None
    result.stdout.fnmatch_lines(["SKIPPED * needs a link between the ranks: --link 1gbit, as root"])
    result.stdout.no_fnmatch_line("*joined at*")


def test_a_link_does_not_go_with_torchruns_ranks(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "0")
    result = project.runpytest_inprocess("--device=cpu", "--link=1gbit")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines(
        ["ERROR: --link 1gbit does not go with torchrun, whose ranks are where it started them"]
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has CUDA devices")
def test_asking_for_gpus_that_are_not_there_says_how_many(project: pytest.Pytester) -> None:
    result = project.runpytest_inprocess("--device=cuda", "--ranks=4")
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    assert [line for line in result.errlines if line] == [
        "ERROR: --device cuda needs 4 CUDA devices, and this machine has 0"
    ]
