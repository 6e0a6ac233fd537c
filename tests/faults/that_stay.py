"""Changes that a call leaves on a rank, of which its test is warned; and calls that harm nobody."""

import gc
import math
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import zlib
from multiprocessing.shared_memory import SharedMemory
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.faults.table import fails, on_rank_1, passes, warns

# It changes its process.


@warns("torch's default dtype")
def leaves_another_dtype() -> None:
    torch.set_default_dtype(torch.float64)


@warns("torch's default device")
def leaves_another_device() -> None:
    torch.set_default_device("meta")


@warns("the number of threads")
def leaves_more_threads() -> None:
    torch.set_num_threads(torch.get_num_threads() + 1)


@warns("grad mode")
def leaves_no_grad_mode() -> None:
    torch.set_grad_enabled(False)


@warns("autocast on cuda")
def leaves_autocast() -> None:
    torch.set_autocast_enabled("cuda", True)


@warns("deterministic algorithms")
def leaves_deterministic_algorithms() -> None:
    torch.use_deterministic_algorithms(True)


@warns("a filter that makes warnings errors")
def leaves_warnings_as_errors() -> None:
    warnings.simplefilter("error")


@warns("the working directory")
def leaves_a_folder_that_is_gone() -> None:
    os.chdir(tempfile.mkdtemp())
    os.rmdir(os.getcwd())


@warns("the environment's RUN_NAME", everywhere=False)
def leaves_a_variable() -> None:
    os.environ["RUN_NAME"] = "mine"


@warns(r"\d+ more of the environment's variables")
def leaves_no_environment() -> None:
    os.environ.clear()
    for number in range(10):
        os.environ[f"OWN_{number}"] = "1"


@warns(r"torch\.nn\.functional\.relu")
def leaves_a_patched_function() -> None:
    torch.nn.functional.relu = torch.sigmoid


@warns(r"torch\.distributed\.all_reduce")
def leaves_a_patched_collective() -> None:
    dist.all_reduce = print  # type: ignore[assignment]


@warns(r"torch\.nn\.functional\.gelu")
def leaves_a_function_deleted() -> None:
    del torch.nn.functional.gelu


@warns(r"Linear\.forward")
def leaves_a_patched_layer() -> None:
    torch.nn.Linear.forward = lambda self, x: x  # type: ignore[method-assign, assignment]


@warns(r"Tensor\.sum")
def leaves_a_patched_method() -> None:
    torch.Tensor.sum = lambda self: 0  # type: ignore[method-assign, assignment]


@warns(r"time\.perf_counter")
def leaves_a_patched_clock() -> None:
    time.perf_counter = lambda: 0.0


@warns(r"math\.sqrt")
def leaves_patched_arithmetic() -> None:
    math.sqrt = lambda x: x  # type: ignore[assignment]


@warns("a hook of all modules")
def leaves_a_hook() -> None:
    torch.nn.modules.module.register_module_forward_hook(lambda module, args, output: 0)


@warns("a timer changed", everywhere=False, restored=False)
def leaves_an_alarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.2)


@warns("a timer changed", restored=False)
def leaves_a_timer_of_its_cpu_seconds() -> None:
    signal.setitimer(signal.ITIMER_VIRTUAL, 1000)


@warns("a resource limit changed", restored=False)
def leaves_a_limit_of_open_files() -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (5, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))


@warns(r"the mode of new files \(umask\) changed", restored=False)
def leaves_another_umask() -> None:
    os.umask(0o777)


@warns("its scheduling policy changed", restored=False)
def leaves_another_scheduling_policy() -> None:
    other = os.SCHED_OTHER if os.sched_getscheduler(0) == os.SCHED_BATCH else os.SCHED_BATCH
    os.sched_setscheduler(0, other, os.sched_param(0))


@warns("its priority changed", restored=False)
def leaves_another_priority() -> None:
    os.nice(1)


@warns("its process group changed", restored=False)
def leaves_its_process_group() -> None:
    os.setpgid(0, os.getpgid(os.getppid()))


@warns("the cores it may run on changed", restored=False)
def leaves_other_cores() -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)} if len(allowed) > 1 else set(range(os.cpu_count() or 1)))


@warns("a signal handler changed", restored=False)
def leaves_a_handler() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


@warns("the mask of blocked signals changed", restored=False)
def leaves_signals_blocked() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


@warns("garbage collection")
def leaves_garbage() -> None:
    gc.disable()


@warns("the recursion limit")
def leaves_no_room_to_recurse() -> None:
    sys.setrecursionlimit(sys.getrecursionlimit() // 2)


@warns("sys.stdin, stdout or stderr", everywhere=False)
def leaves_no_output() -> None:
    sys.stdout = None  # type: ignore[assignment]


@warns("sys.stdin, stdout or stderr closed", everywhere=False, restored=False)
def leaves_its_output_closed() -> None:
    sys.stdout.close()


@warns("the file behind its standard input, output or error changed", everywhere=False, restored=False)
def leaves_its_descriptors_closed() -> None:
    os.closerange(0, 3)


@warns("the file behind its standard input, output or error changed", restored=False)
def leaves_its_descriptors_redirected() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open("/proc/self/status", os.O_RDONLY), 0)


@warns("a thread still at work", everywhere=False, restored=False)
def leaves_a_thread() -> None:
    threading.Thread(target=time.sleep, args=(1000,)).start()


class Zeros(TorchFunctionMode):
    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.zeros(2)


@warns("Zeros entered", restored=False)
def leaves_a_mode() -> None:
    Zeros().__enter__()


class Refusing(TorchDispatchMode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise ValueError("no operator runs in here")


@warns("Refusing entered", restored=False)
def leaves_a_dispatch_mode() -> None:
    Refusing().__enter__()


@warns("another process group, or none, in place of the world's", restored=False)
def leaves_no_group() -> None:
    dist.destroy_process_group()


@warns("collectives that not every rank began", restored=False)
def leaves_half_a_collective() -> None:
    if on_rank_1():
        dist.all_reduce(torch.ones(3), async_op=True)


@warns("messages to rank 0: 1 sent, 0 received", restored=False)
def leaves_a_message() -> None:
    if on_rank_1():
        dist.isend(torch.ones(3), 0)


# Calls that harm nobody.


@passes()
def draws_from_seeds_of_its_own() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


@passes()
def makes_groups() -> None:
    for _ in range(3):
        dist.new_group()


@passes()
def is_forked_and_comes_back_twice() -> bool:
    return os.fork() == 0


@passes()
def starts_a_daemon() -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)


FOLDER = "SHARDMARK_FAULT_RUN"
"""Environment variable with a run's folder, by which a test knows every process that the run has started."""
_kept: list[Any] = []


def shared_memory_prefix(folder: str) -> str:
    """The prefix of a run's shared memory, by its folder: a run beside it has another."""
    return f"shardmark_fault_{zlib.crc32(folder.encode())}_"


def _keep_shared_memory() -> None:
    name = f"{shared_memory_prefix(os.environ.get(FOLDER, ''))}{os.getpid()}_{len(_kept)}"
    _kept.append(SharedMemory(create=True, size=100, name=name))


@passes()
def keeps_shared_memory() -> None:
    _keep_shared_memory()


@fails("exited with 6$", everywhere=True)
def ends_with_shared_memory_and_files() -> None:
    _keep_shared_memory()
    _kept.append(tempfile.mkstemp())
    os._exit(6)
