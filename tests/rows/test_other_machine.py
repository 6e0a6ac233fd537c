"""`--against` a file of another machine: times are refused; the last lines name all that is not compared."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.planted_rows import figures, run
from tests.support.planted_rows import planted as planted

pytest_plugins = ["pytester", "tests.support.project"]

OLD = ("--against=old.json",)


@pytest.fixture
def old(planted: pytest.Pytester) -> Path:
    """The file of a run on rows a and b."""
    run(planted, "--benchmark-json=old.json", a=figures(), b=figures()).assert_outcomes(passed=2)
    return planted.path / "old.json"


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    output = json.loads(path.read_text())
    change(output)
    path.write_text(json.dumps(output))


MACHINES: dict[str, Callable[[dict[str, Any]], object]] = {
    "torch": lambda info: info.update(torch="1.0"),
    "processor": lambda info: info.update(cpu={"brand_raw": "Z80"}),
    "cores": lambda info: info.update(cores=999),
    "threads": lambda info: info.update(threads=998),
    "scheduling": lambda info: info.update(scheduling="SCHED_RR"),
    "gpu": lambda info: info.update(gpus=["NVIDIA H100"]),
    "generation": lambda info: info["cpu"].update(family=25, model=1, stepping=1),
    "part of Arm": lambda info: info.update(cpu_part="0x41 0x3 0xd0c 1"),
    "python": lambda info: info.update(python_version="3.99.1"),
}


@pytest.mark.parametrize("what", MACHINES)
def test_times_of_another_machine_are_refused_and_bytes_compared(
    what: str, planted: pytest.Pytester, old: Path
) -> None:
    edit(old, lambda output: MACHINES[what](output["machine_info"]))
    rows = {"a": figures(ratio=9.0, workspace=10**6), "b": figures(tensors=4001), "c": figures()}
    result = run(planted, *OLD, "--color=yes", **rows)
    result.assert_outcomes(passed=2, failed=1)
    refused = [line for line in result.outlines if "time is not compared: old.json is of " in line]
    assert len(refused) == 2 and all(line.startswith("\x1b[31m") for line in refused)  # first and last, in red
    then, now = refused[0].removesuffix("\x1b[0m").split(" is of ")[1].split("; this is ")
    assert len(set(then.split(", ")) ^ set(now.split(", "))) in (1, 2)
    result.stdout.fnmatch_lines(
        [
            "time: 0 rows compared, 2 on another machine",
            "memory: 2 rows compared, without workspace (on another machine)",
            "counters: 2 rows compared, without operators and bytecodes (on another machine)",
        ]
    )


def test_a_file_that_does_not_say_how_ranks_were_scheduled_is_of_the_default(
    planted: pytest.Pytester, old: Path
) -> None:
    edit(old, lambda output: output["machine_info"].pop("scheduling"))
    run(planted, *OLD, a=figures(), b=figures(), c=figures()).stdout.fnmatch_lines(["time: 2 rows compared*"])
