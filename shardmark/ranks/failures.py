"""What went wrong on ranks: how they failed, and what a call left behind for the next one."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Callable, Mapping
from typing import Any

from shardmark.ranks.rank import Answer
from shardmark.text import printable

Failure = tuple[str, bytes | None]
"""A rank's own report, and the exception, pickled, if it raised one that can be sent."""


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


class Left:
    """What a call left on the ranks. `broken` is whether any of it cannot be put back.

    `in_step` is whether the ranks still meet in the same collectives.
    """

    def __init__(self, function: Callable[..., Any], answers: Mapping[int, Answer], in_step: bool) -> None:
        self.name = getattr(function, "__qualname__", repr(function))
        self._ranks: dict[str, list[int]] = {}
        for rank, answer in sorted(answers.items()):
            for name in answer.left:
                self._ranks.setdefault(f"{name}, which is as before again", []).append(rank)
            if answer.broken:
                self._ranks.setdefault(f"{answer.broken}; the next call gets new ranks", []).append(rank)
        self.broken = any(answer.broken for answer in answers.values())
        if not in_step and not self.broken:
            self._ranks["collectives that not every rank began; the next call gets new ranks"] = sorted(answers)
            self.broken = True
        for rank, sent, received in _unmatched(answers) if not self.broken else []:
            text = f"messages to rank {rank}: {sent} sent, {received} received; the next call gets new ranks"
            self._ranks[text] = sorted(answers)
            self.broken = True

    def warn(self) -> None:
        """In the test that is running."""
        for what, ranks in self._ranks.items():
            text = f"{self.name} left on rank {', '.join(map(str, ranks))} {what}"
            warnings.warn(printable(text), LeftBehind, stacklevel=3)


def failures_of(answers: Mapping[int, Answer]) -> dict[int, Failure]:
    """How those ranks failed that did."""
    return {rank: answer.failure for rank, answer in answers.items() if answer.failure}


def _unmatched(answers: Mapping[int, Answer]) -> list[tuple[int, int, int]]:
    """Ranks to which more messages went than they have received, or fewer, and both numbers."""
    sent = {rank: sum(answer.sent.get(rank, 0) for answer in answers.values()) for rank in answers}
    received = {rank: sum(answer.received.values()) for rank, answer in answers.items()}
    return [(rank, sent[rank], received[rank]) for rank in answers if sent[rank] != received[rank]]


def rank_error(size: int, failures: Mapping[int, Failure], silent: Mapping[int, str]) -> RankError:
    """What each rank of `size` did: those that failed, the first one first; those without an answer; the rest."""
    report = [f"rank {rank} of {size} {text}" for rank, (text, _) in failures.items()]
    report += [f"rank {rank} of {size} {text}" for rank, text in silent.items()]
    report += [f"rank {rank} of {size} finished" for rank in range(size) if rank not in failures and rank not in silent]
    first = next(iter([*failures, *silent]))
    exception = _unpickled(failures[first][1]) if failures else None
    lines = [printable(line.expandtabs()) for line in "\n".join(report).split("\n")]
    return RankError("\n".join(lines), first, exception, hung=not failures)


def _unpickled(exception: bytes | None) -> BaseException | None:
    """None for one that can be made on the rank alone."""
    try:
        found = None if exception is None else pickle.loads(exception)
    except (Exception, SystemExit):
        return None
    return found if isinstance(found, BaseException) else None
