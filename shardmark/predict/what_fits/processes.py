"""Predictions in processes, one for each core, each made once."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import replace
from threading import Lock
from typing import Any

from shardmark.api.recipe import PLAIN, Recipe
from shardmark.meter.hardware import Hardware
from shardmark.predict.what_fits.prediction import ModelFacts, Prediction, Refused, Strategy, followed, predicted
from shardmark.ranks.rank import available_cores


class Predictions:
    """Predictions of one model, each made once. Devices that need the same memory share a prediction."""

    def __init__(self, spec: str, devices: Sequence[Hardware], recipe: Recipe = PLAIN) -> None:
        """`devices` are all that will be asked about. RegistryError, in one line, where there is no such model."""
        # Not forked: a process that has computed before, as pytest's has, leaves its fork waiting for threads for ever.
        self._pool = ProcessPoolExecutor(available_cores(), multiprocessing.get_context("spawn"))
        self._devices = devices
        self._asked: dict[Any, Future[Prediction | Refused]] = {}
        self._lock = Lock()
        self.model: ModelFacts
        try:
            self.model = self._pool.submit(followed, spec, recipe).result()
        except BaseException:
            self.close()
            raise

    def ask(
        self, strategy: Strategy, ranks: int, on: Hardware, dim: int = 0, size: int | None = None
    ) -> Callable[[], Prediction | Refused]:
        """Begin to predict; the returned function waits for the result. `size` is the batch's size in dimension `dim`,
        None for the user's own."""
        other: dict[str, Any] = {} if size in (None, self.model.sizes[dim]) else {("batch", "context")[dim]: size}
        case = replace(self.model.case, ranks=ranks, **other)
        key = strategy, case, on.rules
        with self._lock:
            if key not in self._asked:
                alike = [each for each in self._devices if each.rules == on.rules and each != on]
                self._asked[key] = self._pool.submit(predicted, strategy, case, on, alike)
            return self._asked[key].result

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)
