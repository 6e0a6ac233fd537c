"""A row that got larger says what grew: operators with the user's lines, functions, and the blocks at the peak."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.project import make_project, run_project
from tests.support.runs import CONFTEST

pytest_plugins = ["pytester", "tests.support.project"]

MINE = """
import torch

def looped(x):
    for i in range(1000):
        pass
    return x

def step(weight):
    x = torch.mul(weight, 2)
    return looped(x).sum()
"""

ROWS = """
from dataclasses import dataclass
import pytest
import torch
from shardmark.api import Grid, Work
from shardmark.api.registry import Family, add_family, register

class Contract: ...

@dataclass(frozen=True)
class Case:
    dtype: str = "float32"

    def __str__(self):
        return "small"

class Steps:
    backend = "none"

    def __init__(self, implementation, case, device):
        import mine
        self.mine, self.weight = mine, torch.ones(1000, requires_grad=True)

    def prepare(self):
        self.weight.grad = None

    def step(self, mark):
        loss = self.mine.step(self.weight)
        mark("forward")
        loss.backward()
        mark("backward")

add_family(Family("steps", Contract, reference="plain", check=lambda target, device: None))
register("steps", "plain", None, memory=lambda case: 10**6)

@pytest.mark.family("steps")
@pytest.mark.cases(Grid(smoke=[Case()], laptop=[], paper=[]))
def test_step(implementation, case, measure):
    measure(Steps, implementation, case, work=Work(flops=1))
"""


@pytest.fixture
def steps(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A project whose step is in mine.py, and a baseline of it."""
    project = make_project(pytester, monkeypatch, CONFTEST, test_steps=ROWS, mine=MINE)
    again(project).assert_outcomes(passed=1)
    (project.path / "out.json").rename(project.path / "old.json")
    return project


def again(project: pytest.Pytester, *arguments: str, **changed: str) -> pytest.RunResult:
    """A run, with the text on the left of mine.py replaced."""
    text = MINE.lstrip()
    for old, new in changed.items():
        assert REPLACED[old] in text
        text = text.replace(REPLACED[old], new)
    (project.path / "mine.py").write_text(text)
    return run_project(project, "--scale=smoke", "-p", "no:cacheprovider", *arguments)[0]


REPLACED = {"loop": "range(1000)", "product": "    x = torch.mul(weight, 2)\n"}
OLD = "--against=old.json"


def test_the_same_code_is_the_same(steps: pytest.Pytester) -> None:
    result = again(steps, OLD)
    assert result.ret == 0  # its time may be undecided
    result.stdout.fnmatch_lines(["counters: 1 row compared", "slower or larger: 0"])


def test_a_slowdown_of_python_alone_by_1_percent_fails_and_names_the_function(steps: pytest.Pytester) -> None:
    # The file gets another length, as Python's cache of bytecode compares a file's size and second alone.
    result = again(steps, OLD, loop="range(1000 + 10)")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "* bytecodes, * in old.json (+*, +*%)",
            "* more: mine.py:looped",
            "slower or larger: 1",
            "  test_steps.py::test_step*: * bytecodes, * in old.json (+*)",
            "    * more: mine.py:looped",
        ]
    )


TWICE = "    x = torch.mul(torch.mul(weight, 2), 2)\n"


def test_an_operator_is_named_with_its_lines_forward_and_backward(steps: pytest.Pytester) -> None:
    result = again(steps, OLD, product=TWICE)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["2 more: aten::mul, now 2 in mine.py:9, 2 in backward of mine.py:9"])
    row: dict[str, Any] = json.loads(Path("out.json").read_text())["benchmarks"][0]["extra_info"]
    assert row["counters"]["operators_by_name"]["aten::mul"] == 4


def test_bytes_have_the_table_of_blocks(steps: pytest.Pytester) -> None:
    result = again(steps, OLD, product="    x = torch.cat([weight, weight])\n")
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "* bytes of tensors at the peak, * in old.json (+*, +*%)*",
            "what was found there *blocks *MiB  where",
            "aten::cat * mine.py:9",
        ]
    )
