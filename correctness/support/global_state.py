"""The process's random numbers and settings, which no call may change."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardmark.ranks.torch_settings import TORCH

USUAL: dict[str, Callable[[Any], Any]] = {
    "the number of threads": lambda now: now + 1,
    "the precision of float32 products": lambda now: "highest",
    "attention by flash": lambda now: True,
}
"""The value of a setting in a new process, by its name in TORCH; one thread more than now."""


@contextmanager
def settings_stay(what: str) -> Iterator[None]:
    """Assert that the block leaves PyTorch's settings as they are. Some are the usual ones meanwhile, as an earlier
    call may have changed them for good."""
    before = {name: get() for name, (get, _) in TORCH.items()}
    try:
        for name, usual in USUAL.items():
            TORCH[name][1](usual(before[name]))
        settings = {name: get() for name, (get, _) in TORCH.items()}
        yield
        for name, setting in settings.items():
            now = TORCH[name][0]()
            assert now == setting, f"{what} leaves {name} at {now}, which was {setting}"
    finally:
        for name, (get, restore) in TORCH.items():
            if get() != before[name]:
                restore(before[name])


@contextmanager
def random_state_stays(what: str) -> Iterator[None]:
    """Assert that the block draws no random numbers and sets no seed, of PyTorch, Python or NumPy."""

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]

    def others() -> dict[str, Any]:
        _, keys, place, *_ = np.random.get_state(legacy=True)
        return {"Python": random.getstate(), "NumPy": (np.asarray(keys).tobytes(), place)}

    outside = torch.get_rng_state()
    torch.rand(())  # a state that no seed gives
    before, theirs = states(), others()
    try:
        yield
        assert all(map(torch.equal, states(), before)), f"{what} moves the random state, or sets a seed"
        for whose, state in others().items():
            assert state == theirs[whose], f"{what} moves the random state of {whose}, or sets its seed"
    finally:
        torch.set_rng_state(outside)


@contextmanager
def global_state_stays(what: str) -> Iterator[None]:
    """Assert that the block draws no random numbers, sets no seed, and leaves PyTorch's settings as they are: what
    follows is the caller's."""
    with random_state_stays(what), settings_stay(what):
        yield
