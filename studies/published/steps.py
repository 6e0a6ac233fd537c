"""Programs of write-ups that publish their times: what is made beforehand, and the timed step.

A step marks the moments at which its author read the clock, having waited for the device unless it says otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import cross_entropy

from impl.data_parallel.bucketed import BucketedDataParallel
from impl.data_parallel.flat import FlatDataParallel
from impl.data_parallel.naive import NaiveDataParallel
from impl.fsdp.simple import data_parallel
from impl.model.mlp import MLP_SIZES, MLPLanguageModel
from impl.model.sizes import SIZES
from shardmark.predict.simulation.schedule import Mark, Schedule
from studies.published.programs import AdamW, Softmax, Transformer, loss_by_parts, softmax_by_parts

Step = Callable[[Mark], None]
Timed = Callable[[Schedule], Step]
"""Makes what the step needs, and returns the step. Equal arguments give the same program object."""

DO_BENCH = 256 * 2**20
"""Bytes that Triton's `do_bench` zeroes before each call, while the host launches the timed code."""


@cache
def transformer(size: str, length: int, dtype: torch.dtype, *, optimizer: bool = False) -> Timed:
    """The course's model on 4 sequences: forward with loss, backward, and the course's AdamW."""

    def make(schedule: Schedule) -> Step:
        model = Transformer(SIZES[size], length, softmax_by_parts)
        tokens, targets = torch.zeros(2, 4, length, dtype=torch.long)
        adamw = AdamW(model.parameters())

        def step(mark: Mark) -> None:
            with _autocast(dtype):
                loss = loss_by_parts(model(tokens), targets)
            _end("forward", schedule, mark)
            loss.backward()
            _end("backward", schedule, mark)
            if optimizer:
                adamw.step()
                _end("optimizer step", schedule, mark)

        if optimizer:  # from then on AdamW has its moments
            step(_nothing)
            model.zero_grad()
        return step

    return make


def _autocast(dtype: torch.dtype) -> AbstractContextManager[object]:
    """Autocast to that dtype; float32 needs none."""
    return torch.autocast("cpu", dtype) if dtype != torch.float32 else nullcontext()


def _nothing(part: str, of_host: bool = False) -> None:
    """The mark of a step that is not timed."""


def _end(part: str, schedule: Schedule, mark: Mark) -> None:
    """End a part; the host waits for the device first."""
    schedule.synchronize()
    mark(part)


@cache
def attention(width: int, length: int, softmax: Softmax, *, waits: bool = True) -> Timed:
    """Attention of 8 sequences without heads or mask. If the program does not wait after forward (`waits`), forward's
    time is the host's, and backward's has the rest.
    """

    def make(schedule: Schedule) -> Step:
        q, k, v = (torch.randn(8, length, width, requires_grad=True) for _ in range(3))
        gradient = torch.randn(8, length, width)

        def step(mark: Mark) -> None:
            output = softmax(q @ k.transpose(-1, -2) / math.sqrt(width)) @ v
            if waits:
                schedule.synchronize()
            mark("forward", of_host=not waits)
            output.backward(gradient)
            _end("backward", schedule, mark)

        return step

    return make


@cache
def causal_attention(width: int, length: int, dtype: torch.dtype, what: str) -> Timed:
    """The course's attention of one sequence and head, with a ready mask: "forward", "backward" or both."""

    def make(schedule: Schedule) -> Step:
        q, k, v = (torch.randn(1, length, width, requires_grad=True) for _ in range(3))
        mask = torch.ones(length, length, dtype=torch.bool)
        gradient = torch.randn(1, length, width)

        def forward() -> Tensor:
            with _autocast(dtype):
                scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(width)
                scores = torch.where(mask, scores, float("-inf"))
                return torch.einsum("...qk,...kd->...qd", softmax_by_parts(scores), v)

        made = forward() if what == "backward" else None

        def step(mark: Mark) -> None:
            output = forward() if made is None else made
            if what != "forward":
                output.backward(gradient.to(output.dtype), retain_graph=True)
            mark(what)

        return step

    return make


@cache
def mlp_ladder(dtype: torch.dtype, *, sharded: bool = False) -> Timed:
    """A step of the MLP ladder's larger model with fused AdamW, on one device or sharded by SimpleFSDP."""

    def make(schedule: Schedule) -> Step:
        model = MLPLanguageModel(MLP_SIZES["mlp-4096"])
        if sharded:
            data_parallel(model, init_device_mesh("cpu", (dist.get_world_size(),)), reshard_after_forward=False)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens, targets = torch.zeros(2, 8, 4_096, dtype=torch.long)

        def step(mark: Mark) -> None:
            with _autocast(dtype):
                loss = cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            _end("step", schedule, mark)

        step(_nothing)
        return step

    return make


@cache
def all_reduce(nbytes: int) -> Timed:
    """An all-reduce of that many bytes of float32."""

    def make(schedule: Schedule) -> Step:
        tensor = torch.zeros(nbytes // 4)

        def step(mark: Mark) -> None:
            dist.all_reduce(tensor)
            _end("mean time", schedule, mark)

        return step

    return make


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "naive": NaiveDataParallel,
    "flat": FlatDataParallel,
    "bucketed": BucketedDataParallel,
}


@cache
def xl_on_ranks(wrapper: str, batch: int, length: int) -> Timed:
    """A step of the xl model with `batch` sequences a rank, one of the suite's wrappers and PyTorch's AdamW."""

    def make(schedule: Schedule) -> Step:
        model = WRAPPERS[wrapper](Transformer(SIZES["xl"], length, softmax_by_parts))
        tokens, targets = torch.zeros(2, batch, length, dtype=torch.long)
        optimizer = torch.optim.AdamW(model.parameters())

        def step(mark: Mark) -> None:
            loss = loss_by_parts(model(tokens), targets)
            _end("forward", schedule, mark)
            loss.backward()
            if wrapper != "bucketed":
                schedule.synchronize()
            mark("backward")
            model.finish_gradient_synchronization()  # type: ignore[operator]
            _end("gradient communication", schedule, mark)
            optimizer.step()
            _end("optimizer step", schedule, mark)
            optimizer.zero_grad()

        step(_nothing)
        return step

    return make
