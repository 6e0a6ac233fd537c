"""The process's random numbers and settings, which no call may change."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shardmark.ranks.torch_settings import TORCH

ANOTHER: dict[str, Callable[[Any], Any]] = {
    "the number of threads": lambda now: now + 1,
    "the precision of float32 products": lambda now: "high" if now == "highest" else "highest",
    "attention by flash": lambda now: not now,
}
"""Another value than now of a setting, by its name in TORCH."""


@contextmanager
def settings_stay(what: str) -> Iterator[None]:
    """Assert that the block leaves PyTorch's settings as they are. Some are others than before meanwhile, as an earlier
    call may have set them for good."""
    usual = {name: get() for name, (get, _) in TORCH.items()}
    try:
        for name, another in ANOTHER.items():
            TORCH[name][1](another(usual[name]))
        settings = {name: get() for name, (get, _) in TORCH.items()}
        yield
        for name, setting in settings.items():
            now = TORCH[name][0]()
            assert now == setting, f"{what} leaves {name} at {now}, which was {setting}"
    finally:
        for name in ANOTHER:
            TORCH[name][1](usual[name])


@contextmanager
def random_state_stays(what: str) -> Iterator[None]:
    """Assert that the block draws no random numbers and sets no seed, of PyTorch, Python or NumPy, and that it leaves
    PyTorch's settings as they are: those that follow are the caller's."""

    def states() -> list[Tensor]:
        return [torch.get_rng_state(), *(torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [])]

    def others() -> dict[str, Any]:
        return {"Python": random.getstate(), "NumPy": np.random.get_state(legacy=True)[1:3]}  # type: ignore[index]

    before, theirs = states(), others()
    with settings_stay(what):
        yield
    assert all(map(torch.equal, states(), before)), f"{what} moves the random state, or sets a seed"
    for whose, state in others().items():
        assert repr(state) == repr(theirs[whose]), f"{what} moves the random state of {whose}, or sets its seed"
