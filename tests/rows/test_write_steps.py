"""Wherever writing a row stops, the file has the rows before it and is whole."""

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardmark.rows.atomic_json import GrowingFile, RowFileError
from tests.support.steps import Steps, no_space

ROW = ["text " * 2_000]
"""Longer than a page of memory, so that a write may end within it."""
LAST = 5


def write_rows(path: Path, done: Path) -> Iterator[int]:
    """Write rows, every third without times. Yields how many there are, which the file `done` says too."""
    file = GrowingFile(path)
    for count in range(1, LAST + 1):
        file.append({"version": 1}, *lists_with(count), count=count)
        done.write_text(str(count))
        yield count
    file.replace(json.dumps({"version": 1, "benchmarks": numbers(path), "unmeasured": []}))
    file.close()


def lists_with(count: int, *more: str) -> tuple[list[str], list[str]]:
    """The row of that number, with times or without."""
    row = [json.dumps([count, *ROW, *more])]
    return ([], row) if count % 3 == 0 else (row, [])


def numbers(path: Path) -> list[int]:
    lists = json.loads(path.read_text())
    rows = [*lists["benchmarks"], *lists["unmeasured"]]
    return sorted(row if isinstance(row, int) else row[0] for row in rows)


@pytest.fixture
def all_steps(tmp_path: Path) -> range:
    folder = tmp_path / "counted"
    folder.mkdir()
    with Steps().watched() as steps:
        assert list(write_rows(folder / "out.json", folder / "done")) == list(range(1, LAST + 1))
    return range(steps.count)


def test_a_run_that_is_killed_at_any_step_keeps_every_row_that_was_written(tmp_path: Path, all_steps: range) -> None:
    """And the next run on that file takes over what it left."""
    assert len(all_steps) > 6 * LAST
    for step in all_steps:
        folder = tmp_path / str(step)
        folder.mkdir()
        path, done = folder / "out.json", folder / "done"
        done.write_text("0")
        if (child := os.fork()) == 0:
            with Steps(step, lambda: os.kill(os.getpid(), signal.SIGKILL)).watched():
                list(write_rows(path, done))
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        written = int(done.read_text())
        found = numbers(path) if path.exists() else []
        assert found == list(range(1, len(found) + 1)) and len(found) >= written, step
        assert list(write_rows(path, done)) == list(range(1, LAST + 1))
        assert sorted(each.name for each in folder.iterdir()) == ["done", "out.json"], step


def test_an_error_at_any_step_leaves_the_rows_before_and_the_next_attempt_adds_the_row(
    tmp_path: Path, all_steps: range
) -> None:
    for step in all_steps:
        folder = tmp_path / str(step)
        folder.mkdir()
        path = folder / "out.json"
        with Steps(step, no_space).watched():
            try:
                file = GrowingFile(path)
            except RowFileError:
                assert not list(folder.iterdir())
                continue
            for count in range(1, LAST + 1):
                try:
                    file.append({"version": 1}, *lists_with(count, "longer than the next attempt"), count=count)
                except OSError:
                    assert (numbers(path) if path.exists() else []) == list(range(1, count))
                    file.append({"version": 1}, *lists_with(count), count=count)
                assert numbers(path) == list(range(1, count + 1)) and file.is_whole(count), step
            try:
                file.replace('{"benchmarks": [], "unmeasured": [7]}')
            except OSError:
                assert numbers(path) == list(range(1, LAST + 1)) and file.is_whole(LAST)
            file.close()
        assert [each.name for each in folder.iterdir()] == ["out.json"], step


@pytest.mark.parametrize("without", ["moved away", "replaced", "partial removed", "no links"])
def test_what_others_do_to_the_file_meanwhile_costs_no_row(
    without: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, elsewhere = tmp_path / "out.json", tmp_path / "elsewhere.json"
    for count in write_rows(path, tmp_path / "done"):
        assert numbers(path) == list(range(1, count + 1))
        if without == "moved away":
            path.rename(elsewhere)
        elif without == "replaced":
            elsewhere.write_text("another program's")
            os.replace(elsewhere, path)
        elif without == "partial removed":
            (tmp_path / ".out.json.partial").unlink(missing_ok=True)
        else:
            monkeypatch.setattr(os, "link", lambda *_: no_space())
        if count == LAST:
            break
    if without == "moved away":
        assert numbers(elsewhere) == list(range(1, LAST + 1))
