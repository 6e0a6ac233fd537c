"""Warnings about state that a call left on its ranks, and whether those ranks can take another call."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any

from shardmark.ranks.rank import Answer
from shardmark.text import printable


class LeftBehind(UserWarning):
    """A call changed the state of its rank, which the next call would have met."""


class Left:
    """State that a call left on its ranks. `in_step` says whether the ranks still meet in the same collectives.
    `broken` is True where the ranks have to be replaced; `replaced` says in words what happens to them then.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        answers: Mapping[int, Answer],
        in_step: bool,
        replaced: str = "the next call gets new ranks",
    ) -> None:
        self.name = getattr(function, "__qualname__", repr(function))
        self._ranks: dict[str, list[int]] = {}
        for rank, answer in sorted(answers.items()):
            for name in answer.changed:
                self._ranks.setdefault(f"{name} changed; restored", []).append(rank)
            if answer.broken:
                self._ranks.setdefault(f"{answer.broken}; {replaced}", []).append(rank)
        self.broken = any(answer.broken for answer in answers.values())
        if not in_step and not self.broken:
            self._ranks[f"collectives that not every rank began; {replaced}"] = sorted(answers)
            self.broken = True
        for rank, sent, received in _unmatched(answers) if not self.broken else []:
            self._ranks[f"messages to rank {rank}: {sent} sent, {received} received; {replaced}"] = sorted(answers)
            self.broken = True

    def warn(self) -> None:
        """Warn in the test that is running."""
        for what, ranks in self._ranks.items():
            text = f"{self.name} left on rank {', '.join(map(str, ranks))}: {what}"
            warnings.warn(printable(text), LeftBehind, stacklevel=3)


def _unmatched(answers: Mapping[int, Answer]) -> list[tuple[int, int, int]]:
    """(rank, sent, received) of each rank whose counts of messages sent to it and received by it differ."""
    sent = {rank: sum(answer.sent.get(rank, 0) for answer in answers.values()) for rank in answers}
    received = {rank: sum(answer.received.values()) for rank, answer in answers.items()}
    return [(rank, sent[rank], received[rank]) for rank in answers if sent[rank] != received[rank]]
