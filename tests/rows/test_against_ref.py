"""`--against-ref REF`: both versions run in turns, and what is slower or larger now fails."""

import tempfile
from pathlib import Path

import pytest

from tests.support.project import run_project
from tests.support.repository import commit

pytest_plugins = ["pytester", "tests.support.project"]

CHOSEN = ("--scale=smoke", "-k", "nap and greedy", "--against-ref=before")


@pytest.fixture
def versions(project: pytest.Pytester) -> Path:
    """The file of a project's naps, which has a version "before"."""
    file = project.path / "test_sleeps.py"
    file.write_text(file.read_text().replace("formula(case) // 2", "formula(case) * 3"))  # greedy is within its budget
    commit(project.path, tag="before")
    return file


def change(file: Path, old: str, new: str) -> None:
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))


def test_the_same_version_is_no_worse(
    project: pytest.Pytester, versions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    result, output = run_project(project, *CHOSEN)
    assert result.ret == 0 and not list(tmp_path.glob("shardmark-ref-*"))  # its copy is gone
    (entry,) = output["benchmarks"]
    assert entry["extra_info"]["ref"]["name"] == "before" and entry["extra_info"]["verdict"] != "fail"
    result.stdout.fnmatch_lines(
        ["against: before, commit *", "*- against before -*", "memory: 1 row compared", "slower or larger: 0"]
    )


def test_what_is_slower_now_fails(project: pytest.Pytester, versions: Path) -> None:
    change(versions, '"greedy", 1.0', '"greedy", 2.0')
    result, output = run_project(project, *CHOSEN)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*x the time that it takes in before, * interval *", "slower or larger: 1"])
    assert output["benchmarks"][0]["extra_info"]["ref"]["ratio"] == pytest.approx(2.0, rel=0.3)


def test_what_is_larger_now_fails(project: pytest.Pytester, versions: Path) -> None:
    change(versions, "torch.empty(1000)", "torch.empty(1001)")
    result, _ = run_project(project, *CHOSEN)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*4,004 bytes of tensors at the peak, 4,000 in before*"])


def test_what_that_version_does_not_have_is_not_compared(project: pytest.Pytester, versions: Path) -> None:
    change(
        versions,
        "def formula(case):",
        'register("sleep", "new", 1.0, memory=lambda case: case.nbytes)\n\n\ndef formula(case):',
    )
    result, _ = run_project(project, "--scale=smoke", "-k", "nap and new", "--against-ref=before")
    result.assert_outcomes(passed=1)
    result.stdout.fnmatch_lines(["time: 0 rows compared, 1 that before fails on (*no implementation 'new'*)"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--against-ref=nonesuch"], "--against-ref nonesuch: *"),
        (["--against-ref=before", "--benchmark-disable"], "--against-ref needs measurements: *"),
    ],
)
def test_what_cannot_be_compared_with_is_one_line(
    project: pytest.Pytester, versions: Path, arguments: list[str], message: str
) -> None:
    result, _ = run_project(project, *arguments)
    assert result.ret == pytest.ExitCode.USAGE_ERROR
    result.stderr.fnmatch_lines([f"ERROR: {message}"])
