"""Pipeline parallelism: each rank has stages of the model, through which micro-batches go and come back.

    pipeline = run(one_forward_one_backward, build, group, micro_batches=8, loss=loss)
    loss = pipeline.step(inputs, targets)  # gradients are in pipeline.modules

A schedule is data: for each rank the list of its actions. `checked` proves that it is complete and ends; `Runner`
carries it out.
"""

from __future__ import annotations

from impl.pipeline.contract import Facts, Pipeline, is_schedule, planned, run

# Implementations register in this order, the reference first, which is the order in every list and table.
# isort: off
from impl.pipeline.schedules import gpipe, interleaved, one_forward_one_backward
from impl.pipeline.zero_bubble import zero_bubble, zero_bubble_v
from impl.pipeline.dualpipe import dualpipe_v
from impl.pipeline.library import TorchPipeline

# isort: on

__all__ = [
    "Facts",
    "Pipeline",
    "TorchPipeline",
    "dualpipe_v",
    "gpipe",
    "interleaved",
    "is_schedule",
    "one_forward_one_backward",
    "planned",
    "run",
    "zero_bubble",
    "zero_bubble_v",
]
