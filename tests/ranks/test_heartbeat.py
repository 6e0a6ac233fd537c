"""Ranks of several machines: who is missed, who is not, and what a rank does without the store."""

import threading
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from correctness.support.waiting import wait_until
from shardmark.ranks import heartbeat
from shardmark.ranks.heartbeat import CLOSED, Heartbeat


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """Torchrun's, with a silence that tests can wait for."""
    monkeypatch.setattr(heartbeat, "BEAT", 0.02)
    monkeypatch.setattr(heartbeat, "LOST", 1.0)
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The messages with which a rank would have ended."""
    said: list[str] = []
    monkeypatch.setattr(heartbeat, "end_without_store", said.append)
    return said


@pytest.fixture
def first(store: dist.TCPStore) -> Iterator[Heartbeat]:
    found = Heartbeat(store, 0, others=[1, 2])
    yield found
    found.close()


def test_ranks_that_count_are_not_missed_and_those_that_stop_are(first: Heartbeat, store: dist.TCPStore) -> None:
    other = Heartbeat(store, 1)
    assert wait_until(lambda: first.lost() == [2])  # which never was there
    assert wait_until(lambda: first.doubtful() == [2])
    other.close()
    assert wait_until(lambda: first.doubtful() == [1, 2]) and first.lost() == [2]
    assert wait_until(lambda: first.lost() == [1, 2])


class Silent:
    """A store that answers once, then closes its connection or says nothing."""

    def __init__(self, closes: bool) -> None:
        self.closes, self.asked = closes, 0

    def add(self, key: str, amount: int) -> int:
        self.asked += 1
        if self.asked == 1:
            return amount
        if self.closes:
            raise dist.DistNetworkError("Connection reset by peer")
        threading.Event().wait()
        return 0


@pytest.mark.parametrize(("closes", "says"), [(True, CLOSED), (False, "has not answered for 1 s: ")])
def test_a_rank_ends_without_its_store(
    closes: bool, says: str, store: dist.TCPStore, ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "PrefixStore", lambda name, inner: Silent(closes))
    beating = Heartbeat(store, 1)
    assert wait_until(lambda: bool(ends)) and ends[0].startswith(says)
    beating.close()
    after = len(ends)
    assert not wait_until(lambda: len(ends) > after + 1, 0.2)
