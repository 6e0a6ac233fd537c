"""What went wrong on ranks: how they failed, and what a call left behind for the next one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from shardmark.rank import Answer

Failure = tuple[str, BaseException | None]
"""A rank's own report, and the exception, if it raised one that can be sent."""


class RankError(RuntimeError):
    """What happened on the ranks: the failing rank's own traceback, or every rank's stack when one died or hung.

    `rank` is the one that failed first, `exception` what it raised (None if it died, hung, or cannot be pickled);
    `hung` where no rank failed and some had not answered by the deadline.
    """

    def __init__(self, message: str, rank: int, exception: BaseException | None = None, hung: bool = False) -> None:
        super().__init__(message)
        self.rank = rank
        self.exception = exception
        self.hung = hung


class LeftBehind(UserWarning):
    """A call changed what the next one on its rank would have met."""


def warn_of_what_is_left(function: Callable[..., Any], answers: Mapping[int, Answer], in_step: bool) -> bool:
    """Warn, in the test that is running, of what its call left on the ranks; whether it cannot be put back.

    `in_step` is whether the ranks still meet in the same collectives.
    """
    left: dict[str, list[int]] = {}
    for rank, answer in sorted(answers.items()):
        for name in answer.left:
            left.setdefault(f"{name}, which is as before again", []).append(rank)
        if answer.broken:
            left.setdefault(f"{answer.broken}; the next call gets new ranks", []).append(rank)
    broken = any(answer.broken for answer in answers.values())
    if not in_step and not broken:
        left["collectives that not every rank began; the next call gets new ranks"] = sorted(answers)
        broken = True
    for what, ranks in left.items():
        name = getattr(function, "__qualname__", repr(function))
        warnings.warn(f"{name} left on rank {', '.join(map(str, ranks))} {what}", LeftBehind, stacklevel=3)
    return broken


def rank_error(size: int, failures: Mapping[int, Failure], silent: Mapping[int, str]) -> RankError:
    """What each rank of `size` did: those that failed, the first one first; those without an answer; the rest."""
    report = [f"rank {rank} of {size} {text}" for rank, (text, _) in failures.items()]
    report += [f"rank {rank} of {size} {text}" for rank, text in silent.items()]
    report += [f"rank {rank} of {size} finished" for rank in range(size) if rank not in failures and rank not in silent]
    first = next(iter([*failures, *silent]))
    return RankError("\n".join(report), first, failures[first][1] if failures else None, hung=not failures)
