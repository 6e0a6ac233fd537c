"""Tests whose body runs on every rank of a world, and returns what is wrong there."""

import inspect
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any

import pytest

from shardmark.ranks.world import World


def running_on_ranks(assert_none: Callable[[Any], None]) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Return a decorator that runs a test's body on every rank of the fixture `world`, with the test's other arguments.

    `assert_none` gets what the ranks return, in rank order. Arguments and results are pickled.
    """

    def decorate(body: Callable[..., Any]) -> Callable[..., None]:
        given = list(inspect.signature(body).parameters.values())

        @wraps(body)
        def test(world: World, **arguments: Any) -> None:
            __tracebackhide__ = True
            assert_none(world.run(body, *(arguments[parameter.name] for parameter in given)))

        body.__qualname__ += ".__wrapped__"  # by this name pickle finds it: its own is the test's
        world = inspect.Parameter("world", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([given[0], world, *given[1:]])  # type: ignore[attr-defined]
        return test

    return decorate


def assert_nothing_wrong(ranks: Sequence[Sequence[str]]) -> None:
    """Fail with the first three lines of each rank's report."""
    __tracebackhide__ = True
    said = [f"rank {rank} of {len(ranks)}, {line}" for rank, lines in enumerate(ranks) for line in lines[:3]]
    if said:
        pytest.fail("\n".join(said), pytrace=False)


on_every_rank = running_on_ranks(assert_nothing_wrong)
"""Decorator of a test whose body runs on every rank, and returns a line for each thing that is wrong there."""
