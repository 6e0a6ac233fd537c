"""Triton's interpreter, sped up for the tests: equal results, and Triton's own functions restored."""

import os
from collections.abc import Callable

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    pytest.skip("kernels are compiled", allow_module_level=True)
triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402
from triton.runtime.errors import InterpreterError  # noqa: E402


@triton.jit
def plus_one(x):
    return x + 1


@triton.jit
def plus_two(x):
    return plus_one(plus_one(x))


@triton.jit
def add_two(pointer, FAULT: tl.constexpr):
    offsets = tl.arange(0, 4)
    if FAULT:
        tl.load(1)
    tl.store(pointer + offsets, plus_two(tl.load(pointer + offsets)))


def test_helpers_of_helpers_are_interpreted_and_tritons_functions_restored() -> None:
    for _ in range(2):
        x = torch.arange(4, dtype=torch.int32)
        add_two[(1,)](x, FAULT=False)
        assert x.tolist() == [2, 3, 4, 5]
        assert tl.core.is_builtin(tl.load) and tl.core.is_builtin(tl.core.load)


@triton.jit
def sum_of(x, total):  # type: ignore[no-untyped-def]
    tl.store(total, tl.sum(tl.load(x + tl.arange(0, 4)), axis=0))


def test_what_tritons_own_helpers_replace_is_restored_too() -> None:
    total = torch.zeros(1)
    sum_of[(1,)](torch.ones(4), total)
    assert total.item() == 4
    assert tl.core.is_builtin(tl.load) and tl.core.is_builtin(tl.core.load)


def test_after_a_kernel_that_raises_the_next_one_runs() -> None:
    x = torch.zeros(4, dtype=torch.int32)
    with pytest.raises(InterpreterError):
        add_two[(1,)](x, FAULT=True)
    assert tl.core.is_builtin(tl.load)
    add_two[(1,)](x, FAULT=False)
    assert x.tolist() == [2, 2, 2, 2]


def test_the_language_is_searched_once_for_each_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[object] = []
    search: Callable[..., None] = interpreter._patch_lang_tensor
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", lambda *args: (searched.append(args[0]), search(*args)))
    add_two[(3,)](torch.zeros(4, dtype=torch.int32), FAULT=False)
    assert len(searched) == 1


def test_sums_are_not_computed_a_second_time_for_an_assertion_that_is_left_out() -> None:
    options = interpreter.interpreter_builder.options
    assert options.sanitize_overflow == options.debug
