"""Worlds of ranks: results, errors, deadlines and replacement."""

import os
import re
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from correctness.support.metering import device_of_rank
from correctness.support.waiting import wait_until
from shardmark.api.registry import Unsupported
from shardmark.ranks.rank import WorldError
from shardmark.ranks.world import DEADLINE, RankError, World, available_ranks
from shardmark.ranks.worlds import Worlds
from tests.faults.rank_faults import FAULTS
from tests.faults.table import FAILS, names_of
from tests.support.processes import is_running
from tests.support.ranks import identity, scaled_sum


def raise_on_every_rank(error: type[BaseException], begun: int = 0) -> None:
    """Once so many collectives more are under way on rank 0."""
    dist.barrier()
    for _ in range(begun if dist.get_rank() == 0 else 0):
        dist.all_reduce(torch.ones(3, device=device_of_rank()), async_op=True)
    raise error("not today")


def send_and_raise(error: type[BaseException]) -> None:
    if dist.get_rank() == 1:
        dist.isend(torch.ones(3), 0)
    raise error("not today")


def complain(what: str) -> None:
    print(what, dist.get_rank(), file=sys.stderr)
    subprocess.run(["sh", "-c", f"echo {what} of a child >&2"], check=True)


def draw() -> float:
    return torch.rand(()).item()


def load_with_a_worker() -> list[int]:
    loader = torch.utils.data.DataLoader(range(4), num_workers=1, multiprocessing_context="fork")  # type: ignore[arg-type]
    return [batch.item() for batch in loader]


def test_arguments_and_results_are_copied(pair: World, device: str) -> None:
    ones = torch.ones(3)
    for result in pair.run(scaled_sum, ones, 10.0, device):
        assert torch.equal(result, torch.full((3,), 30.0))
    assert torch.equal(ones, torch.ones(3))


def test_ranks_stay_between_calls_and_answer_in_rank_order(pair: World) -> None:
    expected = [(rank, 2, pid) for rank, pid in enumerate(pair.pids)]
    assert pair.run(identity) == expected and pair.run(identity) == expected


def test_an_exception_arrives_with_its_ranks_own_traceback(pair: World) -> None:
    with pytest.raises(RankError) as caught:
        pair.run(FAULTS["raises"].function)
    text = str(caught.value)
    assert text.startswith("rank 1 of 2 raised LookupError: no such shard\nTraceback (most recent call last):\n")
    assert 'raise LookupError("no such shard")' in text  # the user's own line
    assert "rank 0 of 2 had not answered" in text and "in meet" in text.split("rank 0 of 2")[1]
    assert caught.value.rank == 1 and isinstance(caught.value.exception, LookupError)


@pytest.mark.parametrize("name", names_of(FAILS))
def test_what_fails_is_told_in_one_line_of_its_rank(name: str, pair: World) -> None:
    fault = FAULTS[name]
    with pytest.raises(RankError) as caught:
        pair.run(fault.function, deadline=fault.deadline)
    assert re.search(f"^({fault.pattern(2)})", str(caught.value).partition("\n")[0])


def test_a_hang_is_reported_with_every_ranks_stack(pair: World) -> None:
    pair.run(identity)  # what is to be imported is
    began = time.monotonic()
    with pytest.raises(RankError) as caught:
        pair.run(FAULTS["sleeps"].function, deadline=1)
    assert time.monotonic() - began < DEADLINE / 10  # the call's own deadline counts, on a busy machine too
    for rank, place in ((0, "barrier, called in meet"), (1, "sleeps")):
        line = rf"rank {rank} of 2 had not answered after \d\.\d s; it was in {place} \(\w+\.py:\d+\)\n"
        assert re.search(line, str(caught.value))


def test_a_rank_that_crashes_leaves_its_stack(pair: World) -> None:
    with pytest.raises(RankError, match=r"(?s)was killed by SIGSEGV.*\?\nFatal Python error.*in reads_nowhere"):
        pair.run(FAULTS["reads_nowhere"].function)


def test_errors_that_ranks_write_are_passed_on_once(pair: World, capsys: pytest.CaptureFixture[str]) -> None:
    for what in ("early", "late"):
        pair.run(complain, what)
        written = capsys.readouterr().err.splitlines()
        assert sorted(written) == [f"{what} 0", f"{what} 1", *2 * [f"{what} of a child"]]


@pytest.mark.parametrize("error", [Unsupported, LookupError, SystemExit])
def test_what_every_rank_raises_leaves_the_world_for_the_next_test(error: type[BaseException], pair: World) -> None:
    pids = pair.pids
    with pytest.raises(RankError, match=r"rank 1 of 2 raised .*not today") as caught:
        pair.run(raise_on_every_rank, error)
    assert isinstance(caught.value.exception, error)
    assert [pid for _, _, pid in pair.run(identity)] == pids


def test_unless_it_leaves_them_out_of_step(pair: World) -> None:
    with pytest.raises(RankError, match="not today"):
        pair.run(raise_on_every_rank, LookupError, 1)
    assert not pair.alive


def test_unless_it_leaves_a_message_that_nobody_has_received(pair: World) -> None:
    if pair.device != "cpu":
        pytest.skip("on NCCL a message does not end before it is received")
    with pytest.raises(RankError, match="not today"):
        pair.run(send_and_raise, LookupError)
    assert not pair.alive


@pytest.mark.parametrize("name", ["raises", "sleeps", "reads_nowhere"])
def test_a_failure_ends_every_rank_and_the_next_test_gets_a_new_world(name: str, device: str) -> None:
    if available_ranks(device) < 2:
        pytest.skip("needs two ranks")
    worlds = Worlds(device)
    before = worlds.get(2)
    pids, directory = before.pids, before._directory
    with pytest.raises(RankError):
        before.run(FAULTS[name].function, deadline=0.5)
    assert not any(map(is_running, pids)) and not directory.exists()
    after = worlds.get(2)
    assert after is not before and [rank for rank, _, _ in after.run(identity)] == [0, 1]
    worlds.close()
    assert not any(map(is_running, after.pids))


def test_a_rank_that_died_between_tests_is_replaced(device: str) -> None:
    worlds = Worlds(device)
    before = worlds.get(1)
    pids = before.pids
    os.kill(pids[0], signal.SIGKILL)
    assert wait_until(lambda: not before.alive)
    assert worlds.get(1).run(identity)[0][2] not in pids
    worlds.close()


def test_what_cannot_be_sent_is_one_line_and_the_world_lives_on(pair: World) -> None:
    with pytest.raises(WorldError, match="module-level functions") as caught:
        pair.run(lambda: None)
    assert "\n" not in str(caught.value)
    assert pair.alive and pair.run(identity)


def test_a_closed_world_says_so(pair: World) -> None:
    pair.close()
    with pytest.raises(WorldError, match="this world is closed"):
        pair.run(identity)


def test_ranks_draw_numbers_of_their_own(pair: World) -> None:
    first, second = pair.run(draw)
    assert first != second


def test_a_rank_may_have_children(pair: World) -> None:
    assert pair.run(load_with_a_worker) == [[0, 1, 2, 3]] * 2


def test_a_world_too_large_is_one_line(device: str) -> None:
    allowed = available_ranks(device)
    with pytest.raises(WorldError, match=rf"{allowed + 1} .*{allowed}") as caught:
        World(allowed + 1, device)
    assert "\n" not in str(caught.value)
    with pytest.raises(WorldError, match="at least one rank, not 0"):
        World(0, device)
