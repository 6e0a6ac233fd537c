"""Settings that a call leaves changed on a rank, and threads at work: restored or replaced, and its test is warned."""

import decimal
import faulthandler
import gc
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.autograd import graph

from tests.faults.table import on_rank_1, warns

_kept: list[Any] = []

# PyTorch's.


@warns("autocast's dtype on cpu")
def leaves_autocasts_dtype() -> None:
    torch.set_autocast_dtype("cpu", torch.float16)


@warns("autocast on cpu", everywhere=False)
def leaves_autocast_entered() -> None:
    torch.autocast("cpu").__enter__()


@warns("the precision of float32 products")
def leaves_another_precision() -> None:
    torch.set_float32_matmul_precision("medium")


@warns(r"float32's precision \(mkldnn, matmul\)")
def leaves_another_precision_of_mkldnn() -> None:
    torch._C._set_fp32_precision_setter("mkldnn", "matmul", "bf16")


@warns("PyTorch's cudnn_benchmark")
def leaves_cudnn_benchmarking() -> None:
    torch.backends.cudnn.benchmark = True


@warns("PyTorch's mkldnn_enabled")
def leaves_mkldnn_off() -> None:
    torch._C._set_mkldnn_enabled(False)


@warns("PyTorch's deterministic_fill_uninitialized_memory")
def leaves_memory_unfilled() -> None:
    torch.utils.deterministic.fill_uninitialized_memory = False


@warns("attention by flash")
def leaves_attention_without_flash() -> None:
    torch.backends.cuda.enable_flash_sdp(False)


@warns("autograd's anomaly detection")
def leaves_anomaly_detection() -> None:
    torch.autograd.set_detect_anomaly(True)


@warns("autograd's threads")
def leaves_one_thread_to_autograd() -> None:
    torch._C._set_multithreading_enabled(False)


@warns("a hook of saved tensors")
def leaves_a_hook_of_saved_tensors() -> None:
    graph.saved_tensors_hooks(lambda x: x, lambda x: 0 * x).__enter__()


@warns("flushing of denormal numbers")
def leaves_denormals_flushed() -> None:
    torch.set_flush_denormal(not torch.full((), 1e-310, dtype=torch.float64).mul(1.0).eq(0))


@warns("inference mode entered", restored=False)
def leaves_inference_mode() -> None:
    _kept.append(torch.inference_mode())
    _kept[-1].__enter__()


@warns("how tensors are printed")
def leaves_tensors_printed_short() -> None:
    torch.set_printoptions(precision=1)


@warns("the compiler's configuration")
def leaves_dynamos_configuration() -> None:
    torch._dynamo.config.suppress_errors = not torch._dynamo.config.suppress_errors


@warns("the compiler's configuration", everywhere=False)
def leaves_functorchs_configuration() -> None:
    import torch._functorch.config as config

    config.debug_assert = not config.debug_assert


# NumPy's and Python's.


@warns("how NumPy handles errors")
def leaves_numpys_warnings_as_errors() -> None:
    np.seterr(all="raise")


@warns("how NumPy prints")
def leaves_numpy_printing_short() -> None:
    np.set_printoptions(precision=1)


@warns("how decimals are rounded")
def leaves_decimals_rounded_down() -> None:
    decimal.getcontext().rounding = decimal.ROUND_DOWN


@warns("the level of logging")
def leaves_logging_off() -> None:
    logging.disable(logging.CRITICAL)


@warns("the seconds between threads")
def leaves_threads_longer() -> None:
    sys.setswitchinterval(10)


class Nowhere:
    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        raise ImportError(name)


@warns(r"how modules are found \(sys\.meta_path\)")
def leaves_no_modules_to_be_found() -> None:
    sys.meta_path.insert(0, Nowhere())  # type: ignore[arg-type]


@warns("sys.path")
def leaves_no_path_of_modules() -> None:
    sys.path.clear()


@warns("the interpreter's trace function")
def leaves_a_trace_function() -> None:
    sys.settrace(lambda frame, event, argument: None)


@warns("the interpreter's profile function")
def leaves_a_profile_function() -> None:
    sys.setprofile(lambda frame, event, argument: None)


@warns("what garbage collection calls")
def leaves_a_callback_of_garbage_collection() -> None:
    gc.callbacks.append(lambda phase, info: None)


@warns("the folder of temporary files")
def leaves_another_folder_of_temporary_files() -> None:
    tempfile.tempdir = "/nowhere"


@warns("the default timeout of sockets")
def leaves_a_timeout_of_sockets() -> None:
    socket.setdefaulttimeout(1e-3)


@warns("a watchdog of faulthandler")
def leaves_a_watchdog() -> None:
    faulthandler.dump_traceback_later(0.2, exit=True)


@warns("the environment's OMP_NUM_THREADS")
def leaves_openmps_threads() -> None:
    os.environ["OMP_NUM_THREADS"] = "7"


@warns("the environment's CUDA_VISIBLE_DEVICES")
def leaves_no_visible_devices() -> None:
    os.environ["CUDA_VISIBLE_DEVICES"] = ""


@warns("the environment's PATH", everywhere=False)
def leaves_no_path() -> None:
    del os.environ["PATH"]


@warns("a signal handler changed", restored=False)
def leaves_a_handler_of_the_signal_that_asks_for_stacks() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


# Threads.


def all_reduce_later() -> None:
    time.sleep(0.3)
    dist.all_reduce(torch.ones(5))


@warns("a thread still at work", everywhere=False, restored=False)
def leaves_a_collective_to_a_pool() -> None:
    _kept.append(ThreadPoolExecutor(1))
    _kept[-1].submit(all_reduce_later)


@warns("a thread still at work", everywhere=False, restored=False)
def leaves_a_collective_to_a_daemon() -> None:
    threading.Thread(target=all_reduce_later, daemon=True).start()


@warns("a thread still at work", restored=False)
def leaves_a_thread_spinning() -> None:
    def spin() -> None:
        while True:
            pass

    threading.Thread(target=spin, daemon=True).start()


@warns("2 threads still at work", everywhere=False, restored=False)
def leaves_two_threads() -> None:
    assert on_rank_1()
    for _ in range(2):
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
