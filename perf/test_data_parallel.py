"""What does a data-parallel training step cost, and how much of its communication is exposed?"""

from __future__ import annotations

import inspect
from dataclasses import replace
from statistics import median
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.optim import Optimizer

from impl.accounting.data_parallel import best_bucket_bytes, exposed_seconds, work
from impl.model import SIZES
from perf.ranks import RankStep, language_model
from shardmark import cases
from shardmark.cases import MB, OverheadCase, ReductionCase, TrainingStepCase
from shardmark.measure import CASE_DEADLINE, Measure
from shardmark.passes import measure as measure_on_rank
from shardmark.plan import IMPLEMENTATION, Mark, Measured, Plan, Rounds
from shardmark.registry import Implementation, Race
from shardmark.report.fits import fit_line
from shardmark.world import World


class DataParallelStep(RankStep):
    """The whole model and the whole optimizer on every rank."""

    def spread(self, implementation: Implementation, case: TrainingStepCase) -> tuple[Any, Optimizer]:
        """The wrapped model, and AdamW: fused, so that the optimizer itself needs no temporaries."""
        reduce_dtype = getattr(torch, case.reduce_dtype) if isinstance(case, ReductionCase) else None
        asked = {"bucket_mb": case.bucket_mb, "reduce_dtype": reduce_dtype}
        options = {k: v for k, v in asked.items() if v is not None and implementation.accepts(k)}  # its peer may not
        model = implementation.adapted(language_model(case), **options)
        return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step(self, mark: Mark) -> None:
        """Where the wrapper takes the optimizer, it updates each bucket while others are on their way."""
        if "optimizer" not in inspect.signature(self.model.finish_gradient_synchronization).parameters:
            super().step(mark)
            return
        self.forward_and_backward(mark)
        before = self.optimizer.register_step_pre_hook(lambda *_: mark("communication"))
        after = self.optimizer.register_step_post_hook(lambda *_: mark("optimizer"))
        self.model.finish_gradient_synchronization(self.optimizer)
        before.remove()
        after.remove()

    def compute_step(self, mark: Mark) -> None:
        """The same without communication. The gradients are thrown away, so that the ranks stay alike."""
        with self.model.no_sync():
            self.forward_and_backward(mark)


@pytest.mark.family("data_parallel")
@pytest.mark.question("What does a data-parallel training step cost?")
@pytest.mark.cases(cases.DATA_PARALLEL)
@pytest.mark.benchmark(min_rounds=9)
def test_training_step(implementation: Implementation, case: TrainingStepCase, world: World, measure: Measure) -> None:
    _measure(implementation, case, world, measure)


@pytest.mark.family("data_parallel", option="bucket_mb")
@pytest.mark.question("Which bucket size is best?")
@pytest.mark.cases(cases.BUCKETS)
@pytest.mark.benchmark(min_rounds=9)
def test_bucket_size(implementation: Implementation, case: TrainingStepCase, world: World, measure: Measure) -> None:
    """DDP, which others are held to at the same size, has no peer here."""
    _measure(implementation, case, world, measure, Race("ddp") if implementation.name == "ddp" else None)


@pytest.mark.family("data_parallel", option="reduce_dtype")
@pytest.mark.question("What does it cost to communicate gradients in half precision?")
@pytest.mark.cases(cases.REDUCTIONS)
@pytest.mark.benchmark(min_rounds=9)
def test_reduction_dtype(implementation: Implementation, case: ReductionCase, world: World, measure: Measure) -> None:
    """Against DDP, whose gradients travel in float32: what is faster depends on the link."""
    _measure(implementation, case, world, measure, Race("ddp"))


def _measure(
    implementation: Implementation,
    case: TrainingStepCase,
    world: World,
    measure: Measure,
    time: Race | None = None,
) -> None:
    ranks = world.size
    measure(DataParallelStep, implementation, case, world_size=ranks, work=work(case, ranks), slack=1.02, time=time)


class AllReduces:
    """A sum over the ranks of a tensor of each size, the smallest first."""

    def __init__(self, implementation: Implementation, case: OverheadCase, device: str) -> None:
        self.collectives = implementation.adapted
        self.backend = dist.get_backend()
        self.tensors = {size: torch.zeros(size * 1024 // 4, device=device) for size in sorted(case.kilobytes)}

    def prepare(self) -> None:
        """Zeros stay zeros."""

    def step(self, mark: Mark) -> None:
        """One all-reduce of each size, as the buckets' are: begun, then waited for."""
        for size, tensor in self.tensors.items():
            self.collectives.all_reduce(tensor, async_op=True).wait()
            mark(f"{size} KB")


def overhead_model(ranks: list[Measured], case: OverheadCase) -> dict[str, Any] | None:
    """Overhead and bandwidth of an all-reduce, each size's time the median of the slowest rank's, and what they say.

    None where noise makes more bytes take no longer.
    """
    rounds = list(zip(*(rank.laps[IMPLEMENTATION] for rank in ranks), strict=True))
    seconds = {
        size * 1024: median(max(laps.parts[f"{size} KB"] for laps in round_) for round_ in rounds)
        for size in case.kilobytes
    }
    overhead, per_byte, miss = fit_line(seconds)
    if per_byte <= 0:
        return None
    gradients = 4 * SIZES[case.model].parameters
    fitted = max(overhead, 0.0), 1 / per_byte
    best = best_bucket_bytes(gradients, *fitted)
    return {
        "seconds": {str(nbytes): each for nbytes, each in seconds.items()},
        "gradient_bytes": gradients,
        "overhead": fitted[0],
        "bandwidth": fitted[1],
        "miss": miss,
        "best_bytes": best,
        "best_seconds": exposed_seconds(gradients, best, *fitted) if best else 0.0,
        "exposed": {
            str(size): exposed_seconds(gradients, min(size * MB, gradients), *fitted) for size in case.bucket_sizes
        },
    }


@pytest.mark.family("collectives")
@pytest.mark.question("Which bucket size is best?")
@pytest.mark.cases(cases.BUCKET_MODEL)
def test_model_of_overhead(
    implementation: Implementation, case: OverheadCase, world: World, device: str, measure: Measure
) -> None:
    if world.size == 1:
        pytest.skip("one rank has nothing to reduce")
    case = replace(case, ranks=world.size)
    plan = Plan(AllReduces, implementation, None, case, device, world.size, Rounds(minimum=20, max_seconds=0.5))
    ranks = measure.attempt(plan, lambda plan: world.run(measure_on_rank, plan, deadline=CASE_DEADLINE))
    model = overhead_model(ranks, case)
    measure.record(plan, ranks, times={"model": model} if model else {})
    if model is None:
        pytest.skip("undecided: more bytes took no longer, so there is no bandwidth to tell")
