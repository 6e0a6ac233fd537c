"""The main loop of a rank: join the process group, then run calls until the world closes.

A rank writes three files to the world's private folder, for when it hangs or dies: its stacks (rank0.stacks), the error
that ended it (rank0.end) and its stderr (rank0.stderr).
"""

from __future__ import annotations

import faulthandler
import fcntl
import gc
import itertools
import multiprocessing
import os
import pickle
import select
import signal
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardmark.ranks import gpus, nccl, process_setup, rank_stderr
from shardmark.ranks.channel import receive, send
from shardmark.ranks.checkout import Checkout
from shardmark.ranks.link import Host
from shardmark.ranks.process_settings import Watchdog
from shardmark.ranks.rank_state import Messages, RankState, seed_rank
from shardmark.ranks.report_of_failure import pickled_exception, report_of


class WorldError(ValueError):
    """A world that cannot exist, or work that cannot be sent to one; one line."""


class WorldLostError(WorldError):
    """An earlier test ended this world, and it cannot be replaced."""


def available_cores() -> int:
    """Cores that this process may use: by affinity, or by its control group's quota (cgroup v2), as in a container."""
    cores = len(os.sched_getaffinity(0))
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return cores if quota == "max" else max(1, min(cores, int(quota) // int(period)))
    except (OSError, ValueError):
        return cores


def threads_of_a_rank(ranks: int) -> int:
    """One rank's share of the cores, when each worker of pytest-xdist has that many ranks."""
    return max(1, available_cores() // (ranks * _workers()))


def _workers() -> int:
    """Number of pytest-xdist workers on this machine."""
    return int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))


def pickled_call(function: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    """A call as bytes, with its random seed. WorldError, in one line, for a call that cannot be pickled."""
    try:
        return pickle.dumps((function, args, torch.initial_seed()))
    except Exception as error:  # pickle raises as many kinds as there are things it cannot pickle
        raise WorldError(f"a world runs module-level functions with arguments that pickle: {error}") from error


WORLD_VARIABLE = "SHARDMARK_WORLD"
"""Environment variable with a rank's private folder: it marks every program that the rank starts."""


@dataclass(frozen=True)
class Answer:
    """A rank's answer to a call: its `value`, or its failure (a traceback, and the exception if it can be pickled)."""

    value: Any = None
    failure: tuple[str, bytes | None] | None = None
    changed: list[str] = field(default_factory=list)
    """Settings that the call changed and the rank has restored."""
    broken: str | None = None
    """The change that the rank cannot restore, so that the rank has to be replaced; None without one."""
    collectives: int = 0
    """Collectives that the world's process group has begun."""
    sent: dict[int, int] = field(default_factory=dict)
    """Messages that the call sent by `send` or `isend`, by the rank they go to."""
    received: dict[int, int] = field(default_factory=dict)


def perform(work: bytes | bytearray, keep: bool = False) -> bytes:
    """Run a pickled call; its `Answer`, as bytes. With `keep`, changes to the process stay."""
    own_process = os.getpid()
    before = RankState()
    try:
        try:
            function, args, seed = pickle.loads(work)
            _forget_meshes()
            seed_rank(seed + (dist.get_rank() if dist.is_initialized() else 0))  # each rank draws its own
            result = function(*args)
            if torch.cuda.is_initialized():  # work that is still queued may fail or hang, and is this call's
                torch.cuda.synchronize()
        finally:
            if os.getpid() != own_process:  # a child that the call has forked: its parent answers
                os._exit(0)
        if keep:
            RankState.attributes.accept()
        left = {} if keep else _left_behind(before)
        try:
            return pickle.dumps(Answer(result, **left))
        except Exception as error:
            error.add_note("This is what the call has returned: results go by pickle.")
            raise
    except BaseException as error:
        # BaseException: a function that exits (argparse, pytest.skip) is reported, and does not end the rank.
        failure = report_of(error), pickled_exception(error)
        try:
            left = _left_behind(before)
        except BaseException:
            left = {"broken": "an unknown state"}
        return pickle.dumps(Answer(failure=failure, **left))


def _forget_meshes() -> None:
    """Clear DTensor's cache. Equal meshes are one key there, whose value has the process groups of the first one. A
    rank that has simulated in between, or failed, has those of another, and ranks would wait in different groups."""
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor.debug import _clear_sharding_prop_cache

        _clear_sharding_prop_cache()


def _collect_garbage() -> None:
    """Collect what the call has left: what an object does as it goes is this call's doing.

    Objects that have survived a collection are looked at again after every hundredth call alone: modules that have been
    imported, such as the compiler's, would take a tenth of a second after each.
    """
    gc.collect(1 if next(_calls) % 100 else 2)


_calls = itertools.count(1)


def _left_behind(before: RankState) -> dict[str, Any]:
    _collect_garbage()
    changed = before.restore()
    broken = before.broken() or gpus.unrest()
    joined = dist.is_initialized() and broken is None
    sent, received = Messages.since_last()
    collectives = dist.group.WORLD._get_sequence_number_for_group() if joined else 0  # type: ignore[union-attr]
    if joined and dist.get_backend() == "gloo":
        collectives -= Messages.total  # which Gloo numbers too
    return {"changed": changed, "broken": broken, "collectives": collectives, "sent": sent, "received": received}


def ranks_met(device: str) -> list[int]:
    """The ranks whose messages arrive in a collective of all ranks."""
    own = torch.tensor([dist.get_rank()], device=device)
    found = [torch.full_like(own, -1) for _ in range(dist.get_world_size())]
    dist.all_gather(found, own)
    return [int(rank) for rank in found]


def serve(
    rank: int,
    size: int,
    device: str,
    directory: Path,
    host: Host | None,
    checkout: Checkout | None,
    end: socket.socket,
) -> None:
    """Join the group as `rank`, on that host and with that version of the code if given; answer calls until the world
    is closed."""
    end.set_inheritable(False)  # a program that takes this process's place, or is started here, has nothing to answer
    os.setpgid(0, 0)  # with what it starts, so that all of them end together
    _die_with_parent()
    gc.freeze()  # objects imported before the fork stay: each collection would take a quarter of a second for them
    # A daemon may not have children, such as a data loader's workers.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that started us, which then ends us
    os.environ[WORLD_VARIABLE] = str(directory)
    _keep_temporary_files_in(directory)
    Watchdog.notice()
    rank_stderr.redirect(directory, rank)
    stacks = (directory / f"rank{rank}.stacks").open("w")
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, stacks)
    if checkout is not None:
        checkout.enter()
    send(end, 0, perform(pickled_call(_join, (rank, size, device, directory, host)), keep=True))
    try:
        _answer_calls(end)
    except BaseException as error:
        with suppress(OSError):
            (directory / f"rank{rank}.end").write_text(f"{type(error).__name__}: {error}")
        raise


def _answer_calls(end: socket.socket) -> None:
    while True:
        try:
            call, work = receive(end)
        except EOFError:
            return
        answer = perform(work)
        with suppress(Exception):  # a call may have closed it
            sys.stdout.flush()
        try:
            send(end, call, answer)
        except BrokenPipeError:
            return
        except OSError as error:
            raise OSError(f"its connection to the test is closed ({error.strerror})") from None


def _keep_temporary_files_in(directory: Path) -> None:
    """Put temporary files into the world's folder, which goes with the world; PyTorch's compiled code stays."""
    compiler = sys.modules.get("torch._inductor.runtime.cache_dir_utils")  # the server has imported it
    if compiler is not None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", compiler.default_cache_dir())
    tempfile.tempdir = str(directory)


def _join(rank: int, size: int, device: str, directory: Path, host: Host | None) -> None:
    if host is not None:
        host.enter()  # while this is the only thread: the group's own threads will then be on the host too
    # Ranks trust whoever connects to Gloo: it stays on loopback whatever the user has chosen for other programs.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if host is None else host.interface
    if device == "cuda":
        nccl.prepare(directory, rank)
    threads = threads_of_a_rank(size)
    # Beside other workers cores would idle, and with a link the link decides.
    if device == "cpu" and _workers() == 1 and host is None:
        process_setup.bind_to_cores(rank, size)  # before the group's threads are there
    join_group(dist.FileStore(str(directory / "rendezvous"), size), rank, size, device, rank, threads)


def join_group(store: dist.Store, rank: int, size: int, device: str, local_rank: int, threads: int) -> None:
    """Join the process group (NCCL or Gloo), a GPU for each rank of this machine, and that many threads."""
    torch.set_num_threads(threads)
    sys.setrecursionlimit(max(sys.getrecursionlimit(), 2000))  # as torch.compile does when it first compiles
    process_setup.keep_compiled_code_apart()
    process_setup.keep_freed_memory()
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")  # it would keep 2,000 collectives, growing like a leak
    Messages.count()
    gpu = None
    if device == "cuda":
        process_setup.let_segments_grow()
        process_setup.bind_near_gpu(local_rank)
        gpu = torch.device("cuda", local_rank)
        torch.cuda.set_device(gpu)
    dist.init_process_group("gloo" if gpu is None else "nccl", store=store, rank=rank, world_size=size, device_id=gpu)


def _die_with_parent() -> None:
    """Have the kernel kill this process and its process group when the parent process ends, however it ends and
    whatever we do.

    The parent holds the write end of a pipe whose read end is its sentinel here; the pipe signals us when it closes. It
    signals one owner: the group is that of the sentinel, and this process, which may leave the group, that of the
    sentinel opened anew. A thread that watches the sentinel would do the same only while something releases the
    interpreter lock.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    again = os.open(f"/proc/self/fd/{parent.sentinel}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    for descriptor, owner in ((parent.sentinel, -os.getpid()), (again, os.getpid())):
        fcntl.fcntl(descriptor, fcntl.F_SETOWN, owner)
        fcntl.fcntl(descriptor, getattr(fcntl, "F_SETSIG", 10), signal.SIGKILL)
        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_ASYNC)
    if select.select([parent.sentinel], [], [], 0)[0]:  # it was gone before the signal was armed
        os._exit(1)
