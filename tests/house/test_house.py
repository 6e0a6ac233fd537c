"""The house: which room may know of which, and what it takes to add an implementation or a family."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from correctness.support.paths import ROOT

OF_THE_INSTRUMENTS = {"shardmark.api.registry", "shardmark.api.grid", "shardmark.ranks.machine"}
"""What implementations use: the registry, the plain data of a grid, and what a machine lacks."""


def imported(folder: str) -> Iterator[tuple[str, str]]:
    """Each file of a folder with each module that it imports."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                yield str(path.relative_to(ROOT)), name


def test_the_instruments_import_nothing_of_what_they_measure() -> None:
    rooms = ("impl", "correctness", "perf")
    assert [pair for pair in imported("shardmark") if pair[1].partition(".")[0] in rooms] == []


def test_implementations_import_of_the_instruments_only_the_registry_and_plain_data() -> None:
    instruments = [(file, name) for file, name in imported("impl") if name.startswith("shardmark")]
    assert instruments and {name for _, name in instruments} <= OF_THE_INSTRUMENTS


def test_tests_import_nothing_out_of_files_of_tests() -> None:
    tests = [(file, name) for folder in ("correctness", "perf") for file, name in imported(folder) if ".test_" in name]
    assert tests == []


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A copy of the part of the checkout that runs an implementation, and of the loss's tests."""
    for folder in ("impl", "shardmark", "correctness/support", "correctness/loss", "perf/workloads"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("conftest.py", "correctness/conftest.py", "pytest.ini"):
        shutil.copy(ROOT / file, tmp_path / file)
    return tmp_path


def run(copy: Path, *arguments: str) -> str:
    """What pytest prints in the copy; it must pass."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--device=cpu", "-n0", *arguments]
    environment = os.environ | {"PYTHONPATH": ""}
    environment.pop("PYTEST_XDIST_WORKER", None)  # or pytest-benchmark disables itself in there
    done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


IMPLEMENTATION = '''
"""The cross entropy by PyTorch's own function."""

import torch
from torch.nn.functional import cross_entropy

from impl.loss.accounting import eager_peak
from shardmark.api.registry import Race, Unsupported, register


def library_loss(hidden, weight, targets, *, ignore_index=-100, label_smoothing=0.0, z_loss=0.0):
    if z_loss:
        raise Unsupported("it has no z_loss")
    logits = hidden @ weight.T
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return cross_entropy(logits, targets, ignore_index=ignore_index, reduction="mean")


register("loss", "in_one_file", library_loss, memory=eager_peak, time=Race("eager"))
'''


@pytest.mark.sweep
def test_to_add_an_implementation_is_one_file(copy: Path) -> None:
    (copy / "impl/loss/in_one_file.py").write_text(IMPLEMENTATION)
    output = run(copy, "correctness/loss/test_loss.py", "-v", "-k", "in_one_file and non_contiguous")
    assert "[in_one_file-" in output and " passed" in output
    lines = run(copy, "--implementations").splitlines()
    loss = lines[lines.index("loss (reference: eager)") :]
    assert any(line.split() == ["in_one_file", "runs", "here"] for line in loss)


FAMILY = {
    "impl/softmax/__init__.py": '"""Softmax over the last dimension."""\n',
    "impl/softmax/contract.py": '''
from typing import Protocol

from impl.softmax.accounting import peak
from shardmark.api.registry import Family, Race, add_family


class Softmax(Protocol):
    """`softmax(x)`, of x's shape and dtype."""


FAMILY = add_family(Family("softmax", Softmax, "plain", lambda target, device: None, memory=peak, time=Race("plain")))
''',
    "impl/softmax/cases.py": """
from dataclasses import dataclass


@dataclass(frozen=True)
class SoftmaxCase:
    elements: int
    dtype: str = "float32"

    def __str__(self):
        return f"{self.elements}-{self.dtype}"
""",
    "impl/softmax/accounting.py": '''
def peak(case):
    """The input, its exponential, and their quotient."""
    return 3 * 4 * case.elements + 4
''',
    "impl/softmax/plain.py": """
from impl.softmax.accounting import peak
from shardmark.api.registry import register


def softmax(x):
    exponential = x.exp()
    return exponential / exponential.sum()


register("softmax", "plain", softmax, memory=peak)
""",
    "correctness/softmax/test_softmax.py": """
import pytest
import torch


@pytest.mark.family("softmax")
def test_sums_to_one(implementation, device):
    torch.testing.assert_close(implementation.target(torch.ones(8, device=device)).sum().item(), 1.0)
""",
    "perf/test_softmax.py": '''
"""What does softmax cost?"""

import pytest
import torch

from impl.softmax.cases import SoftmaxCase
from shardmark.api.grid import Grid, Work

CASES = Grid(smoke=[SoftmaxCase(1000)], laptop=[SoftmaxCase(100_000)], paper=[])


class SoftmaxStep:
    backend = "torch"

    def __init__(self, implementation, case, device):
        self.softmax, self.x = implementation.target, torch.randn(case.elements, device=device)

    def prepare(self):
        pass

    def step(self, mark):
        self.softmax(self.x)
        mark("forward")


@pytest.mark.family("softmax")
@pytest.mark.question("What does softmax cost?")
@pytest.mark.cases(CASES)
def test_softmax(implementation, case, measure):
    row = measure(SoftmaxStep, implementation, case, work=Work(flops=3 * case.elements))
    assert row["memory"]["tensors"] == row["memory"]["formula"]
''',
}


@pytest.mark.sweep
def test_to_add_a_family_is_one_folder_and_its_tests(copy: Path) -> None:
    for name, text in FAMILY.items():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        (copy / name).write_text(text)
    output = run(copy, "correctness/softmax", "perf/test_softmax.py", "--scale=smoke")
    assert " 2 passed" in output and "\nWhat does softmax cost?  plain " in output
