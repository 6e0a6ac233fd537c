"""Bytes that ranks of a pipeline hold after each action, as the meter has them."""

from __future__ import annotations

from impl.pipeline.actions import Action
from impl.pipeline.cases import DecoderCase
from impl.pipeline.runner import Does, Runner
from impl.pipeline.workload import PipelinedStep
from shardmark.api import Implementation
from shardmark.meter.allocations import Allocated, Marked, Released
from shardmark.meter.gloo_workers import workers_free_first
from shardmark.meter.recording import mark, recording

BEFORE = "before the step"


def held_on_rank(implementation: Implementation, case: DecoderCase, device: str) -> tuple[int, list[int]]:
    """Bytes of tensors before the second step, and after each of this rank's actions in it."""
    with workers_free_first(device), recording(device) as recorded:
        step = PipelinedStep(implementation, case, device)
        step.prepare()
        step.step(lambda part: None)
        step.prepare()
        assert isinstance(step.pipeline, Runner)
        step.pipeline.around = _marked
        mark(BEFORE)
        step.step(lambda part: None)
        actions = [str(action) for action in step.pipeline.actions]
    live, found = 0, dict.fromkeys([BEFORE, *actions], 0)
    for event in recorded.replay():
        match event:
            case Allocated(block):
                live += block.nbytes
            case Released(block):
                live -= block.nbytes
            case Marked(name) if name in found:
                found[name] = live
    return found[BEFORE], [found[action] for action in actions]


def _marked(does: Does, action: Action) -> None:
    does(action)
    mark(str(action))
