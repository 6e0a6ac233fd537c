"""What tests ask of any implementation by its contract, and of ours beyond it."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor

from shardmark.api import Implementation, Unsupported, error_line, family
from shardmark.meter.clock import Stopwatch
from shardmark.meter.memory import meter

Note = Callable[[str, object], None]
"""pytest's `record_property`: what is not in the contract is noted and fails nothing."""


def is_ours(implementation: Implementation) -> bool:
    """Whether it is registered here, and so held to more than its contract, such as the wording of its errors."""
    return implementation.spec in family(implementation.family).implementations


def assert_refused(
    implementation: Implementation, what: str, call: Callable[[], Any], wording: str, note: Note
) -> None:
    """The call raises ValueError; ours in one line that has `wording`, a pattern."""
    try:
        found = call()
    except ValueError as error:
        message = str(error)
        if is_ours(implementation):
            if not re.fullmatch(rf"[^\n]*{wording}[^\n]*", message):
                pytest.fail(f"{what}: no {wording!r} in {message!r}")
        elif "\n" in message or not message:
            note("note", f"its error for {what} is not one line")
    except Exception as error:
        pytest.fail(f"{what}: raised {type(error).__name__}, expected ValueError; it said: {error}")
    else:
        given = f"a tensor {tuple(found.shape)}" if isinstance(found, Tensor) else repr(found)
        pytest.fail(f"{what}: returned {given}, expected ValueError")


@contextmanager
def may_raise(implementation: Implementation, what: str, note: Note) -> Iterator[None]:
    """An error in it is noted, and fails ours alone: what it answers is to be looked at outside."""
    try:
        yield
    except Unsupported:
        raise
    except Exception as error:
        if is_ours(implementation):
            raise
        note("note", f"{what} is an error: {error_line(error)}")


def gradient_of_gradient(implementation: Implementation, call: Callable[[], Tensor], wording: str) -> Tensor | None:
    """What the call gives, or None where it raises, as a contract allows; ours with `wording`, a pattern."""
    try:
        return call()
    except Unsupported:
        raise
    except Exception as error:
        if is_ours(implementation) and not re.search(wording, str(error)):
            pytest.fail(f"no {wording!r} in {error!r}")
        return None


SLOW = 0.15
"""Seconds for an eighth of a large case, with which the rest is left out: slow is not wrong."""


def skip_if_slow(implementation: Implementation, eighth: Callable[[], Any], device: str) -> None:
    """Run an eighth of a large case, and skip the test of an implementation that takes long for it, even when the first
    run has compiled it and loaded its kernels. On a GPU none of ours is skipped; on CPU an interpreter may run it."""
    if device == "cuda" and is_ours(implementation):
        return
    for _ in range(2):
        watch = Stopwatch(device)
        watch.start()
        eighth()
        if (seconds := watch.stop().seconds) <= SLOW:
            return
    pytest.skip(f"an eighth of it takes {seconds:.1f} s: too slow for a large case, of which it is not judged")


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], when: str, share: float = 1e-3) -> None:
    """Each result is off by no more than that share of its largest value: for faults that are no matter of rounding."""
    for name, exact in wanted.items():
        value = found[name]
        assert value.shape == exact.shape, f"{when}: {name} is {tuple(value.shape)}, expected {tuple(exact.shape)}"
        assert value.isfinite().all(), f"{when}: {name} is not finite"
        error, allowed = (value.double() - exact).abs().max().item(), share * (exact.abs().max().item() + 1e-3)
        assert error <= allowed, f"{when}: {name} is off by {error:.1e}, allowed {allowed:.1e}"


def assert_unchanged(before: dict[str, Tensor], now: dict[str, Tensor], when: str) -> None:
    """To the bit, NaN included."""
    for name, old in before.items():
        new = now[name]
        changed = ~((new == old) | (new.isnan() & old.isnan()))
        assert not changed.any(), f"{when}: {name} changed in {int(changed.sum())} of {old.numel()} elements"


def held_by(call: Callable[[], Any], device: str) -> int:
    """Bytes that are live after the call, as long as what it returned is, and were not before."""
    with meter(device) as memory:
        kept = call()
        memory.mark("held")
    del kept
    return memory.phases["held"]


def growth(call: Callable[[], Any], device: str, times: int = 4) -> int:
    """Bytes that so many calls leave behind, when two before them have filled what is kept for good, and garbage is
    collected."""
    for _ in range(2):
        call()
    with meter(device) as memory:
        call()
        gc.collect()
        memory.mark("before")
        for _ in range(times):
            call()
        gc.collect()
        memory.mark("after")
    return memory.phases["after"] - memory.phases["before"]
