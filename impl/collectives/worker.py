"""One thread for each process group that runs collectives, one by one, in the order in which they were started."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue

import torch
import torch.distributed as dist
from torch import Tensor

AT_EXIT = 5.0
"""Seconds that the interpreter waits at its end for unfinished collectives."""

Job = Callable[[], None]


class WorkerHandle:
    """Handle of a collective that a worker runs. Contract: `impl.collectives.Handle`.

    It holds the collective's buffers until `wait`, so that the thread that allocated them frees them.
    """

    def __init__(self, buffers: Tensor) -> None:
        self._buffers: Tensor | None = buffers
        self._done = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Return when the result is written; raise what the collective raised."""
        self._done.wait()
        self._buffers = None
        if self._error is not None:
            raise self._error

    def finish(self, error: BaseException | None) -> None:
        """Called by the worker once it holds no tensor of the collective any more."""
        self._error = error
        self._done.set()


class Worker:
    """Owns the thread, which ends with its process group, or with the interpreter."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._queue: SimpleQueue[tuple[Job, WorkerHandle] | None] = SimpleQueue()
        # The thread must not reference this object or the group: neither would ever be freed.
        thread = threading.Thread(target=_serve, args=(self._queue,), name="collectives", daemon=True)
        thread.start()
        weakref.finalize(group, _end, thread, self._queue)

    def submit(self, job: Job, buffers: Tensor) -> WorkerHandle:
        """Run `job` after all those before it. The caller must drop its own reference to `job`."""
        handle = WorkerHandle(buffers)
        self._queue.put((job, handle))
        return handle


_workers: weakref.WeakKeyDictionary[dist.ProcessGroup, Worker] = weakref.WeakKeyDictionary()


def worker_of(group: dist.ProcessGroup) -> Worker:
    """The group's worker, which the first call starts."""
    if group not in _workers:
        _workers[group] = Worker(group)
    return _workers[group]


def _end(thread: threading.Thread, queue: SimpleQueue[tuple[Job, WorkerHandle] | None]) -> None:
    queue.put(None)
    if thread is not threading.current_thread():  # the thread itself may drop the last reference to the group
        thread.join(AT_EXIT)  # a thread that returns from C++ while the interpreter shuts down aborts the process


@torch.inference_mode()  # which is a thread's own: the caller's tensors may be those of inference mode, or others
def _serve(queue: SimpleQueue[tuple[Job, WorkerHandle] | None]) -> None:
    while (entry := queue.get()) is not None:
        job, handle = entry
        error = None
        try:
            job()
        except BaseException as caught:
            error = caught.with_traceback(None)  # the frames of a traceback hold tensors
        del entry, job
        handle.finish(error)
        del handle, error
