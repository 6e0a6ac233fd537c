"""A run's file is read, or refused in one line that says what is wrong with it."""

import gzip
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from shardmark.rows.reader import LARGEST, RunFileError, read_run
from shardmark.rows.row import SCHEMA


def entry(**changes: Any) -> dict[str, Any]:
    """An entry with the least that a row has, some of it changed."""
    row = {section: {} for section in ("memory", "time", "work", "limit", "counters")} | {
        "schema": SCHEMA,
        "family": "naps",
        "implementation": "short",
        "case": {"id": "1s"},
        "world_size": 1,
    }
    stats = {"median": 1.0, "q1": 0.9, "q3": 1.1}
    return {"name": "test_nap", "fullname": "test_naps.py::test_nap", "stats": stats, "extra_info": row | changes}


def output(*entries: dict[str, Any]) -> dict[str, Any]:
    """A run's file with these entries, before it is written as JSON."""
    return {"machine_info": {"device": "cpu"}, "unmeasured": [], "benchmarks": list(entries)}


def test_somebody_elses_benchmarks_are_left_out(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(output(entry(), {"name": "theirs", "extra_info": {}})))
    assert [each["name"] for each in read_run(file)["benchmarks"]] == ["test_nap"]


REFUSED = {
    "truncated": (json.dumps(output(entry()))[:-9], "is not whole JSON: "),
    "no text": ("\udcff", "is not whole JSON: "),
    "nothing": ("null", "has no rows that a run of this suite wrote with --benchmark-json"),
    "a text": ('"benchmarks"', "has no rows that "),
    "no rows": (json.dumps(output()), "has no rows that "),
    "another suite": (json.dumps(output({"name": "theirs", "extra_info": {}})), "has no rows that "),
    "a list of rows": (json.dumps(output({"name": "theirs", "extra_info": ["family"]})), "has no rows that "),
    "older": (json.dumps(output(entry(case="1s"))), "is of another version of this suite, its rows without case"),
    "newer": (
        json.dumps(output(entry(), entry(schema=99))),
        f"is of another version of this suite, its rows without schema {SCHEMA} (it has 99)",
    ),
    "without ids": (json.dumps(output(entry(case={}))), "of another version of this suite, its rows without case.id"),
    "no machine": (json.dumps(output(entry()) | {"machine_info": None}), "version of this suite, without machine_info"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_run_is_refused_in_one_line(name: str, tmp_path: Path) -> None:
    text, reason = REFUSED[name]
    file = tmp_path / "run.json"
    file.write_text(text, errors="surrogateescape")
    with pytest.raises(RunFileError) as refused:
        read_run(file)
    assert str(refused.value).startswith(str(file)) and reason in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_compressed_file_that_would_fill_the_memory_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.json.gz"
    with gzip.open(file, "wb") as bomb:
        for _ in range(200):
            bomb.write(bytes(2**20))
    tracemalloc.start()
    with pytest.raises(RunFileError, match=r"run\.json\.gz: it has more than 128 MiB of JSON, and a run has a few$"):
        read_run(file)
    assert tracemalloc.get_traced_memory()[1] < 2.5 * LARGEST
    tracemalloc.stop()


def test_a_name_that_nobody_could_read_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text(json.dumps(output(entry() | {"fullname": "x" * 10**7})))
    with pytest.raises(RunFileError, match=r"has a test whose name is 10,000,000 characters long$"):
        read_run(file)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.json", tmp_path / "a\0b"):
        with pytest.raises(RunFileError, match=r"Is a directory|No such file|null byte"):
            read_run(path)
