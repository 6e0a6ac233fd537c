"""Asynchronous collectives: progress while the caller computes, errors, and cleanup."""

import gc
import os
import signal
import subprocess
import sys
import threading
import weakref
from itertools import product
from pathlib import Path
from unittest.mock import patch
from uuid import uuid4

import pytest
import torch
import torch.distributed as dist

from correctness.collectives.summing import Call, small_integers
from correctness.engine.histories_on_ranks import group_of
from correctness.support.communication import delayed
from correctness.support.on_ranks import assert_nothing_wrong, on_every_rank
from correctness.support.paths import ROOT
from correctness.support.waiting import wait_until
from impl.collectives import collectives_for, count_bytes_sent
from impl.collectives.cases import COLLECTIVES
from impl.collectives.messages import GLOO_ALONE
from shardmark.api import Implementation, Unsupported
from shardmark.ranks.world import RankError, World

OURS = ("ring", "direct")
LATE = [pytest.param(0, id="first", marks=pytest.mark.judged), pytest.param(-1, id="last")]
N = 500_000
"""Number of elements: enough for several segments."""


def while_others_do_not_wait(implementation: Implementation, waits: int, token: str, device: str) -> list[str]:
    """Let one rank wait for an all-reduce while the others wait only after it, or after 5 s; describe what is wrong."""
    rank, wrong = dist.get_rank(), []
    store = dist.distributed_c10d._get_default_store()
    call = Call("all_reduce", small_integers(torch.float32), N, device)
    handle = call.start(implementation.watched, async_op=True)
    if rank == waits:
        handle.wait()
        wrong = [f"as wait() returned: {line}" for line in call.wrong()]
        store.set(token, "done")
    elif not wait_until(lambda: store.check([token]), seconds=5):
        wrong = [f"rank {waits}'s wait() for an asynchronous all_reduce does not return while others do not wait: 5 s"]
    handle.wait()
    return wrong + call.wrong()


@pytest.mark.family("collectives")
@pytest.mark.parametrize("waits", [0, 1])
def test_a_collective_goes_on_while_the_other_ranks_do_something_else(
    implementation: Implementation, world: World, waits: int, device: str
) -> None:
    if world.size == 1:
        pytest.skip("one rank has no others")
    assert_nothing_wrong(world.run(while_others_do_not_wait, implementation, waits, uuid4().hex, device))


def with_a_late_rank(implementation: Implementation, late: int, async_op: bool, device: str) -> list[str]:
    """Start one rank late; check the result as soon as the call, or `wait`, returns."""
    target, wrong = implementation.watched, []
    for name in COLLECTIVES:
        call = Call(name, small_integers(torch.float32), 10_007, device)
        with delayed(before=0.05, on=late % dist.get_world_size()):
            handle = call.start(target, async_op)
            if async_op:
                handle.wait()
            result = call.tensors[0].clone()
        dist.barrier()
        when = "wait() returned" if async_op else "it returned"
        wrong += [f"as {when}: {line}" for line in call.wrong(result)]
    return wrong


@pytest.mark.family("collectives")
@pytest.mark.parametrize("late", LATE)
def test_results_are_there_when_it_returns(
    implementation: Implementation, world: World, late: int, device: str
) -> None:
    assert_nothing_wrong(world.run(with_a_late_rank, implementation, late, False, device))


@pytest.mark.family("collectives")
@pytest.mark.parametrize("late", LATE)
def test_results_are_there_when_wait_returns(
    implementation: Implementation, world: World, late: int, device: str
) -> None:
    assert_nothing_wrong(world.run(with_a_late_rank, implementation, late, True, device))


def on_nccl(implementation: Implementation) -> None:
    with patch.object(dist, "get_backend_config", return_value="cuda:nccl"):
        implementation.watched.all_reduce(torch.ones(3))


@pytest.mark.family("collectives", only=OURS)
def test_that_nccl_does_not_send_its_messages_is_the_reason_of_a_skip_and_ends_no_world(
    implementation: Implementation, pair: World
) -> None:
    assert implementation.unavailable_reason("cuda") == GLOO_ALONE
    ranks = pair.pids
    for _ in range(2):
        with pytest.raises(RankError) as caught:
            pair.run(on_nccl, implementation)
        assert isinstance(caught.value.exception, Unsupported) and GLOO_ALONE in str(caught.value.exception)
    assert pair.pids == ranks


def beside_messages(implementation: Implementation, device: str) -> list[str]:
    """Describe what is wrong where the caller's own message, sent before a collective in the same group, is received
    while that runs."""
    rank, ranks, wrong = dist.get_rank(), dist.get_world_size(), []
    for name, (elements, group) in product(COLLECTIVES, ((N, None), (5, group_of(tuple(range(ranks)))))):
        call = Call(name, small_integers(torch.float32), elements, device, group=group)
        message = torch.full((elements,), float(rank), device=device)
        theirs = message + 99
        sent = dist.P2POp(dist.isend, message, (rank + 1) % ranks, group)
        received = dist.P2POp(dist.irecv, theirs, (rank - 1) % ranks, group)
        # Sent one by one, NCCL would wait for each receive before it sends.
        before, then = ([sent], [received]) if device == "cpu" else ([received, sent], [])
        own = dist.batch_isend_irecv(before)
        handle = call.start(implementation.watched, async_op=True)
        own += dist.batch_isend_irecv(then) if then else []
        for each in [*own, handle]:
            each.wait()
        wrong += call.wrong()
        if not (theirs == (rank - 1) % ranks).all():
            wrong.append(f"a message of the caller's own that is sent during {call} is another's")
    return wrong


@pytest.mark.family("collectives", only=(*OURS, "backend"))
def test_messages_of_the_callers_own_do_not_mix_with_it(
    implementation: Implementation, world: World, device: str
) -> None:
    if world.size == 1:
        pytest.skip("one rank has nobody to send to")
    assert_nothing_wrong(world.run(beside_messages, implementation, device))


def errors_of(implementation: Implementation) -> list[str]:
    """Return the errors that this rank raises for invalid calls."""
    target, ranks, said = implementation.watched, dist.get_world_size(), []
    for name, tensors in (
        ("all_reduce", [torch.ones(4, 3).T]),
        ("reduce_scatter", [torch.ones(3), torch.ones(3 * ranks + 1)]),
        ("reduce_scatter", [torch.ones(3), torch.ones(3 * ranks, dtype=torch.float64)]),
        ("all_gather", [torch.ones(3 * ranks, 2)[:, 0], torch.ones(3)]),
        ("all_gather", [torch.ones(3 * ranks - 1), torch.ones(3)]),
    ):
        try:
            getattr(target, name)(*tensors)
            said.append("nothing")
        except ValueError as error:
            said.append(str(error))
    return said


@pytest.mark.family("collectives", only=OURS)
def test_tensors_that_do_not_go_together_are_one_line(implementation: Implementation, world: World) -> None:
    n = world.size
    for said in world.run(errors_of, implementation):
        assert said == [
            "collectives take contiguous tensors, not one of shape (3, 4) with strides (1, 3)",
            f"on {n} ranks reduce_scatter's input has {n} times the elements of its output, not {3 * n + 1} against 3",
            "reduce_scatter's input and output are of one dtype, not torch.float64 and torch.float32",
            f"collectives take contiguous tensors, not one of shape ({3 * n},) with strides (2,)",
            f"on {n} ranks all_gather's output has {n} times the elements of its input, not {3 * n - 1} against 3",
        ]


def wait_for_a_rank_that_dies(implementation: Implementation) -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    implementation.watched.all_reduce(torch.ones(N), async_op=True).wait()


@pytest.mark.family("collectives", only=("ring",))
def test_a_rank_that_dies_is_an_error_of_those_who_wait_for_it(implementation: Implementation, pair: World) -> None:
    with pytest.raises(RankError, match=r"rank 0 of 2 raised RuntimeError") as caught:
        pair.run(wait_for_a_rank_that_dies, implementation, deadline=30)
    assert "rank 1 of 2 was killed by SIGKILL" in str(caught.value)


def threads_after_a_group(implementation: Implementation) -> list[int]:
    """Count the workers' threads before a group exists, while it does, and after it."""

    def workers() -> int:
        return sum(thread.name == "collectives" for thread in threading.enumerate())

    counts = [workers()]
    group = dist.new_group()
    for _ in range(2):
        implementation.watched.all_reduce(torch.ones(3), group)
    counts.append(workers())
    dist.destroy_process_group(group)
    del group
    gc.collect()
    wait_until(lambda: workers() == counts[0], seconds=5)
    return [*counts, workers()]


@pytest.mark.family("collectives", only=("ring",))
def test_a_thread_ends_with_its_process_group(implementation: Implementation, pair: World) -> None:
    assert pair.run(threads_after_a_group, implementation) == [[0, 1, 0]] * 2


def chosen() -> list[str]:
    """Names of the collectives chosen for the world and for groups with a backend per device type; checks
    reduce-scatter too."""
    groups = [dist.group.WORLD, *(dist.new_group(backend=backend) for backend in ("cpu:gloo", "cpu:gloo,cuda:gloo"))]
    for group in groups[1:]:
        total = torch.zeros(3)
        with count_bytes_sent() as sent:
            collectives_for(group).reduce_scatter(total, torch.arange(6.0), group)
        assert torch.equal(total, 2 * torch.arange(6.0)[3 * dist.get_rank() :][:3]) and sent.nbytes == total.nbytes
    return [type(collectives_for(group)).__name__ for group in groups]


def test_on_gloo_rings_scatter_and_gather_whatever_other_backends_a_group_has(pair: World) -> None:
    own = "OnGloo" if pair.device == "cpu" else "Backend"
    assert pair.run(chosen) == [[own, "OnGloo", "OnGloo"]] * 2


EXIT = """
import os, sys, torch, torch.distributed as dist
from impl.collectives.ring import Ring
rank = 0 if os.fork() else 1
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
Ring().all_reduce(torch.ones(3))
if rank == 0:
    Ring().all_reduce(torch.ones(1_000_000), async_op=True)  # which rank 1 has no part in
"""


@pytest.mark.sweep
def test_an_interpreter_ends_in_the_midst_of_a_collective(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", EXIT, str(tmp_path / "store")]
    root = ROOT
    run = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=root, timeout=60)
    assert (run.returncode, run.stdout) == (0, "")


@pytest.mark.family("collectives")
@on_every_rank
def test_a_collective_that_is_over_keeps_no_tensor(implementation: Implementation, device: str) -> list[str]:
    """A registry of handles would keep every gradient of every step."""
    kept = []
    for name in COLLECTIVES:
        for _ in range(3):
            call = Call(name, small_integers(torch.float32), 1001, device)
            handle = call.start(implementation.watched, async_op=True)
            handle.wait()
            kept += [weakref.ref(tensor) for tensor in call.tensors]
            del call, handle
    gc.collect()
    alive = sum(each() is not None for each in kept[:-4])  # the last one's may be in use by a thread
    return [f"{alive} of {len(kept) - 4} tensors stay alive after wait(), without their handle"] if alive else []
