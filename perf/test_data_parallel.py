"""What does a data-parallel training step cost, and how much of its communication is exposed?"""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.optim import Optimizer

from impl.accounting.data_parallel import work
from perf.ranks import RankStep, language_model
from shardmark import cases
from shardmark.cases import TrainingStepCase
from shardmark.measure import Measure
from shardmark.passes import Mark
from shardmark.registry import Implementation
from shardmark.world import World


class DataParallelStep(RankStep):
    """The whole model and the whole optimizer on every rank."""

    def spread(self, implementation: Implementation, case: TrainingStepCase) -> tuple[Any, Optimizer]:
        """The wrapped model, and AdamW: fused, so that the optimizer itself needs no temporaries."""
        takes_buckets = case.bucket_mb is not None and implementation.accepts("bucket_mb")  # its peer may not
        options = {"bucket_mb": case.bucket_mb} if takes_buckets else {}
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
@pytest.mark.benchmark(min_rounds=12)
def test_training_step(implementation: Implementation, case: TrainingStepCase, world: World, measure: Measure) -> None:
    measure(DataParallelStep, implementation, case, world_size=world.size, work=work(case, world.size))


@pytest.mark.family("data_parallel", option="bucket_mb")
@pytest.mark.question("Which bucket size is best?")
@pytest.mark.cases(cases.BUCKETS)
@pytest.mark.benchmark(min_rounds=12)
def test_bucket_size(implementation: Implementation, case: TrainingStepCase, world: World, measure: Measure) -> None:
    measure(DataParallelStep, implementation, case, world_size=world.size, work=work(case, world.size))
