"""The dtype of checks that compare values exactly: float64, or float32 where an implementation refuses float64.

A conftest.py that imports `pytest_pyfunc_call` has each test that is refused for float64 run again in float32: modules
and batches are then made in `exact()`, and values may differ by `tolerance()`.
"""

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch

from shardmark.api import Unsupported
from shardmark.ranks.world import RankError, World

_DTYPES = [torch.float64]

ROUNDINGS = 256
"""Roundings that a value may be off in float32, in units of the last place of one. A gradient is made of sums of at
most some hundred products, in three layers, forward and backward, and errors of both signs add up slower than these."""


def exact() -> torch.dtype:
    """The dtype in which checks make modules and batches now."""
    return _DTYPES[-1]


def tolerance(in_float64: float = 1e-12) -> float:
    """Tolerance of a check, absolute and as a share of the value: in float32, `ROUNDINGS`."""
    return in_float64 if exact() == torch.float64 else ROUNDINGS * torch.finfo(exact()).eps


@contextmanager
def exactly(dtype: torch.dtype) -> Iterator[None]:
    """In this context, checks are in that dtype."""
    _DTYPES.append(dtype)
    try:
        yield
    finally:
        _DTYPES.pop()


def _call_exactly(dtype: torch.dtype, function: Callable[..., Any], *args: Any) -> Any:
    with exactly(dtype):
        return function(*args)


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, Any, Any]:
    """Call a test that its implementation refuses for float64 again, in float32, here and on the ranks."""
    try:
        return (yield)
    except (Unsupported, RankError) as error:
        world = pyfuncitem.funcargs.get("world")
        if not (_refuses_float64(error) and isinstance(world, World) and world.alive):
            raise
        run = World.run

        def run_in_float32(self: World, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
            return run(self, partial(_call_exactly, torch.float32, function), *args, **options)

        with pytest.MonkeyPatch.context() as patch, exactly(torch.float32):
            patch.setattr(World, "run", run_in_float32)
            names = pyfuncitem._fixtureinfo.argnames
            return pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}) or True


def _refuses_float64(error: Unsupported | RankError) -> bool:
    cause = error.exception if isinstance(error, RankError) else error
    return isinstance(cause, Unsupported) and any("float64" in feature.value for feature in cause.refuses)
