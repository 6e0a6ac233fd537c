"""The calibration load: a fixed amount of work, timed in the same rounds as a case.

A step's ratio to its peer does not change if both get slower alike. Its ratio to this load does, as nothing that a user
changes is in it: matrix products, copies beyond the caches, and Python.
"""

from __future__ import annotations

import torch

from shardmark.api.workload import Mark

_WIDTH = {"cpu": 192, "cuda": 1024}
_PRODUCTS = 3
_COPIED = {"cpu": 2**20, "cuda": 2**22}
"""Floats of a copy."""
_ITERATIONS = 4_000


class Load:
    """Some two milliseconds of work on one core."""

    backend = "torch"

    def __init__(self, device: str) -> None:
        width = _WIDTH[device]
        self._matrix = torch.full((width, width), 1.0 / width, device=device)
        self._source = torch.ones(_COPIED[device], device=device)
        self._target = torch.empty_like(self._source)

    def prepare(self) -> None:
        """Do nothing: each step starts from the same tensors."""

    def step(self, mark: Mark) -> None:
        """Multiply matrices, copy memory, and run a loop of Python."""
        for _ in range(_PRODUCTS):
            torch.mm(self._matrix, self._matrix)
        self._target.copy_(self._source)
        total = 0
        for i in range(_ITERATIONS):
            total += i & 1
