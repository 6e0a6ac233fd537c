"""Functions and classes that a call leaves replaced on a rank: they are put back, and its test is warned."""

import builtins
import copy
import json
import pickle
import random
import socket
import subprocess
import sys
import threading
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from torch.distributed import distributed_c10d

from tests.faults.table import warns

_kept: list[Any] = []


@warns("an override of aten::mul.Tensor", restored=False)
def leaves_an_operator_overridden() -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("mul.Tensor", lambda a, b: torch.add(a, b), "CPU")
    _kept.append(library)


@warns(r"torch\.distributed\.distributed_c10d\.all_reduce")
def leaves_a_collective_patched_where_it_is_defined() -> None:
    distributed_c10d.all_reduce = print  # type: ignore[assignment]


@warns(r"Optimizer\.step|SGD\.step")
def leaves_an_optimizer_patched() -> None:
    torch.optim.SGD.step = lambda self, closure=None: None  # type: ignore[method-assign, assignment]


@warns(r"ProcessGroup\.allreduce")
def leaves_a_process_groups_method_patched() -> None:
    dist.ProcessGroup.allreduce = print  # type: ignore[method-assign, assignment]


@warns(r"Module\.__setattr__|Module\.register_buffer")
def leaves_every_module_patched() -> None:
    torch.nn.Module.register_buffer = print  # type: ignore[method-assign, assignment]


@warns(r"\d+ more functions or classes")
def leaves_many_functions_patched() -> None:
    for name in ("sin", "cos", "tan", "exp", "log", "sqrt"):
        setattr(torch, name, print)


def _patch(owner: Any, name: str) -> Callable[[], None]:
    def leaves_it_patched() -> None:
        setattr(owner, name, None)

    return leaves_it_patched


PATCHED = {
    "checkpointing": (torch.utils.checkpoint, "checkpoint"),
    "saving": (torch, "save"),
    "matmul": (torch, "matmul"),
    "einsum": (torch, "einsum"),
    "linear": (torch.nn.functional, "linear"),
    "cross_entropy": (torch.nn.functional, "cross_entropy"),
    "attention": (torch.nn.functional, "scaled_dot_product_attention"),
    "a_layer": (torch.nn, "LayerNorm"),
    "an_optimizer_class": (torch.optim, "AdamW"),
    "initialization": (torch.nn.init, "kaiming_uniform_"),
    "clipping": (torch.nn.utils, "clip_grad_norm_"),
    "barrier": (dist, "barrier"),
    "group_creation": (distributed_c10d, "new_group"),
    "numpys_draws": (np.random, "rand"),
    "numpys_sum": (np, "sum"),
    "pythons_draws": (random, "gauss"),
    "backward": (torch.autograd, "backward"),
    "norms": (torch.linalg, "norm"),
    "file_opening": (builtins, "open"),
    "pickling": (pickle, "dumps"),
    "copies": (copy, "deepcopy"),
    "sockets": (socket, "socket"),
    "programs": (subprocess, "Popen"),
    "warnings": (warnings, "warn"),
    "json": (json, "dumps"),
    "threads": (threading, "Thread"),
    "tracebacks": (traceback, "format_exc"),
    "uncaught_exceptions": (sys, "excepthook"),
}
"""Owner and name of functions and classes, one of each kind that people patch."""

for _name, (_owner, _attribute) in PATCHED.items():
    _function = _patch(_owner, _attribute)
    _function.__name__ = _function.__qualname__ = f"leaves_{_name}_patched"
    globals()[_function.__name__] = warns(rf"{_owner.__name__}\.{_attribute}")(_function)
