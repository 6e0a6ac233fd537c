"""Find out whether the other hosts of a launch still run: TCP reports a lost host only after a quarter of an hour.

A thread of each rank increments a counter in torchrun's store. Silence is counted in one's own beats, not in seconds:
a process that was suspended, alone or with its machine, then reports nobody as lost.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterable
from typing import NoReturn

import torch.distributed as dist

BEAT = 0.25
"""Seconds between two counts."""
LOST = 20.0
"""Seconds of silence after which a host counts as lost: nothing holds Python's lock for so long."""
CLOSED = "has ended"
"""Message of a store whose connection is closed."""
DOUBTFUL = 2
"""Silent beats after which a rank may be lost: short beside the time that ranks get after one has failed."""


class Heartbeat:
    """Count for this rank and watch the `others`, until closed. If the store stops answering, end this process, whose
    callers would wait forever."""

    def __init__(self, store: dist.Store, rank: int, others: Iterable[int] = ()) -> None:
        self._key = f"{rank}"
        own = store.clone()  # type: ignore[attr-defined]  # a connection that waits lets nobody else ask
        self._store = dist.PrefixStore("shardmark/alive", own)
        self._counts = dict.fromkeys(others, 0)
        self._silent = dict.fromkeys(self._counts, 0)
        """Our beats since a rank last counted."""
        self._unanswered = 0
        self._closed = threading.Event()
        for run in (self._beat, self._watch):
            threading.Thread(target=run, daemon=True).start()

    def lost(self) -> list[int]:
        """Ranks that have been silent for too long."""
        return [rank for rank, beats in self._silent.items() if beats * BEAT >= LOST]

    def doubtful(self) -> list[int]:
        """Ranks that are silent just now."""
        return [rank for rank, beats in self._silent.items() if beats >= DOUBTFUL]

    def close(self) -> None:
        """Stop counting."""
        self._closed.set()

    def _beat(self) -> None:
        while not self._closed.wait(BEAT):
            try:
                self._store.add(self._key, 1)
                for rank, before in self._counts.items():
                    self._counts[rank] = self._store.add(f"{rank}", 0)
                    self._silent[rank] = 0 if self._counts[rank] != before else self._silent[rank] + 1
            except RuntimeError:
                self._end(CLOSED)
            self._unanswered = 0

    def _watch(self) -> None:
        while not self._closed.wait(BEAT):
            self._unanswered += 1
            if self._unanswered * BEAT >= LOST:
                self._end(f"has not answered for {LOST:.0f} s: has its host stopped, or is the network down?")

    def _end(self, how: str) -> None:
        if not self._closed.is_set():
            end_without_store(how)


def end_without_store(how: str) -> NoReturn:
    """End this process at once: without torchrun's store nobody can reach it."""
    rank, where = os.environ["RANK"], f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    sys.stderr.write(f"shardmark: rank {rank} ends, as torchrun's store at {where} {how}\n")
    sys.stderr.flush()
    os._exit(1)
