"""`--against old.json`: what got slower or larger fails, beyond noise; times of another machine are not compared."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardmark.meter.plan import Plan
from shardmark.verdict.slowdown import FEWEST_PAIRS
from tests.support.planted_rows import ALL_REDUCES, figures, run
from tests.support.planted_rows import planted as planted
from tests.support.project import run_project

pytest_plugins = ["pytester", "tests.support.project"]

OLD = ("--against=old.json",)
ALL_REDUCE = [*ALL_REDUCES[:3], 1]


@pytest.fixture
def old(planted: pytest.Pytester) -> Path:
    """The file of a run on rows a and b."""
    run(planted, "--benchmark-json=old.json", a=figures(), b=figures()).assert_outcomes(passed=2)
    return planted.path / "old.json"


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    output = json.loads(path.read_text())
    change(output)
    path.write_text(json.dumps(output))


def test_the_same_again_is_nothing_worse(planted: pytest.Pytester, old: Path) -> None:
    result = run(planted, *OLD, a=figures(), b=figures())
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        [
            "against: old.json, 2 rows of this machine",
            "*- against old.json -*",
            "time: 2 rows compared",
            "memory: 2 rows compared",
            "counters: 2 rows compared",
            "slower or larger: 0",
            "faster or smaller: 0",
        ]
    )
    result.stdout.no_fnmatch_line("other rows*")


WORSE: dict[str, tuple[dict[str, Any], str]] = {
    "twice the time": (
        {"ratio": 2.0},
        "2.000x the time in old.json, beside theirs, * interval [[]1.*, 2.*[]], mean 2.000 ± 0.00?, 3 processes",
    ),
    "a byte of tensors": ({"tensors": 4001}, "4,001 bytes of tensors at the peak, 4,000 in old.json (+1, +0.025%)"),
    "workspace": ({"workspace": 1051}, "1,051 bytes of workspace at the peak, 1,000 in old.json (+51, +5.1%)"),
    "an operator": ({"counters": {"operators": 11}}, "11 operators, 10 in old.json (+1, +10%)"),
    "a bytecode": ({"counters": {"bytecodes": 1001}}, "1,001 bytecodes, 1,000 in old.json (+1, +0.1%)"),
    "a byte sent": ({"counters": {"bytes_sent": 2501}}, "2,501 bytes sent, 2,500 in old.json (+1, +0.04%)"),
    "one more collective": (
        {"counters": {"collectives": [ALL_REDUCES, ["reduce_scatter", "float32", 250, 2]]}},
        "4 collectives, 3 in old.json (+1, +33%), and the first that differs is 2 x reduce_scatter of 250 bytes of "
        "float32, 1 x reduce_scatter of 500 bytes of float32 in old.json",
    ),
    "a larger collective": (
        {"counters": {"collectives": [ALL_REDUCES, ["reduce_scatter", "float32", 501, 1]]}},
        "2,501 bytes in collectives, 2,500 in old.json (+1, +0.04%), and the first that differs is 1 x "
        "reduce_scatter of 501 *",
    ),
    "another order": (
        {"counters": {"collectives": [["reduce_scatter", "float32", 500, 1], ALL_REDUCES]}},
        "other collectives, as many and as large: the first that differs is 1 x reduce_scatter of 500 bytes of "
        "float32, 2 x all_reduce of 1,000 bytes of float32 in old.json",
    ),
}


@pytest.mark.parametrize("name", WORSE)
def test_what_is_slower_or_larger_fails(name: str, planted: pytest.Pytester, old: Path) -> None:
    changed, text = WORSE[name]
    result = run(planted, *OLD, "--benchmark-json=new.json", a=figures(**changed), b=figures())
    result.assert_outcomes(passed=1, failed=1)
    assert result.ret == 1
    result.stdout.fnmatch_lines([text, "slower or larger: 1", f"  test_planted.py::test_row[[]a[]]: {text}"])
    verdicts = [entry["extra_info"]["verdict"] for entry in json.loads(Path("new.json").read_text())["benchmarks"]]
    assert verdicts == ["fail", "pass"]


BETTER: dict[str, tuple[dict[str, Any], str]] = {
    "half the time": ({"ratio": 0.5}, "0.500x the time in old.json, beside theirs, *"),
    "a byte of tensors": ({"tensors": 3999}, "3,999 bytes of tensors at the peak, 4,000 in old.json (-1, -0.025%)"),
    "workspace": ({"workspace": 900}, "900 bytes of workspace at the peak, 1,000 in old.json (-100, -10%)"),
    "an operator": ({"counters": {"operators": 9}}, "9 operators, 10 in old.json (-1, -10%)"),
    "a collective": (
        {"counters": {"collectives": [ALL_REDUCES]}},
        "2 collectives, 3 in old.json (-1, -33%), and the first that differs is none, 1 x reduce_scatter of 500 *",
    ),
}


@pytest.mark.parametrize("name", BETTER)
def test_what_is_faster_or_smaller_is_named(name: str, planted: pytest.Pytester, old: Path) -> None:
    changed, text = BETTER[name]
    result = run(planted, *OLD, a=figures(**changed), b=figures())
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        ["slower or larger: 0", "faster or smaller: [1-9]", f"  test_planted.py::test_row[[]a[]]: {text}"]
    )


def test_of_many_that_are_better_ten_are_named(planted: pytest.Pytester) -> None:
    names = [f"row{i}" for i in range(12)]
    run(planted, "--benchmark-json=old.json", **{name: figures() for name in names})
    result = run(planted, *OLD, **{name: figures(tensors=1) for name in names})
    assert sum("1 bytes of tensors at the peak, 4,000" in line for line in result.outlines) == 10
    result.stdout.fnmatch_lines(["faster or smaller: 12", "  and 2 more"])


@pytest.mark.parametrize(
    "changed",
    [
        {"ratio": 1.005},
        {"workspace": 1049},
        {"counters": {"operators": None}},
        {"counters": {"library_bytecodes": 20_000}},
        {"counters": {"instructions": 10**9}},
        {"counters": {"kernels": 7}},
        {"counters": {"collectives": None}},
        {"counters": {"collectives": [ALL_REDUCE, ALL_REDUCE, ["reduce_scatter", "float32", 500, 1]]}},
    ],
    ids=[
        "less than the smallest effect",
        "workspace",
        "not counted",
        "as libraries",
        "noise",
        "not counted then",
        "no collectives",
        "as runs",
    ],
)
def test_what_does_not_matter_passes(changed: dict[str, Any], planted: pytest.Pytester, old: Path) -> None:
    result = run(planted, *OLD, a=figures(**changed), b=figures())
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(["slower or larger: 0", "faster or smaller: 0"])


def test_noise_leaves_a_row_undecided(planted: pytest.Pytester, old: Path) -> None:
    result = run(planted, *OLD, "-v", a=figures(noise=[0.8, 1.3] * 60), b=figures())
    assert result.parseoutcomes() == {"passed": 1, "undecided": 1} and result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "undecided: mine a: *x the time in old.json, beside theirs, *",
            "time: 2 rows compared, 1 undecided",
            "slowdowns over 5% are excluded in 1 row; up to *% are not in 1",
        ]
    )


UNLIKE: dict[str, tuple[dict[str, Any], str]] = {
    "no peer": ({"peer": None}, "time: 1 row compared, 1 not timed beside a peer or the load"),
    "another peer": ({"peer": "others"}, "time: 1 row compared, 1 with no other step of old.json to stand beside"),
    "another device": ({"device": "cuda"}, "memory: 1 row compared, 1 on another device or number of ranks"),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_unlike_rows_are_not_compared_and_counted(name: str, planted: pytest.Pytester, old: Path) -> None:
    changed, line = UNLIKE[name]
    result = run(planted, *OLD, a=figures(ratio=3.0, **changed), b=figures())
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines([line, "slower or larger: 0"])


def test_a_ratio_of_too_few_rounds_excludes_nothing(planted: pytest.Pytester) -> None:
    run(planted, "--benchmark-json=old.json", a=figures(noise=[1.0] * 5, fresh=False))
    result = run(planted, *OLD, "-v", a=figures())
    assert result.parseoutcomes() == {"undecided": 1}
    result.stdout.fnmatch_lines(["slowdowns over 5% are excluded in 0 rows; up to any size are not in 1"])


def test_rows_of_one_run_alone_are_counted(planted: pytest.Pytester, old: Path) -> None:
    result = run(planted, *OLD, a=None, c=figures())
    result.assert_outcomes(passed=1, skipped=1)
    rows = "other rows: 1 new, 1 of old.json not measured this time, 1 of old.json not among this run's tests"
    result.stdout.fnmatch_lines(["time: 0 rows compared", rows])


@pytest.mark.sweep
def test_a_row_is_measured_as_comparing_it_needs(project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test asks for three rounds; with --against it takes as many as a comparison needs, in three processes. Its
    plan has the bytes of the older row, as ranks that hold more are metered again.
    """
    plans: list[Plan] = []

    def noted(*args: Any, **options: Any) -> Plan:
        plans.append(Plan(*args, **options))
        return plans[-1]

    monkeypatch.setattr("shardmark.plugin.measure.Plan", noted)
    monkeypatch.setattr("shardmark.plugin.fresh.PAUSE", 0.0)
    monkeypatch.setattr("shardmark.plugin.fresh.MOST_PROCESSES", 3)
    first, _ = run_project(project, "--scale=smoke", "-k", "rounds", *OLD, "--update-baseline")
    first.assert_outcomes(passed=1)
    (older,) = json.loads(Path("old.json").read_text())["benchmarks"]
    beside = older["extra_info"]["time"]["pairs"]
    assert set(beside) == {"peer", "load"} and all(len(each["processes"]) >= 3 for each in beside.values())
    assert beside["load"]["count"] >= FEWEST_PAIRS
    test = project.path / "test_sleeps.py"
    test.write_text(test.read_text().replace('"plain", 1.0', '"plain", 20.0'))
    _, output = run_project(project, "--scale=smoke", "-k", "rounds", *OLD)
    row = output["benchmarks"][0]["extra_info"]
    assert row["verdict"] in ("fail", "undecided")  # undecided beside processes that take its core
    assert "x the time in old.json, beside slow, " in row["why"]
    assert [plan.tensors_before for plan in plans] == [None, 4000]


FOREIGN: dict[str, tuple[str, str]] = {
    "nothing written": ("", "--against old.json is not whole JSON: *"),
    "nothing": ("null", "--against old.json has no rows that a run of this suite wrote with --benchmark-json"),
    "a list": ("[1]", "--against old.json has no rows that *"),
    "no rows": ('{"benchmarks": [], "unmeasured": []}', "--against old.json has no rows that *"),
    "another suite": ('{"benchmarks": [{"fullname": "x", "extra_info": {}}]}', "--against old.json has no rows that *"),
    "deep": ("[" * 10**5, "--against old.json is not whole JSON: *"),
    "digits": ("9" * 5000, "--against old.json: Exceeds the limit *"),
}


@pytest.mark.parametrize("update", [(), ("--update-baseline",)], ids=["against", "update"])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_foreign_file_is_one_line_before_the_run(
    name: str, update: tuple[str, ...], planted: pytest.Pytester
) -> None:
    text, message = FOREIGN[name]
    (planted.path / "old.json").write_text(text)
    refused(run(planted, *OLD, *update, a=figures()), message)
    assert (planted.path / "old.json").read_text() == text


def refused(result: pytest.RunResult, message: str) -> None:
    assert result.ret == 4 and not any(result.outlines)
    assert len([line for line in result.errlines if line]) == 1
    result.stderr.fnmatch_lines([f"ERROR: {message}"])


OLDER: dict[str, Callable[[dict[str, Any]], object]] = {
    "no cores": lambda output: output["machine_info"].pop("cores"),
    "no machine": lambda output: output.pop("machine_info"),
    "no unmeasured": lambda output: output.pop("unmeasured"),
    "newer": lambda output: row(output).update(schema=99),
    "no link": lambda output: row(output).pop("link"),
    "no interval": lambda output: row(output)["time"]["pairs"]["peer"].pop("interval"),
    "half an interval": lambda output: row(output)["time"]["pairs"]["peer"].update(interval=[1.0]),
    "no number": lambda output: row(output)["memory"].update(tensors="many"),
    "nan": lambda output: row(output)["time"]["pairs"]["peer"].update(ratio=float("nan")),
    "no collective": lambda output: row(output)["counters"].update(collectives=[["all_reduce"]]),
    "no row": lambda output: output["benchmarks"][0].update(extra_info={"family": "none"}),
}


def row(output: dict[str, Any]) -> dict[str, Any]:
    return output["benchmarks"][0]["extra_info"]


@pytest.mark.parametrize("name", OLDER)
def test_an_older_file_is_one_line_before_the_run(name: str, planted: pytest.Pytester, old: Path) -> None:
    edit(old, OLDER[name])
    message = "--against old.json is of another version of this suite (*): remove it, and have --update-baseline *"
    refused(run(planted, *OLD, a=figures()), message)


@pytest.mark.parametrize("option", ["--benchmark-disable", "--benchmark-skip", "-n2"])
def test_where_nothing_is_measured_there_is_nothing_to_compare(
    option: str, planted: pytest.Pytester, old: Path
) -> None:
    refused(run(planted, *OLD, option, a=figures()), "--against needs measurements: not *")
