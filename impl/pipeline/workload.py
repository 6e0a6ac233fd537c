"""A training step of a decoder that is cut into stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import AdamW

from impl.mesh.cases import SIZES
from impl.mesh.decoder import losses_of
from impl.mesh.stages import DecoderStage, passed_on
from impl.pipeline.actions import Action, Kind
from impl.pipeline.cases import DecoderCase
from impl.pipeline.contract import Pipeline
from impl.pipeline.runner import Does, Runner
from shardmark.api import Implementation, Mark, Unsupported

Look = Callable[[str, str, Callable[[], None]], None]
"""Called with what a rank does, a label, and the function that does it, which it calls."""


class PipelinedStep:
    """Forward and backward passes of all micro-batches, and AdamW of each rank's own stages."""

    def __init__(self, implementation: Implementation, case: DecoderCase, device: str) -> None:
        self.backend = dist.get_backend()
        size = SIZES[case.model]
        if case.dtype != "float32":
            raise Unsupported("its stages are in float32")
        group = dist.group.WORLD
        assert group is not None
        self.pipeline: Pipeline = implementation.adapted(
            partial(_built, case, device), group, case.micro_batches, loss=losses_of
        )
        if isinstance(self.pipeline, Runner):  # shapes are known, so that nothing need be announced
            self.pipeline.exchange.like = partial(passed_on, size.dim, torch.float32)
        parameters = [parameter for stage in self.pipeline.modules.values() for parameter in stage.parameters()]
        self.optimizer = AdamW(parameters, fused=True)
        random = torch.Generator(device).manual_seed(0)
        shape = case.micro_batches, case.rows, case.context
        tokens, targets = (
            torch.randint(size.vocabulary, shape, generator=random, device=device).unbind() for _ in range(2)
        )
        self.inputs, self.targets = [(each,) for each in tokens], list(targets)

    def prepare(self) -> None:
        """Free the last step's gradients."""
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, mark: Mark) -> None:
        self.pipeline.step(self.inputs, self.targets)
        mark("forward and backward")
        self.optimizer.step()
        mark("optimizer")

    def watched(self, look: Look) -> None:
        """The passes of a step, each of which `look` carries out; none of a runner that is not the suite's."""
        if isinstance(self.pipeline, Runner):
            with watching(self.pipeline, look):
                self.step(lambda part: None)


NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "gradient of the input",
    Kind.WEIGHT: "gradients of weights",
}


def named(action: Action) -> tuple[str, str]:
    """Its kind in words, and its notation: 0F1 is of stage 0 and micro-batch 1."""
    return NAMES[action.kind], str(action)


@contextmanager
def watching(runner: Runner, look: Look) -> Iterator[None]:
    """In the block `look` carries out each pass; messages are carried out unseen."""
    around = runner.around

    def watched(does: Does, action: Action) -> None:
        if action.kind in NAMES:
            look(*named(action), partial(around, does, action))
        else:
            around(does, action)

    runner.around = watched
    try:
        yield
    finally:
        runner.around = around


def _built(case: DecoderCase, device: str, stage: int, stages: int) -> nn.Module:
    torch.manual_seed(0)
    with torch.device(device):
        return DecoderStage(SIZES[case.model], stage, stages)
