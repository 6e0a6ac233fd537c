"""How ranks failed, as one error for the test that called them."""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping

from shardmark.ranks.rank import Answer
from shardmark.ranks.report_of_failure import SkippedOnRank
from shardmark.text import printable

LEFT_ALONE = re.compile(
    r"Connection (closed|reset) by peer|[Bb]roken pipe|[Aa]pplication timeout caused pair closure|"
    r"remote process exited or there was a network error|communicator was aborted"
)
"""Errors of Gloo and NCCL on a rank whose peer is gone."""

Failure = tuple[str, bytes | None]
"""A rank's report, and the pickled exception; None where the rank raised none, or one that cannot be pickled."""


class RankError(RuntimeError):
    """A call failed on some rank. The message has that rank's traceback, or every rank's stack if one died or hung.

    `rank` is the rank that failed first, `exception` what it raised: None if it died or hung, or if the exception
    cannot be pickled. `hung` is True where no rank failed and some had not answered by the deadline. `skipped` is the
    reason where every rank that failed called `pytest.skip`.
    """

    def __init__(
        self,
        message: str,
        rank: int,
        exception: BaseException | None = None,
        hung: bool = False,
        skipped: str | None = None,
    ) -> None:
        super().__init__(message)
        self.rank = rank
        self.exception = exception
        self.hung = hung
        self.skipped = skipped


def failures_of(answers: Mapping[int, Answer]) -> dict[int, Failure]:
    """Failures by rank, of the ranks that failed."""
    return {rank: answer.failure for rank, answer in answers.items() if answer.failure}


def is_left_alone(failure: Failure) -> bool:
    """Whether the rank failed only because another one has left it: its connection was closed."""
    return LEFT_ALONE.search(failure[0].partition("\n")[0]) is not None


def rank_error(size: int, failures: Mapping[int, Failure], silent: Mapping[int, str]) -> RankError:
    """Error that reports each of the `size` ranks: failed, in the order given; then silent; then those that others have
    left alone; then finished."""
    alone = [rank for rank, failure in failures.items() if is_left_alone(failure)]
    order = [*(rank for rank in failures if rank not in alone), *silent, *alone]
    texts = {rank: text for rank, (text, _) in failures.items()} | dict(silent)
    texts |= {rank: "finished" for rank in range(size) if rank not in texts}
    report = [f"rank {rank} of {size} {texts[rank]}" for rank in dict.fromkeys([*order, *texts])]
    first = order[0]
    exception = _unpickled(failures[first][1]) if first in failures else None
    lines = [printable(line.expandtabs()) for line in "\n".join(report).split("\n")]
    causes = [_unpickled(failures[rank][1]) for rank in failures if rank not in alone]
    skips = [str(each) for each in causes if isinstance(each, SkippedOnRank)]
    skipped = skips[0] if skips and len(skips) == len(causes) else None
    return RankError("\n".join(lines), first, exception, hung=not failures, skipped=skipped)


def _unpickled(exception: bytes | None) -> BaseException | None:
    """The exception; None where it cannot be unpickled in this process."""
    try:
        found = None if exception is None else pickle.loads(exception)
    except (Exception, SystemExit):
        return None
    return found if isinstance(found, BaseException) else None
