"""Checks of contracts, for the tests of several families; our own implementations must meet stricter ones."""

import gc
import math
import re
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from shardmark.api import Implementation, Unsupported, error_line, family, note_unasked
from shardmark.meter.memory import meter

Note = Callable[[str, object], None]
"""pytest's `record_property`: a finding outside the contract becomes a note, not a failure."""


def is_ours(implementation: Implementation) -> bool:
    """Return True for an implementation of the suite: its error messages too are tested."""
    return implementation.spec in family(implementation.family).implementations


def assert_refused(
    implementation: Implementation, what: str, call: Callable[[], Any], wording: str, note: Note
) -> None:
    """Assert that the call raises ValueError; ours in one line that matches the pattern `wording`."""
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
    """Turn an error in the block into a note; for our implementations it fails the test."""
    try:
        yield
    except Unsupported:
        raise
    except Exception as error:
        if is_ours(implementation):
            raise
        note("note", f"{what} is an error: {error_line(error)}")


def gradient_of_gradient(implementation: Implementation, call: Callable[[], Any], wording: str) -> Any:
    """Result of the call, or None where it raises, as contracts allow; ours must match the pattern `wording`."""
    try:
        return call()
    except Unsupported:
        raise
    except Exception as error:
        if is_ours(implementation) and not re.search(wording, str(error)):
            pytest.fail(f"no {wording!r} in {error!r}")
        return None


MANY_CALLS = 100_000
"""Most calls of functions, in Python or C, for the part of a large case that is tried first: some 0.1 s. An
implementation that makes more, as in Triton's interpreter, is not judged on the whole case."""
MANY_BYTES = 2**31
"""Most bytes of tensors that a large case may hold on a CPU, if they grow as between two parts of it. An implementation
that would hold more, as one that pads keys to the queries' length, would take what memory there is."""


def skip_if_slow(implementation: Implementation, part: Callable[[int], Any], device: str, share: int = 8) -> None:
    """Skip the test if `part(share)`, which runs 1/share of its case, makes more than MANY_CALLS calls, or if the whole
    would hold more than MANY_BYTES, and note that it was not asked.

    Calls and bytes are counted, as time depends on what else the machine does. On a GPU none of ours is skipped; on
    CPU an interpreter may run it."""
    if device == "cuda" and is_ours(implementation):
        return
    part(share)  # what is compiled first does not count
    if (calls := calls_of(partial(part, share))) > MANY_CALLS:
        _skip(f"too slow for this size: 1/{share} of it makes more than {MANY_CALLS:,} calls", calls)
    if device != "cpu":
        return
    less, more = (_peak(partial(part, of), device) for of in (2 * share, share))
    whole = more * (more / less) ** math.log2(share) if less else more  # bytes as a power of the size
    if whole > MANY_BYTES:
        assert not is_ours(implementation), f"of this size it would hold {round(whole):,} bytes"
        _skip(f"too much memory for this size: it would hold more than {MANY_BYTES:,} bytes", round(whole))


def _peak(call: Callable[[], Any], device: str) -> int:
    with meter(device) as memory:
        call()
    return memory.peak


def _skip(why: str, found: int) -> None:
    note_unasked(why)
    pytest.skip(f"{why}, {found:,}")


def calls_of(call: Callable[[], Any]) -> int:
    """How many functions the call calls."""
    with counted_calls() as counted:
        call()
    return counted.calls


class Counted:
    """Functions called, in Python and C; those of backward in C++ alone do not count."""

    calls = 0

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        self.calls += event in ("call", "c_call")


@contextmanager
def counted_calls() -> Iterator[Counted]:
    """Count the functions that the block calls, in this thread."""
    before, counted = sys.getprofile(), Counted()
    sys.setprofile(counted)
    try:
        yield counted
    finally:
        sys.setprofile(before)


def assert_near(found: dict[str, Tensor], wanted: dict[str, Tensor], when: str, share: float = 1e-3) -> None:
    """Assert each error is at most `share` of the largest value: for faults larger than rounding."""
    for name, exact in wanted.items():
        value = found[name]
        assert value.shape == exact.shape, f"{when}: {name} is {tuple(value.shape)}, expected {tuple(exact.shape)}"
        assert value.isfinite().all(), f"{when}: {name} is not finite"
        error, allowed = (value.double() - exact).abs().max().item(), share * (exact.abs().max().item() + 1e-3)
        assert error <= allowed, f"{when}: {name} is off by {error:.1e}, allowed {allowed:.1e}"


def assert_unchanged(before: dict[str, Tensor], now: dict[str, Tensor], when: str) -> None:
    """Assert bitwise equality, NaN included."""
    for name, old in before.items():
        new = now[name]
        changed = ~((new == old) | (new.isnan() & old.isnan()))
        assert not changed.any(), f"{when}: {name} changed in {int(changed.sum())} of {old.numel()} elements"


def renumbered(state: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's state under other ids, the last first: `load_state_dict` takes whatever is in the groups, in
    order."""
    ids = [i for group in state["param_groups"] for i in group["params"]]
    new = dict(zip(ids, ids[::-1], strict=True))
    groups = [{**group, "params": [new[i] for i in group["params"]]} for group in state["param_groups"]]
    return {**state, "state": {new[i]: of for i, of in state["state"].items()}, "param_groups": groups}


def changed_in_state(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Describe what of an optimizer's `state_dict()` is another than it was, or return ""."""
    for i, state in before["state"].items():
        for name, value in state.items():
            new = now["state"].get(i, {}).get(name)
            if new is None or not torch.equal(torch.as_tensor(new), torch.as_tensor(value)):
                return f"{name!r} of parameter {i} was {value}, and is {new}"
    return "" if now["param_groups"] == before["param_groups"] else "the groups are others"


def held_by(call: Callable[[], Any], device: str) -> int:
    """Bytes that the call allocates and that stay live as long as its result."""
    with meter(device) as memory:
        kept = call()
        gc.collect()  # of what it has dropped, which Triton's interpreter leaves in cycles
        memory.mark("held")
    del kept
    return memory.phases["held"]


def held_outside_of_tensors(call: Callable[[], Any]) -> int:
    """Bytes that Python and NumPy hold as long as the call's result: tensors' memory may hide there. In a process
    without other threads, in which tracemalloc may crash."""
    call()  # fills caches
    gc.collect()
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        kept = call()
        gc.collect()
        now, _ = tracemalloc.get_traced_memory()
        del kept
    finally:
        tracemalloc.stop()
    return now - before


def assert_little_outside_of_tensors(owner: Any) -> None:
    """Assert that the object does not refer to 256 KiB of bytes, bytearrays and NumPy's arrays, directly or not, but
    through modules: the meter of tensors does not see them."""
    ignored = {id(vars(module)) for module in [*sys.modules.values()] if isinstance(module, ModuleType)}
    found, seen, left = 0, {id(owner)}, [owner]
    while left:
        each = left.pop()
        if isinstance(each, (bytes, bytearray, np.ndarray)):
            found += sys.getsizeof(each)
        for other in gc.get_referents(each):
            if id(other) not in seen and id(other) not in ignored and not isinstance(other, (ModuleType, type)):
                seen.add(id(other))
                left.append(other)
    assert found < 2**18, f"after a step it holds {found:,} bytes outside of tensors"


@contextmanager
def without_the_collector() -> Iterator[None]:
    """In the block the collector does not run, so that cycles stay in memory."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def growth(call: Callable[[], Any], device: str, times: int = 4, collect: bool = True) -> int:
    """Bytes that `times` calls leave behind, after two calls that fill caches and after garbage collection; without it
    if not `collect`."""
    for _ in range(2):
        call()
    with meter(device) as memory:
        call()
        gc.collect()
        _finish_backward(device)
        memory.mark("before")
        with without_the_collector():
            for _ in range(times):
                call()
        if collect:
            gc.collect()
        _finish_backward(device)
        memory.mark("after")
    return memory.phases["after"] - memory.phases["before"]


def _finish_backward(device: str) -> None:
    """Have autograd's thread for the device, which CUDA has, let go of its last task."""
    torch.ones((), device=device, requires_grad=True).sin().backward()


def left_by(small: Callable[[], Any], large: Callable[[], Any], device: str) -> int:
    """Bytes that a large call leaves behind beyond those of a small one before it, which allocates workspaces."""
    small()
    with meter(device) as memory:
        small()
        gc.collect()
        memory.mark("before")
        large()
        gc.collect()
        memory.mark("after")
    return memory.phases["after"] - memory.phases["before"]


def held_beyond_hooks(call: Callable[[], Any], device: str) -> int:
    """Bytes that the call allocates and that stay live with its result, where hooks of saved tensors move to files, so
    to say, all that is saved for backward: as checkpointing, offloading and compressing do."""

    def pack(x: Tensor) -> tuple[bytes, torch.Size, torch.dtype]:
        return x.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes() if x.ndim else b"", x.shape, x.dtype

    def unpack(packed: tuple[bytes, torch.Size, torch.dtype]) -> Tensor:
        return torch.frombuffer(bytearray(packed[0]), dtype=packed[2]).view(packed[1]).to(device)

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return held_by(call, device)


def assert_freed_at_once(call: Callable[[], Any], device: str) -> None:
    """Assert that what calls saved for backward is freed with their results, and not once the garbage collector runs:
    Python counts its objects, and a cycle of few holds tensors of any size."""
    left = growth(call, device, collect=False)
    assert left < 1000, (
        f"four calls, whose results are gone, leave {left:,} bytes until the garbage collector runs: in a cycle"
    )
