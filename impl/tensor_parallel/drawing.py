"""Random numbers on the ranks of `tp`, whose default generators are in the same state, and remain so."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from impl.tensor_parallel.communication import Group


@contextmanager
def drawing_apart(device: torch.device, group: Group) -> Iterator[None]:
    """Draw other random numbers on each rank of the group, from a seed that the ranks draw alike (Shoeybi et al.,
    "Megatron-LM", 2019, appendix B.2). Recomputing begins with the same state, and so draws the same seed."""
    seed = int(torch.randint(2**62, (), device="cpu"))  # of the host's generator: nothing waits for the device
    generator = _default_generator(device)
    state = generator.get_state()
    generator.manual_seed(seed + group.rank())
    try:
        yield
    finally:
        generator.set_state(state)


def _default_generator(device: torch.device) -> torch.Generator:
    if device.type == "cuda":
        return torch.cuda.default_generators[device.index]
    return torch.default_generator
