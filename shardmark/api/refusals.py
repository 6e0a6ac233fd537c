"""Inputs that an implementation may refuse as `Unsupported`: each contract lists them, by kind.

    Family("attention", ..., may_refuse=(Refusable("dtypes", lambda q, k, v, **_: dtype_name(q.dtype)),))

A refusal holds for a kind as a whole: an implementation that takes float32 in one call may not refuse it in another.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class Unsupported(ValueError):
    """Raised by an implementation, in one line, for inputs that its contract lets it refuse (`Family.may_refuse`).

    The test is skipped with that line. For any other input the test fails.
    """

    refuses: frozenset[Feature] = frozenset()
    """The refused call's values of refusable kinds. Empty: nothing, or the error was not raised in a call."""


class NotAsked(Unsupported):
    """Raised by a test, on a rank too, for a claim that the contract does not make of this implementation."""


@dataclass(frozen=True, order=True)
class Feature:
    """A call's value of a refusable kind, such as "float64" of "dtypes"."""

    kind: str
    value: str


@dataclass(frozen=True)
class Refusable:
    """A kind of inputs that a contract lets an implementation refuse.

    `of` gets a call's arguments and returns the value of that kind, such as "float64"; None where every implementation
    must take the call as far as this kind goes. A claim that is asked in a refused value `elsewhere` must still be
    asked in another value: a refused dtype does not excuse a claim that has nothing to do with dtypes.
    """

    kind: str
    of: Callable[..., str | None]
    elsewhere: bool = False


@dataclass(frozen=True)
class Call:
    """Arguments of one call, without their tensors' memory: (name, value) of each; a tensor is (shape, dtype)."""

    arguments: tuple[tuple[str, Any], ...]
    method: str = ""
    """Name of the method that is called; empty where the target itself is."""

    @property
    def elements(self) -> int:
        return sum(torch.Size(value[0]).numel() for _, value in self.arguments if isinstance(value, tuple))

    def __str__(self) -> str:
        """As in "q (2, 4, 16) float32, is_causal=True", after a method's name and a colon."""
        given = ", ".join(
            f"{name} {value[0]} {value[1]}" if isinstance(value, tuple) else f"{name}={value}"
            for name, value in self.arguments
        )
        return f"{self.method}: {given}" if self.method else given

    @classmethod
    def of(cls, contract: type, args: tuple[Any, ...], kwargs: dict[str, Any], method: str = "") -> Call:
        own = vars(contract).get(method or "__call__")
        names = [name for name in inspect.signature(own).parameters if name != "self"] if own is not None else []
        names += [f"argument {i}" for i in range(len(names), len(args))]
        given = [*zip(names, args, strict=False), *kwargs.items()]
        return cls(tuple((name, _described(value)) for name, value in given), method)


def _described(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tuple(value.shape), dtype_name(value.dtype)
    return value if isinstance(value, bool | int | float) else type(value).__name__


@dataclass
class Ledger:
    """Values of the refusable kinds that a test's calls had, and parts that it could not ask."""

    taken: set[Feature] = field(default_factory=set)
    refused: dict[frozenset[Feature], str] = field(default_factory=dict)
    """The first refused call with these features, in words."""
    last: tuple[frozenset[Feature], Call] | None = None
    """The last call: where the check fails, most likely the one that failed."""
    unasked: list[str] = field(default_factory=list)
    """Parts of the check that were not asked, and why."""
    events: list[str] = field(default_factory=list)
    """Events before the failure, each in words."""


_LEDGER: list[Ledger] = []


def may_refuse(error: Unsupported) -> bool:
    """Whether the refused call has anything that its contract lets an implementation refuse."""
    return bool(error.refuses) or isinstance(error, NotAsked)


@contextmanager
def ledger() -> Iterator[Ledger]:
    """Note the calls in the block."""
    _LEDGER.append(Ledger())
    try:
        yield _LEDGER[-1]
    finally:
        _LEDGER.pop()


def note_unasked(line: str) -> None:
    """Note, for the verdict, that the running test leaves out a part: which, and why."""
    if _LEDGER:
        _LEDGER[-1].unasked.append(line)


def last_call() -> tuple[frozenset[Feature], Call] | None:
    """The last call that the running test has made, with its values of the refusable kinds; for `note_events`."""
    return _LEDGER[-1].last if _LEDGER else None


def forget_last_call() -> None:
    """Before the test plays another history."""
    if _LEDGER:
        _LEDGER[-1].last = None


def note_events(events: Iterable[str], last: tuple[frozenset[Feature], Call] | None) -> None:
    """Note, for the verdict, what the running test has done before it fails, a line an event, and the last call then,
    as the test may have called more since."""
    if _LEDGER:
        _LEDGER[-1].events[:] = events
        _LEDGER[-1].last = last


def watched(
    call: Callable[..., Any], contract: type, may_refuse: tuple[Refusable, ...], method: str = ""
) -> Callable[..., Any]:
    """The call, which notes in the ledger what it takes and refuses; an `Unsupported` of it says what it refuses.

    `method` is the contract's method that it is; by default the contract's own call.
    """

    def watch(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return call(*args, **kwargs)
        features = frozenset(_features(may_refuse, args, kwargs))
        notes = _LEDGER[-1] if _LEDGER else None
        if notes is not None:
            notes.last = features, Call.of(contract, args, kwargs, method)
        try:
            result = call(*args, **kwargs)
        except Unsupported as error:
            error.refuses = features
            if notes is not None and notes.last is not None:
                notes.refused.setdefault(features, str(notes.last[1]))
            raise
        if notes is not None:
            notes.taken |= features
        return result

    watch.__wrapped__ = call  # type: ignore[attr-defined]
    return watch


def _features(may_refuse: tuple[Refusable, ...], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[Feature]:
    for refusable in may_refuse:
        try:
            value = refusable.of(*args, **kwargs)
        except Exception:  # arguments of a test that expects an error
            continue
        if value is not None:
            yield Feature(refusable.kind, value)


def dtype_name(dtype: torch.dtype) -> str:
    """As in "float64"."""
    return str(dtype).removeprefix("torch.")


def dtypes_in(tensors: Iterable[Tensor]) -> str | None:
    """Names of their dtypes, as in "bfloat16, float32"; None where there are no tensors."""
    return ", ".join(sorted({dtype_name(each.dtype) for each in tensors})) or None


def other_dtypes(tensors: Iterable[Tensor]) -> str | None:
    """Names of their dtypes other than float32; None where there are none."""
    return ", ".join(sorted({dtype_name(each.dtype) for each in tensors} - {"float32"})) or None


def tensors_of(params: Any) -> list[Tensor]:
    """The parameters in an optimizer's first argument; none where looking at it would use it up."""
    if not isinstance(params, list | tuple):
        return []
    found = [tensors_of(each["params"]) if isinstance(each, dict) else [each] for each in params]
    flat = [each[1] if isinstance(each, tuple) else each for part in found for each in part]
    return [each for each in flat if isinstance(each, Tensor)]
