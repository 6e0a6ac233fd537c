"""CONTRIBUTING.md's recipes, followed line by line in a copy of the checkout."""

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from correctness.support.paths import ROOT
from tests.support.runs import environment_of_a_run

ADDED = {"technique": "log_softmax", "family": "naive", "question": "chunked"}
"""By recipe of examples/adding/, what it adds: part of the id of a test that the recipe runs."""

NEEDED = ("impl", "shardmark", "correctness/support", "correctness/engine", "correctness/loss", "perf")
FILES = ("conftest.py", "correctness/conftest.py", "pytest.ini")


def recipe(title: str) -> list[str]:
    """The numbered lines of "Add a ..."."""
    section = (ROOT / "CONTRIBUTING.md").read_text().partition(f"\n## Add a {title}\n")[2].partition("\n## ")[0]
    return re.findall(r"^\d\. .+(?:\n   .+)*", section, re.MULTILINE)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of what runs one family."""
    for folder in NEEDED:
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in FILES:
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def run(copy: Path, command: str) -> str:
    """Run a command of the recipe in the copy; it must pass. Returns its output."""
    pytest_, *arguments = shlex.split(command)
    assert pytest_ == "pytest"
    pytest_here = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--device=cpu", "-n0", "-v"]
    environment = environment_of_a_run(PYTHONPATH=None)
    done = subprocess.run([*pytest_here, *arguments], cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("title", [*ADDED, "field of a row"])
def test_a_recipe_has_five_lines(title: str) -> None:
    assert len(recipe(title)) == 5


@pytest.mark.parametrize("title", ADDED)
def test_a_recipe_names_the_files_that_its_example_has(title: str) -> None:
    example = ROOT / "examples" / "adding" / title
    files = {str(path.relative_to(example)) for path in example.rglob("*.py")}
    assert files and {name for name in re.findall(r"`([^`]+\.py)`", " ".join(recipe(title))) if "/" in name} == files


@pytest.mark.sweep
@pytest.mark.parametrize(("title", "name"), ADDED.items())
def test_a_recipe_works_as_it_stands(title: str, name: str, copy: Path) -> None:
    example = ROOT / "examples" / "adding" / title
    taken = [path for path in example.rglob("*.py") if (copy / path.relative_to(example)).exists()]
    assert taken == [], "the example adds files and changes none"
    shutil.copytree(example, copy, dirs_exist_ok=True)
    commands = re.findall(r"`(pytest [^`]+)`", recipe(title)[-1])
    assert commands
    for command in commands:
        output = run(copy, command)
        assert " passed" in output and f"[{name}" in output
