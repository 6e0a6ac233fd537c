"""Load the instruments, and what they measure."""

import os

import torch

if not torch.cuda.is_available():  # before Triton is imported: its kernels then run in its interpreter, on CPU
    os.environ.setdefault("TRITON_INTERPRET", "1")

import impl  # noqa: F401  (registers every implementation)

pytest_plugins = ["shardmark.plugin"]
