"""What does a data-parallel training step cost, and how much of its communication is exposed?"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.functional import cross_entropy

from impl.accounting.data_parallel import work
from impl.model import SIZES, Transformer
from shardmark import cases
from shardmark.cases import TrainingStepCase
from shardmark.measure import Measure
from shardmark.passes import Mark
from shardmark.registry import Implementation
from shardmark.world import World


class TrainingStep:
    """One AdamW step of the language model, its batch this rank's own."""

    def __init__(self, implementation: Implementation, case: TrainingStepCase, device: str) -> None:
        size = SIZES[case.model]
        self.backend = dist.get_backend()
        takes_buckets = case.bucket_mb is not None and implementation.accepts("bucket_mb")  # its peer may not
        options = {"bucket_mb": case.bucket_mb} if takes_buckets else {}
        with torch.device(device):
            self.model = implementation.adapted(Transformer(size, context_length=case.context), **options)
            self.tokens, self.targets = (torch.randint(size.vocab, (case.batch, case.context)) for _ in range(2))
        # Fused, so that the optimizer itself needs no temporaries.
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)

    def prepare(self) -> None:
        """Let go of the last step's gradients."""
        self.optimizer.zero_grad()
        self.loss: Tensor | None = None

    def step(self, mark: Mark) -> None:
        """Forward, backward, what is left of communication, optimizer."""
        self._forward_and_backward(mark)
        self.model.finish_gradient_synchronization()
        mark("communication")
        self.optimizer.step()
        mark("optimizer")

    def compute_step(self, mark: Mark) -> None:
        """The same without communication. The gradients are thrown away, so that the ranks stay alike."""
        with self.model.no_sync():
            self._forward_and_backward(mark)

    def _forward_and_backward(self, mark: Mark) -> None:
        logits = self.model(self.tokens)  # (batch, context, vocab)
        self.loss = cross_entropy(logits.flatten(0, 1), self.targets.flatten())
        del logits  # the loss keeps what it needs
        mark("forward")
        self.loss.backward()
        mark("backward")


@pytest.mark.family("data_parallel")
@pytest.mark.question("What does a data-parallel training step cost?")
@pytest.mark.cases(cases.DATA_PARALLEL)
@pytest.mark.benchmark(min_rounds=12)
def test_training_step(implementation: Implementation, case: TrainingStepCase, world: World, measure: Measure) -> None:
    measure(TrainingStep, implementation, case, world_size=world.size, work=work(case, world.size))


@pytest.mark.family("data_parallel", option="bucket_mb")
@pytest.mark.question("Which bucket size is best?")
@pytest.mark.cases(cases.BUCKETS)
@pytest.mark.benchmark(min_rounds=12)
def test_bucket_size(implementation: Implementation, case: TrainingStepCase, world: World, measure: Measure) -> None:
    measure(TrainingStep, implementation, case, world_size=world.size, work=work(case, world.size))
