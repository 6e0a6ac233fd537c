"""The repository of `examples/team`: what its workflow runs, from an empty branch to a wanted increase."""

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from correctness.support.paths import ROOT
from tests.support.repository import git
from tests.support.runs import environment_of_a_run

TEAM = ROOT / "examples" / "team"
WORKFLOW = Path(".github/workflows/perf.yml")
INSTALLS = "pip install -r requirements.txt"
"""The one step that is not played: this checkout and its libraries are installed."""
SMALL = "-p shardmark.plugin -p no:cacheprovider --device cpu --scale smoke --benchmark-max-time 0.01"
LARGER = ("parts: int = 4", "parts: int = 2")
"""In the step and in its formula: two parts need more memory at a time than four."""
CHANGED = "in_micro_batches or not at_once"
"""For -k: the rows that the change is in, and all tests."""
WANTED = '["*test_step[in_micro_batches*"]\nmemory = 1.7\ncounters = 2\nwhy = "two parts in place of four"\n'


def steps(workflow: Path) -> list[str]:
    """The commands of the workflow's steps, each of one line."""
    return re.findall(r"^ +(?:- )?run: (.+)$", workflow.read_text(), re.MULTILINE)


@dataclass(frozen=True)
class Played:
    """The job's end: whether a step failed, all that was printed, and the summary that the pull request shows."""

    green: bool
    output: str
    summary: str

    @property
    def lead(self) -> str:
        """The report's first sentence."""
        return next(line for line in self.summary.splitlines() if line.startswith("**"))


def play(repository: Path, chosen: str = "test") -> Played:
    """Run the steps in order, as GitHub does: those after a failed one only if they always run. `chosen` is -k for
    rows and tests."""
    summary = repository.parent / "summary.md"
    summary.unlink(missing_ok=True)
    for left in ("new.json", "new.md"):  # a job starts in a fresh checkout
        (repository / left).unlink(missing_ok=True)
    environment = environment_of_a_run(
        GITHUB_BASE_REF="main",
        GITHUB_STEP_SUMMARY=str(summary),
        PYTEST_ADDOPTS=f"{SMALL} -k '{chosen}'",
        PATH=f"{Path(sys.executable).parent}:/usr/bin:/bin",
    )
    green, output = True, ""
    for command in steps(repository / WORKFLOW):
        if command == INSTALLS or not (green or "GITHUB_STEP_SUMMARY" in command):
            continue
        done = subprocess.run(
            ["bash", "-e", "-c", command], cwd=repository, env=environment, capture_output=True, text=True
        )
        green &= done.returncode == 0
        output += f"$ {command}\n{done.stdout}{done.stderr}"
    return Played(green, output, summary.read_text() if summary.exists() else "")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository whose main branch has a file to read and nothing else, and a branch with the team's files."""
    folder = tmp_path / "team"
    folder.mkdir()
    (folder / "README.md").write_text("Our training step.\n")
    git(folder, "init", "-q", "-b", "main")
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "start")
    merged(folder)
    git(folder, "checkout", "-qb", "first")
    shutil.copytree(TEAM, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache"))
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", "first")
    return folder


def merged(folder: Path) -> None:
    """The branch becomes the one that pull requests are for."""
    git(folder, "update-ref", "refs/remotes/origin/main", "HEAD")


def test_every_step_is_read_and_what_is_installed_is_this_project(repository: Path) -> None:
    assert steps(repository / WORKFLOW)[0] == INSTALLS
    assert len(steps(repository / WORKFLOW)) == (repository / WORKFLOW).read_text().count("run:")
    name = re.search(r'^name = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert name is not None and (repository / "requirements.txt").read_text().startswith(f"{name[1]}[page]")


@pytest.mark.sweep
def test_the_workflow_gates_from_the_first_pull_request_on(repository: Path) -> None:
    first = play(repository)
    assert first.green, first.output
    assert re.match(r"\*\*Nothing was compared with origin/main \([0-9a-f]{10}\)\.\*\*", first.lead)
    assert "that origin/main fails on" in first.summary
    merged(repository)

    (repository / "README.md").write_text("Our training step, and what it costs.\n")
    git(repository, "commit", "-qam", "the same code")
    equal = play(repository)
    assert equal.green, equal.output
    assert re.match(r"\*\*Nothing slower or larger than origin/main \(\w+\): 2 rows compared in time, mem", equal.lead)

    training = repository / "training.py"
    text = training.read_text()
    assert text.count(LARGER[0]) == 2
    training.write_text(text.replace(*LARGER))
    git(repository, "commit", "-qam", "two parts")
    red = play(repository, CHANGED)
    assert not red.green, red.output
    assert re.match(r"\*\*Slower or larger than origin/main \(\w+\): 2 figures; 1 row compared in time, m", red.lead)
    row = r"^\| test_step.py::test_step\\\[in_micro_batches-\S+ \| bytes of tensors at the peak \| \S+ \| \S+ \| \+66"
    assert re.search(row, red.summary, re.MULTILINE), red.summary

    accepted = repository / "perf" / "accepted.toml"
    accepted.write_text(accepted.read_text() + WANTED)
    git(repository, "commit", "-qam", "two parts are wanted")
    wanted = play(repository, CHANGED)
    assert wanted.green, wanted.output
    assert re.match(r"\*\*Nothing slower or larger than origin/main .*; 2 figures accepted", wanted.lead)
    assert re.search(r"at the peak \| \S+ \| \S+ \| \+66.* \| two parts in place of four \|$", wanted.summary, re.M)
    merged(repository)

    (repository / "budgets.toml").write_text('["*test_step*"]\nbytes = 1_000_000\n')
    over = play(repository, CHANGED)
    assert not over.green and 'over the 1,000,000 of "*test_step*"' in over.output, over.output
    assert over.lead.startswith("**Nothing slower or larger than origin/main")
    assert "was accepted in an earlier change, and accepts nothing now: remove it" in over.output
