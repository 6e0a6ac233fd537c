"""Every fault of the table, and what the next test must meet after any of them."""

import gc
import math
import os
import random
import resource
import signal
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.faults import that_fail, that_patch, that_set, that_stay
from tests.faults.table import FAULTS as FAULTS

MODULES = that_fail, that_stay, that_set, that_patch


def state() -> list[Any]:
    """The state that the next test finds on a rank: always the same, but for the rank's own place."""
    layer = torch.nn.Linear(2, 1, bias=False)
    draws = random.random(), float(np.random.rand()), torch.rand(()).item()
    total = torch.full((2,), 1.0)
    dist.all_reduce(total)
    return [
        total.tolist() == [dist.get_world_size()] * 2,
        layer(torch.ones(1, 2)).shape,
        torch.ones(()).dtype,
        torch.ones(()).device,
        torch.get_num_threads(),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled("cuda"),
        torch.are_deterministic_algorithms_enabled(),
        torch.nn.functional.relu(-torch.ones(1)).tolist(),
        torch.full((3,), 2.0).sum().item(),
        math.sqrt(4.0),
        time.perf_counter() > 0,
        gc.isenabled(),
        sys.getrecursionlimit(),
        resource.getrlimit(resource.RLIMIT_NOFILE),
        os.umask(os.umask(0o22)),
        os.path.isdir(os.getcwd()),
        "RUN_NAME" in os.environ,
        "PATH" in os.environ,
        signal.getitimer(signal.ITIMER_REAL)[0],
        draws,
    ]
