"""Load the instruments, and what they measure."""

import os

import torch

from shardmark.ranks.process_setup import begin_with_own_device

begin_with_own_device()  # before CUDA is asked whether it works: from then on its devices have their order
if not torch.cuda.is_available():  # before Triton is imported: its kernels then run in its interpreter, on CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")

import impl  # noqa: E402, F401  (registers every implementation)

pytest_plugins = ["shardmark.plugin"]
