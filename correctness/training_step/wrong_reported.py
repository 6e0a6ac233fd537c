"""Planted defects: training steps that are wrong as public trackers report."""

import torch
from torch import Tensor

from correctness.support.planting import defect
from correctness.training_step.wrong import ByLogits


@defect(cause="masks", caught_by="test_the_mean_is_over_all_targets_of_a_large_batch")
class MeanOfMicroBatchesAboveEightRows(ByLogits):
    """huggingface/transformers#24725: averages the means of micro-batches, which have other numbers of targets."""

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        means = [super(type(self), self).loss(x, y) for x, y in zip(logits.split(8), targets.split(8), strict=True)]
        return torch.stack(means).mean()
