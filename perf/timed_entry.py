"""Ranks that train as this process tells them, step by step, timed by this process's clock.

    with told(Training(case, "shard=2", entry="entry.py:make", weights=7), "cpu", caches, 600) as ranks:
        (losses_and_norms, seconds) = ranks.ask("step", shares)

An entry is imported on its ranks alone. So it can reach neither the clock nor the tokens of a later step.
"""

from __future__ import annotations

import gc
import math
import os
import resource
import signal
import socket
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.utils.checkpoint import checkpoint

from impl.mesh import Decoder, Objective, OneProcess, by_mesh
from impl.mesh.cases import SIZES
from impl.mesh.decoder import Batch, losses_of, token_count, token_losses
from shardmark.api import Mesh, resolve
from shardmark.ranks.attributes import Attributes
from shardmark.ranks.left_behind import LeftBehind
from shardmark.ranks.threads import Threads
from shardmark.ranks.world import RankError, World

ROOT = Path(__file__).parents[1]
JUDGE = ("impl", "perf", "shardmark", "time")
"""Packages whose functions an entry may not replace."""
CLOCKS = ("torch.cuda.Event", "torch.cuda.synchronize")
CHUNK = 2048
"""Tokens whose logits the light reference has in memory at a time."""
SAMPLES = 4096
"""Most elements of a tensor that are compared, drawn at random."""


@dataclass(frozen=True)
class EntryCase:
    """A step of AdamW, with PyTorch's defaults and without clipping, of a decoder (`impl.mesh.cases.SIZES`) in `dtype`,
    on `batch` rows of `context` tokens over all ranks.

    The reference is eager, `light` where eager does not fit: row by row, each layer recomputed in backward, logits by
    chunks. It runs in `dtype` and in `exact`, and their difference says what rounding does.
    """

    model: str
    batch: int
    context: int
    dtype: str
    exact: str
    light: bool = False


@dataclass(frozen=True)
class Training:
    """A world's task: the entry on its mesh, or without one the reference, on one rank, in `dtype`. `weights` seeds
    the model."""

    case: EntryCase
    weights: int
    dtype: str
    mesh: str = "dp=1"
    entry: str | None = None

    def shares(self, tokens: Tensor) -> list[list[tuple[Any, ...]]]:
        """Each rank's micro-batches of (rows, context + 1) tokens: tokens, positions and targets, as NumPy arrays."""
        rows, context = len(tokens), tokens.shape[1] - 1
        whole = tokens[:, :-1], torch.arange(context).expand(rows, -1), tokens[:, 1:]
        mesh = Mesh.parse(self.mesh)
        each = [mesh.share(whole, rank) for rank in range(mesh.size)]
        if self.entry is None and self.case.light:
            return [list(zip(*(part.numpy()[:, None] for part in whole), strict=True))]
        return [[tuple(part.numpy() for part in share)] for share in each]


class Ranks:
    """The ranks of a world, each at the other end of a connection. Asking raises RankError where one of them fails."""

    def __init__(self, running: Future[list[None]], connections: Sequence[Connection]) -> None:
        self._running, self._connections = running, connections

    def ask(self, what: str, given: Sequence[Any]) -> tuple[list[Any], float]:
        """Send each rank its part of `given`; return what they answer, and the seconds until all have answered."""
        answers: dict[Connection, Any] = {}
        began = time.perf_counter()
        try:
            for connection, own in zip(self._connections, given, strict=True):
                connection.send((what, own))
            while waiting := [each for each in self._connections if each not in answers]:
                for connection in wait(waiting):
                    answers[connection] = connection.recv()  # type: ignore[index,union-attr]
        except (EOFError, OSError):
            self._running.result()
            raise RankError("its ranks have hung up", 0) from None
        return [answers[each] for each in self._connections], time.perf_counter() - began

    def ask_all(self, what: str, given: Any = None) -> list[Any]:
        """Ask all ranks the same, which is not timed."""
        return self.ask(what, [given] * len(self._connections))[0]


@contextmanager
def told(training: Training, device: str, caches: str, seconds: float) -> Iterator[Ranks]:
    """New processes, with the empty folder `caches` for compiled code, which wait to be told to train. They have
    `seconds` for all of it; RankError where they take longer."""
    size = Mesh.parse(training.mesh).size
    with (
        tempfile.TemporaryDirectory() as folder,
        World(size, device) as world,
        ThreadPoolExecutor(1) as pool,
        socket.socket(socket.AF_UNIX) as server,
    ):
        server.bind(path := f"{folder}/clock")
        server.listen(size)
        running = pool.submit(_run, world, training, device, caches, path, seconds)
        connections: dict[int, Connection] = {}
        try:
            while len(connections) < size and not (running.done() and running.result()):
                if wait([server], 0.1):
                    connection = Connection(server.accept()[0].detach())
                    connections[connection.recv()] = connection
            yield Ranks(running, [connections[rank] for rank in range(size)])
        except KeyboardInterrupt:
            for rank in world.pids:
                os.kill(rank, signal.SIGKILL)
            raise
        finally:
            for connection in connections.values():
                connection.close()
        running.result()


def _run(world: World, training: Training, device: str, caches: str, path: str, seconds: float) -> list[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LeftBehind)  # an entry may set options of PyTorch; `Rank` looks for the rest
        return world.run(train_as_told, training, device, caches, path, deadline=seconds)


def train_as_told(training: Training, device: str, caches: str, path: str) -> None:
    """On a rank: do what the other end asks, until it hangs up."""
    os.environ |= {"TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor", "TRITON_CACHE_DIR": f"{caches}/triton"}
    end = socket.socket(socket.AF_UNIX)
    end.connect(path)
    with Connection(end.detach()) as clock:
        clock.send(dist.get_rank())
        rank = Rank(training, device, caches)
        while True:
            try:
                what, given = clock.recv()
            except (EOFError, OSError):
                return
            clock.send(getattr(rank, what)(given))


class Rank:
    """A rank's trainer. Each method answers a question of the same name."""

    def __init__(self, training: Training, device: str, caches: str) -> None:
        self._device, self._synchronize, self._caches = device, torch.cuda.synchronize, caches
        self._modules = set(sys.modules)
        self._judge = Attributes(lambda name: name.partition(".")[0] in JUDGE or name == "torch.cuda", _classes_in)
        self._judge.look()
        self._threads = Threads()
        model = partial(_model, training, device)
        if training.entry is not None:
            on = Mesh.parse(training.mesh).device_mesh(device)
            make = resolve("mesh", training.entry).adapted
            self.trainer = make(model, _adamw, on, max_norm=math.inf)
        else:
            objective = Objective(light_losses if training.case.light else token_losses, token_count)
            self.trainer = OneProcess(model, _adamw, None, max_norm=math.inf, objective=objective)

    def step(self, batches: Sequence[tuple[np.ndarray, ...]]) -> tuple[float, float, str | None]:
        """Train on these; the loss, the norm and what is still at work when the device has finished."""
        own = [tuple(torch.from_numpy(each).to(self._device) for each in batch) for batch in batches]
        loss, norm = self.trainer.step(own)
        if self._device == "cuda":
            self._synchronize()
        return float(loss), float(norm), self._threads.at_work()

    def read(self, seed: int) -> dict[str, np.ndarray]:
        """Elements of every parameter, drawn by that seed."""
        return _samples(self.trainer.full_parameters(), seed)

    def gradients(self, seed: int) -> dict[str, np.ndarray]:
        """Elements of every gradient of the last step."""
        return _samples(self.trainer.full_gradients(), seed)

    def begin(self, _: None) -> None:
        """The timed steps begin."""
        gc.collect()
        if self._device == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def peak(self, _: None) -> int:
        """Bytes at the peak since `begin`: of CUDA's allocator; without it, of the process since its start."""
        if self._device == "cuda":
            return torch.cuda.max_memory_allocated()
        return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    def replaced(self, _: None) -> list[str]:
        """Names of the judge's functions, and of clocks, that are others now."""
        return [name for name in self._judge.put_back() if not name.startswith("torch.") or name in CLOCKS]

    def files(self, _: None) -> list[str]:
        """Files of the modules that were imported since, and are neither installed nor the suite's, nor what a compiler
        has written to the caches."""
        new = (getattr(sys.modules[name], "__file__", None) for name in set(sys.modules) - self._modules)
        rooms = [*(Path(sysconfig.get_path(each)) for each in ("stdlib", "platstdlib", "purelib", "platlib"))]
        rooms += [*(ROOT / each for each in ("impl", "perf", "shardmark")), Path(self._caches).resolve()]
        paths = (Path(file).resolve() for file in new if file and file.endswith(".py"))
        return sorted(str(path) for path in paths if not any(path.is_relative_to(room) for room in rooms))


def _classes_in(module: Any) -> list[type]:
    own = [each for each in vars(module).values() if isinstance(each, type)]
    return [each for each in own if each.__module__ == module.__name__ and module.__name__ != "torch.cuda"]


def _model(training: Training, device: str) -> Decoder:
    """The model, whose seeded weights are rounded to `case.dtype`, so that all runs begin with the same."""
    torch.manual_seed(training.weights)
    with torch.device(device):
        return Decoder(SIZES[training.case.model]).to(getattr(torch, training.case.dtype)).to(_dtype(training))


def _dtype(training: Training) -> torch.dtype:
    return getattr(torch, training.dtype)


def _adamw(named: Sequence[tuple[str, nn.Parameter]]) -> Optimizer:
    return AdamW(by_mesh([parameter for _, parameter in named]), fused=True)


def _samples(tensors: Any, seed: int) -> dict[str, np.ndarray]:
    """At most SAMPLES elements of each tensor, in float64."""
    found = {}
    for name in sorted(tensors):
        random = torch.Generator().manual_seed(seed)
        flat = tensors[name].detach().flatten()
        where = torch.randint(len(flat), (min(SAMPLES, len(flat)),), generator=random)
        found[name] = flat[where.to(flat.device)].double().cpu().numpy()
    return found


def light_losses(model: Decoder, batch: Batch) -> Tensor:
    """`token_losses` in the memory of one layer, one chunk of logits and each layer's input."""
    tokens, positions, targets = batch
    x = model.tok_embeddings(tokens)
    for layer in model.layers:
        x = _again(layer, x, positions)
    hidden = model.norm(x).split(CHUNK, 1)
    parts = zip(hidden, targets.split(CHUNK, 1), strict=True)
    return torch.stack([_again(lambda h, t: losses_of(model.output(h), t), *part) for part in parts]).sum()


def _again(function: Callable[..., Tensor], *inputs: Tensor) -> Tensor:
    return checkpoint(function, *inputs, use_reentrant=False)
