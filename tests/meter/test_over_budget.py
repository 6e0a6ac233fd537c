"""A failed memory budget shows the formula's terms at the peak, and the blocks that were live there."""

import copy
import inspect

import pytest
import torch
from torch import Tensor, nn

from correctness.support.metering import plan_of
from shardmark.api.registry import Implementation
from shardmark.api.workload import Mark
from shardmark.meter.at_peak import blocks_at_peak
from shardmark.meter.over_budget import Held, excess_lines
from tests.support.project import row_of, run_project

pytest_plugins = ["pytester", "tests.support.project"]

FILE = "tests/meter/test_over_budget.py"


class Doubled(nn.Module):
    """Takes 400 bytes and saves nothing for backward, but allocates 800 bytes more in forward."""

    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([x, x])
        return both[:100] + both[100:]


class Step:
    """Forward and backward of 100 values; its peak is in backward, where each half of the gradient is padded."""

    backend = "torch"

    def __init__(self, implementation: Implementation, case: object, device: str) -> None:
        self.model, self.x = Doubled(), torch.ones(100, device=device, requires_grad=True)
        self.copied = copy.deepcopy(self.x.detach())  # allocated in a file of Python's own

    def prepare(self) -> None:
        self.x.grad = None

    def step(self, mark: Mark) -> None:
        out = self.model(self.x)
        mark("forward")
        out.sum().backward()
        mark("backward")


def line_of(function: object, text: str) -> str:
    lines, first = inspect.getsourcelines(function)  # type: ignore[arg-type]
    return f"{FILE}:{first + next(i for i, line in enumerate(lines) if text in line)}"


def test_blocks_have_operator_module_and_line(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    monkeypatch.chdir(request.config.rootpath)
    found = blocks_at_peak(plan_of(Step))
    assert sum(held.nbytes for held in found) >= 400 + 400 + 2 * 800  # x, out, and both halves of the gradient
    input_, *_ = (held for held in found if held.operator == "aten::ones")
    assert (input_.nbytes, input_.blocks, input_.module) == (400, 1, "")
    assert input_.line == line_of(Step.__init__, "torch.ones")
    [copied] = (held for held in found if held.operator == "")
    assert (copied.nbytes, copied.line) == (400, line_of(Step.__init__, "copy.deepcopy"))
    padded = next(held for held in found if held.operator == "SliceBackward0")
    assert (padded.nbytes, padded.blocks, padded.module) == (1600, 2, "Doubled")
    assert padded.line == f"backward of {line_of(Doubled.forward, 'def forward')}"
    assert found == sorted(found, key=lambda held: held.nbytes, reverse=True)


class Named(int):
    """A formula's bytes with named terms."""

    entries = {"parameters": 2**20, "gradients": 2**19}  # noqa: RUF012


def test_both_lists_are_shown_and_what_is_small_in_one_line() -> None:
    found = [Held((20 - i) * 2**20, 1, f"aten::op{i}", "blocks.0", "mine.py:7") for i in range(15)]
    lines = list(excess_lines(Named(2**20 + 2**19), found))
    assert lines[0].split() == ["what", "the", "formula", "has", "at", "the", "peak", "MiB"]
    assert lines[2].split() == ["parameters", "1.00"] and lines[3].split() == ["gradients", "0.50"]
    assert "aten::op0                  1  20.00  blocks.0, mine.py:7" in lines
    assert lines[-1].split() == ["3", "smaller", "3", "21.00", "-"]
    assert "one number, without named terms" in list(excess_lines(5, found))[2]
    assert len(list(excess_lines(5, []))) == 3


def test_a_failed_memory_budget_shows_them(project: pytest.Pytester) -> None:
    result, output = run_project(project, "--scale=smoke", "-k", "greedy and nap")
    result.assert_outcomes(failed=1)
    assert row_of(output, "greedy")["verdict"] == "fail"
    result.stdout.fnmatch_lines(
        [
            "* of tensors at the peak, over the budget of *",
            "what the formula has at the peak *",
            "what was found there *",
            "aten::empty * 1 * 0.00 *test_sleeps.py:*",
        ]
    )


def test_what_the_formula_has_is_shown_where_the_blocks_cannot_be_found(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardmark.plugin.measure.blocks_at_peak", lambda plan: 1 / 0)
    result, output = run_project(project, "--scale=smoke", "-k", "greedy and nap")
    result.assert_outcomes(failed=1)
    assert row_of(output, "greedy")["verdict"] == "fail"
    result.stdout.fnmatch_lines(["what the formula has at the peak *"])
    result.stdout.no_fnmatch_line("what was found there *")
