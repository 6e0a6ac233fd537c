"""`--update-baseline`: the file of `--against` becomes what the run measured, and never half of it."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.support.planted_rows import figures, run
from tests.support.planted_rows import planted as planted

pytest_plugins = ["pytester"]

UPDATE = ("--against=old.json", "--update-baseline")
OLD = Path("old.json")


def tensors() -> dict[str, int]:
    """Bytes of tensors of each row, by its name."""
    rows = [entry["extra_info"] for entry in json.loads(OLD.read_text())["benchmarks"]]
    return {row["case"]["id"]: row["memory"]["tensors"] for row in rows}


def nothing_is_left(project: pytest.Pytester) -> bool:
    return not list(project.path.glob(".old.json*"))


def test_the_first_time_the_file_is_written(planted: pytest.Pytester) -> None:
    result = run(planted, *UPDATE, a=figures(), b=figures())
    result.assert_outcomes(passed=2)
    result.stdout.fnmatch_lines(
        [
            "against: old.json, which this run is to write",
            "old.json has 2 rows of this run, and 0 of tests that were not run",
        ]
    )
    assert tensors() == {"a": 4000, "b": 4000} and nothing_is_left(planted)
    run(planted, "--against=old.json", a=figures(), b=figures()).assert_outcomes(passed=2)


def test_what_is_worse_fails_nothing_and_is_listed(planted: pytest.Pytester) -> None:
    run(planted, *UPDATE, a=figures(), b=figures())
    result = run(planted, *UPDATE, a=figures(tensors=5000, ratio=2.0), b=figures(noise=[0.8, 1.3] * 60))
    result.assert_outcomes(passed=2)
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [
            "time: 2 rows compared, 1 undecided",
            "slower or larger: 2",
            "  test_planted.py::test_row[[]a[]]: 2.000x the time in old.json, beside theirs, *",
            "  test_planted.py::test_row[[]a[]]: 5,000 bytes of tensors at the peak, 4,000 in old.json (+1,000, +25%)",
            "old.json has 2 rows of this run, and 0 of tests that were not run",
        ]
    )
    assert tensors() == {"a": 5000, "b": 4000}
    run(planted, "--against=old.json", a=figures(tensors=5000, ratio=2.0)).assert_outcomes(passed=1)


def test_a_budget_of_its_own_fails_and_the_file_is_written(planted: pytest.Pytester) -> None:
    run(planted, *UPDATE, a=figures(tensors=2 * 10**9)).assert_outcomes(failed=1)
    assert tensors() == {"a": 2 * 10**9}


def test_rows_of_tests_that_were_not_run_stay(planted: pytest.Pytester) -> None:
    names = ("a", "b", "c")
    run(planted, *UPDATE, **{name: figures() for name in names})
    result = run(planted, *UPDATE, "test_planted.py::test_row[b]", **{name: figures(tensors=1) for name in names})
    result.stdout.fnmatch_lines(["old.json has 1 row of this run, and 2 of tests that were not run"])
    assert tensors() == {"a": 4000, "b": 1, "c": 4000}


def test_rows_of_another_machine_do_not_stay(planted: pytest.Pytester) -> None:
    run(planted, *UPDATE, a=figures(), b=figures())
    output = json.loads(OLD.read_text())
    output["machine_info"]["torch"] = "1.0"
    OLD.write_text(json.dumps(output))
    result = run(planted, *UPDATE, b=figures(tensors=5000))
    result.stdout.fnmatch_lines(
        ["time is not compared: old.json is of *", "slower or larger: 1", "old.json has 1 row *"]
    )
    assert tensors() == {"b": 5000}


ENDED: dict[str, tuple[str, tuple[str, ...], int]] = {
    "interrupted": ("request.session.shouldstop = 'as by Ctrl-C'", (), 2),
    "exit": ("__import__('pytest').exit('enough', returncode=0)", (), 0),
    "first failure": ("assert False", ("-x",), 1),
}


@pytest.mark.parametrize("name", ENDED)
def test_a_run_that_ends_early_leaves_it(name: str, planted: pytest.Pytester) -> None:
    run(planted, *UPDATE, a=figures())
    body, options, status = ENDED[name]
    planted.makepyfile(test_then=f"def test_then(request): {body}\n\ndef test_last(): ...")
    result = run(planted, *UPDATE, *options, a=figures(tensors=1))
    assert result.ret == status
    result.stdout.fnmatch_lines(["faster or smaller: 1", "*old.json is as it was: the run ended before its last test"])
    assert tensors() == {"a": 4000} and nothing_is_left(planted)


@pytest.mark.parametrize("options", [("-k", "nothing"), ("--collect-only",), ()], ids=["none", "collected", "skipped"])
def test_a_run_that_measures_nothing_leaves_it(options: tuple[str, ...], planted: pytest.Pytester) -> None:
    run(planted, *UPDATE, a=figures())
    before = OLD.read_bytes()
    run(planted, *UPDATE, *options, a=None).stdout.fnmatch_lines(["old.json is as it was: nothing was measured"])
    assert OLD.read_bytes() == before and nothing_is_left(planted)
    OLD.unlink()
    run(planted, *UPDATE, *options, a=None)
    assert not OLD.exists() and nothing_is_left(planted)


def test_where_it_cannot_be_written_it_stays_and_the_run_does_not_pass(
    planted: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(planted, *UPDATE, a=figures())

    def full(*args: Any) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        result = run(planted, *UPDATE, a=figures(tensors=1))
    assert result.ret == 1
    result.stdout.fnmatch_lines(["old.json is as it was: OSError: *No space left on device"])
    assert tensors() == {"a": 4000} and nothing_is_left(planted)
