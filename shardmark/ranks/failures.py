"""How ranks failed, as one error for the test that called them."""

from __future__ import annotations

import pickle
from collections.abc import Mapping

from shardmark.ranks.rank import Answer
from shardmark.text import printable

Failure = tuple[str, bytes | None]
"""A rank's report, and the pickled exception; None where the rank raised none, or one that cannot be pickled."""


class RankError(RuntimeError):
    """A call failed on some rank. The message has that rank's traceback, or every rank's stack if one died or hung.

    `rank` is the rank that failed first, `exception` what it raised: None if it died or hung, or if the exception
    cannot be pickled. `hung` is True where no rank failed and some had not answered by the deadline.
    """

    def __init__(self, message: str, rank: int, exception: BaseException | None = None, hung: bool = False) -> None:
        super().__init__(message)
        self.rank = rank
        self.exception = exception
        self.hung = hung


def failures_of(answers: Mapping[int, Answer]) -> dict[int, Failure]:
    """Failures by rank, of the ranks that failed."""
    return {rank: answer.failure for rank, answer in answers.items() if answer.failure}


def rank_error(size: int, failures: Mapping[int, Failure], silent: Mapping[int, str]) -> RankError:
    """Error that reports each of the `size` ranks: failed, in the order given; then silent; then finished."""
    report = [f"rank {rank} of {size} {text}" for rank, (text, _) in failures.items()]
    report += [f"rank {rank} of {size} {text}" for rank, text in silent.items()]
    report += [f"rank {rank} of {size} finished" for rank in range(size) if rank not in failures and rank not in silent]
    first = next(iter([*failures, *silent]))
    exception = _unpickled(failures[first][1]) if failures else None
    lines = [printable(line.expandtabs()) for line in "\n".join(report).split("\n")]
    return RankError("\n".join(lines), first, exception, hung=not failures)


def _unpickled(exception: bytes | None) -> BaseException | None:
    """The exception; None where it cannot be unpickled in this process."""
    try:
        found = None if exception is None else pickle.loads(exception)
    except (Exception, SystemExit):
        return None
    return found if isinstance(found, BaseException) else None
