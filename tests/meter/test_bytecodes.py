"""Bytecodes of a step: exact in every run, by function, and none where they cannot be counted."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from correctness.support.paths import ROOT
from shardmark.api.workload import Mark
from shardmark.meter import bytecodes as module
from shardmark.meter.bytecodes import LIBRARIES, bytecodes, is_followed
from tests.support.counting import Loops, Step, counted, loop, plain


def in_loop(workload: Any) -> int:
    """Bytecodes of `loop`."""
    found = bytecodes(workload)
    assert found is not None
    return next(count for name, count in found.items() if name.endswith("counting.py:loop"))


def test_each_iteration_counts_the_same() -> None:
    """At least four instructions: the iterator's, the load, the sum, the jump."""
    one, ten, hundred = (in_loop(Loops(iterations)) for iterations in (1, 10, 100))
    assert (ten - one) % 9 == 0 and (ten - one) // 9 >= 4
    assert hundred - one == 11 * (ten - one)


def test_fresh_processes_count_alike() -> None:
    """However their strings are hashed."""
    code = (
        "from tests.support.counting import Loops, counted\n"
        "print(counted(Loops()).bytecodes, counted(Loops()).bytecodes_by_function)"
    )
    said = {
        subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(said) == 1 and not said.pop().startswith("None")


class Doubles(torch.autograd.Function):
    """Twice its input; both passes loop in Python."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        loop(10)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        loop(1000)
        return 2 * gradients[0]


def doubled(model: nn.Module, x: Tensor) -> Tensor:
    return Doubles.apply(plain(model, x))  # type: ignore[no-any-return, no-untyped-call]


def test_backward_of_a_custom_function_counts_on_cpu() -> None:
    found = counted(Step(doubled)).bytecodes_by_function
    assert found is not None and {name.partition(":")[2] for name in found} >= {"Doubles.forward", "Doubles.backward"}
    assert in_loop(Step(doubled)) > in_loop(Loops(1000))


def test_the_users_functions_have_names_and_all_others_one() -> None:
    found = bytecodes(Loops())
    assert found is not None and found[LIBRARIES] > 0
    assert not any("torch" in name for name in found)
    step = counted(Loops())
    assert step.bytecodes_by_function is not None
    assert step.bytecodes == sum(step.bytecodes_by_function.values())
    assert LIBRARIES not in step.bytecodes_by_function and step.library_bytecodes


class InAThread(Step):
    """The loop runs in another thread, which the step waits for."""

    def step(self, mark: Mark) -> None:
        thread = threading.Thread(target=loop, args=(100,))
        thread.start()
        thread.join()


class Waits(Loops):
    """Each step loops once more than the last, as one that waits may."""

    def step(self, mark: Mark) -> None:
        self.iterations += 1
        super().step(mark)


def test_other_threads_do_not_count() -> None:
    assert not any("loop" in name for name in bytecodes(InAThread(plain)) or ())


def test_a_step_that_differs_from_the_next_one_is_not_counted() -> None:
    assert bytecodes(Waits()) is None
    assert counted(Waits()).bytecodes is None and counted(Waits()).operators == 9


def test_a_step_of_too_many_is_not_counted_and_runs_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST", 1000)
    steps = Loops(1000)
    found = counted(steps)
    assert found.bytecodes is None and found.operators == 9
    assert not is_followed()


def trace(frame: FrameType, event: str, value: Any) -> Callable[..., Any] | None:
    return None


def test_beside_a_debugger_nothing_is_counted_and_it_stays() -> None:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        found = counted(Loops())
        assert sys.gettrace() is trace
    finally:
        sys.settrace(before)
    assert found.bytecodes is None and found.library_bytecodes is None and found.operators == 9


def test_compiled_code_is_not_counted() -> None:
    torch.compiler.reset()
    found = counted(Step(torch.compile(plain, backend="eager")))
    assert (found.bytecodes, found.library_bytecodes, found.bytecodes_by_function) == (None, None, None)
