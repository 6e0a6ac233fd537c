"""A sealed row shows whether it, or a file that it was measured with, has changed."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardmark.rows.seal import KEY, changes, sealed

ROW = {"seconds": 1.5, "losses": [0.1, 1e-17], "entry": "entry.py:make"}

LISTED = {"row": {}, "files": {"entry": ["entry.py"]}, "seal": {"by": "sha256", "digest": ""}}


@pytest.fixture
def written(tmp_path: Path) -> dict[str, Any]:
    (tmp_path / "entry.py").write_text("step = 1\n")
    return sealed(ROW, tmp_path, None, entry=[tmp_path / "entry.py"])


CHANGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a figure": lambda row: row["row"].update(seconds=1.4),
    "another field": lambda row: row["row"].update(verified=True),
    "a digest of a file": lambda row: row["files"]["entry"].update({"entry.py": "0" * 64}),
    "no files": lambda row: row["files"].clear(),
    "the seal": lambda row: row["seal"].update(digest="0" * 64),
    "letters in the seal": lambda row: row["seal"].update(digest="é"),
    "no number": lambda row: row["row"].update(seconds=float("nan")),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_row_is_noticed(change: str, written: dict[str, Any], tmp_path: Path) -> None:
    assert [*changes(written, tmp_path, None)] == []
    changed = copy.deepcopy(written)
    CHANGES[change](changed)
    assert [*changes(changed, tmp_path, None)] == ["it does not have the bytes that were sealed"]


def test_a_change_of_a_file_is_noticed(written: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "entry.py").write_text("step = 2\n")
    assert [*changes(written, tmp_path, None)] == ["the entry has changed since: entry.py"]
    (tmp_path / "entry.py").unlink()
    assert [*changes(written, tmp_path, None)] == ["the entry has changed since: entry.py"]


def test_only_who_has_the_key_can_seal(written: dict[str, Any], tmp_path: Path) -> None:
    own = sealed(ROW, tmp_path, "secret", entry=[tmp_path / "entry.py"])
    assert [*changes(own, tmp_path, "secret")] == []
    other = "it does not have the bytes that were sealed, or was sealed with another key"
    assert [*changes(own, tmp_path, "guess")] == [other]
    assert [*changes(own, tmp_path, None)] == [f"it is sealed with a key: set {KEY} to check it"]
    assert [*changes(written, tmp_path, "secret")] == [f"it is sealed without a key, and {KEY} is set"]


@pytest.mark.parametrize("text", [[], {}, {"row": {}}, {"row": {}, "files": {}, "seal": 3}, 7, LISTED])
def test_another_file_has_no_seal(text: Any, tmp_path: Path) -> None:
    assert [*changes(text, tmp_path, None)] == ["it has no seal"]
