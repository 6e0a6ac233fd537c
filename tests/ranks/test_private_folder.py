"""Folders of runs that were killed are removed by the next run; those of others are not."""

import fcntl
import os
import tempfile
import time
from pathlib import Path

import pytest

from shardmark.ranks import private_folder

OLD = time.time() - 2 * private_folder.NEW


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    private_folder.remove_abandoned.cache_clear()
    return tmp_path


def test_those_whose_process_is_gone_are_removed(temporary: Path) -> None:
    abandoned, locked, new, file = (temporary / f"shardmark-{name}" for name in ("gone", "held", "new", "rows"))
    own = private_folder.make()
    for folder in (abandoned, locked, new):
        folder.mkdir()
        (folder / "rank0.stacks").write_text("")
    file.write_text("rows")
    other = temporary / "somebody-elses"
    other.mkdir()
    lock = os.open(locked, os.O_RDONLY)
    fcntl.flock(lock, fcntl.LOCK_EX)
    for each in (own, abandoned, locked, file, other):
        os.utime(each, (OLD, OLD))
    private_folder.remove_abandoned()
    os.close(lock)
    assert {*temporary.iterdir()} == {own, locked, new, file, other}
    private_folder.remove(own)
    assert not own.exists()
