"""What tests have ranks do."""

import os
import re

import torch
import torch.distributed as dist


def identity() -> tuple[int, int, int]:
    return dist.get_rank(), dist.get_world_size(), os.getpid()


def scaled_sum(tensor: torch.Tensor, factor: float, device: str) -> torch.Tensor:
    tensor = tensor.to(device) * factor * (dist.get_rank() + 1)
    dist.all_reduce(tensor)
    return tensor.cpu()


def hang_in_c_with_the_interpreter_locked() -> None:
    re.match(r"(a+)+$", "a" * 40 + "b")
