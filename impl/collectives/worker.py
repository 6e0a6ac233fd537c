"""A thread for each process group, beside the caller, that runs collectives one by one in the order of their launch."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import torch.distributed as dist
from torch import Tensor

AT_EXIT = 5.0
"""Seconds that an interpreter waits, when it ends, for collectives that are under way."""

Job = Callable[[], None]


class WorkerWork:
    """A collective that a worker runs. Contract: `impl.collectives.Work`.

    It holds the collective's buffers until it is waited for, so that they are given back on the thread that took them.
    """

    def __init__(self, buffers: Tensor) -> None:
        self._buffers: Tensor | None = buffers
        self._done = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Return when the result is there; raise what went wrong on the way to it."""
        self._done.wait()
        self._buffers = None
        if self._error is not None:
            raise self._error

    def finish(self, error: BaseException | None) -> None:
        """The worker's last word: it holds no tensor of the collective any more."""
        self._error = error
        self._done.set()


class Worker:
    """The thread, which ends with its process group, or with the interpreter."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._queue: SimpleQueue[tuple[Job, WorkerWork] | None] = SimpleQueue()
        # The thread holds neither this object nor the group, or they would never be let go.
        thread = threading.Thread(target=_serve, args=(self._queue,), name="collectives", daemon=True)
        thread.start()
        weakref.finalize(group, _end, thread, self._queue)

    def submit(self, job: Job, buffers: Tensor) -> WorkerWork:
        """Run `job` when all those before it are done. The caller is to hold it no longer."""
        work = WorkerWork(buffers)
        self._queue.put((job, work))
        return work


_workers: weakref.WeakKeyDictionary[dist.ProcessGroup, Worker] = weakref.WeakKeyDictionary()


def worker_of(group: dist.ProcessGroup) -> Worker:
    """The group's worker, started when first asked for."""
    if group not in _workers:
        _workers[group] = Worker(group)
    return _workers[group]


def _end(thread: threading.Thread, queue: SimpleQueue[tuple[Job, WorkerWork] | None]) -> None:
    queue.put(None)
    if thread is not threading.current_thread():  # which may be the last to let go of the group
        thread.join(AT_EXIT)  # a thread that wakes up in C++ while the interpreter ends would abort the process


def _serve(queue: SimpleQueue[tuple[Job, WorkerWork] | None]) -> None:
    while (entry := queue.get()) is not None:
        job, work = entry
        error = None
        try:
            job()
        except BaseException as caught:
            error = caught.with_traceback(None)  # whose frames hold tensors
        del entry, job
        work.finish(error)
        del work, error
