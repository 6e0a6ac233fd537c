"""The file of rows: whole at any moment, whatever happens to the disk, the folder or the run."""

import json
import os
import time
from pathlib import Path

import pytest

from shardmark.rows.atomic_json import GrowingFile, RowFileError


def add(file: GrowingFile, count: int, unmeasured: tuple[int, ...] = ()) -> None:
    file.append({"version": 1}, [json.dumps({"row": count})], list(map(json.dumps, unmeasured)), count=count)


def rows_of(path: Path) -> list[int]:
    return [entry["row"] for entry in json.loads(path.read_text())["benchmarks"]]


def test_it_is_whole_json_after_each_row(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    file = GrowingFile(path)
    assert not path.exists()
    file.append({"version": 1}, [], ["0"], count=1)  # a row without times alone
    assert json.loads(path.read_text()) == {"version": 1, "benchmarks": [], "unmeasured": [0]}
    for count in range(1, 5):
        add(file, count, unmeasured=(count, -count) if count % 2 else ())
        assert rows_of(path) == list(range(1, count + 1))
        assert json.loads(path.read_text())["unmeasured"] == [0, 1, -1, 3, -3][: 1 + 2 * ((count + 1) // 2)]
    file.close()
    assert [each.name for each in tmp_path.iterdir()] == ["out.json"]


def test_a_full_disk_leaves_the_rows_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A write that ends early, at any byte of a row."""
    path, room = tmp_path / "out.json", 10**6
    write = os.pwrite

    def limited(descriptor: int, data: bytes, offset: int) -> int:
        fits = data[: max(0, room - offset)]
        if not fits:
            raise OSError(28, "No space left on device")
        return write(descriptor, fits, offset)

    monkeypatch.setattr(os, "pwrite", limited)
    file = GrowingFile(path)
    add(file, 1)
    whole = path.stat().st_size
    for more in range(len('\n{"row": 2},')):
        room = whole + more
        with pytest.raises(OSError, match="No space left"):
            add(file, 2)
        assert rows_of(path) == [1]
    room = 10**6
    add(file, 2)
    assert rows_of(path) == [1, 2]


def test_an_older_file_stays_until_the_first_row(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.write_text("older")
    GrowingFile(path).close()
    assert path.read_text() == "older" and len(list(tmp_path.iterdir())) == 1


def test_a_link_stays_one(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    file = GrowingFile(link)
    add(file, 1)
    file.replace(target.read_text())
    assert link.is_symlink() and rows_of(target) == [1]


def test_what_another_user_may_have_put_under_the_hidden_name_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("text")
    (tmp_path / ".out.json.partial").symlink_to("precious")
    with pytest.raises(RowFileError, match=r"^--benchmark-json .*out\.json: Too many levels of symbolic links$"):
        GrowingFile(tmp_path / "out.json")
    assert (tmp_path / "precious").read_text() == "text"


def test_an_older_files_mode_stays(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    path.touch(0o604)
    file = GrowingFile(path)
    for count in range(1, 4):
        add(file, count)
        assert path.stat().st_mode & 0o777 == 0o604
    file.replace("{}")
    file.close()
    assert path.stat().st_mode & 0o777 == 0o604


def test_what_is_no_regular_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    wrong = {
        tmp_path: "Is a directory",
        tmp_path / "fifo": "not a regular file",
        Path("/dev/null"): "not a regular file",
    }
    wrong |= {tmp_path / "none" / "out.json": "there is no folder"}
    for path, why in wrong.items():
        with pytest.raises(RowFileError, match=f"^--benchmark-json {path}: {why}"):
            GrowingFile(path)
    assert Path("/dev/null").is_char_device()


def test_a_second_run_on_the_same_file_is_refused_at_any_time(tmp_path: Path) -> None:
    first = GrowingFile(tmp_path / "out.json")
    for _ in range(2):  # before its first row, and after it
        with pytest.raises(RowFileError, match="another run is writing it"):
            GrowingFile(tmp_path / "out.json")
        add(first, 1)
    GrowingFile(tmp_path / "another.json").close()
    first.close()
    GrowingFile(tmp_path / "out.json").close()
    assert rows_of(tmp_path / "out.json") == [1, 1]


@pytest.mark.parametrize(
    "unmeasured",
    [
        pytest.param(0, id="none", marks=pytest.mark.sweep),
        pytest.param(1, id="all", marks=pytest.mark.sweep),
        pytest.param(2, id="every_second"),
    ],
)
def test_a_row_costs_its_own_size(unmeasured: int, tmp_path: Path) -> None:
    file = GrowingFile(tmp_path / "out.json")
    row = json.dumps({"row": 1, "data": list(range(500))})
    start = time.process_time()
    for count in range(5_000):
        lists = ([], [row]) if unmeasured and count % unmeasured == 0 else ([row], [])
        file.append({}, *lists, count=count + 1)
    assert time.process_time() - start < 5
    output = json.loads((tmp_path / "out.json").read_text())
    assert len(output["benchmarks"]) + len(output["unmeasured"]) == 5_000
