"""Right pipelines, with steps of their own: the tests must accept them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from correctness.mesh.pipelined import Pipelined
from correctness.support.planting import right
from impl.mesh.decoder import Batch


@right("stages, with all forward passes before the backward passes")
class ByStages(Pipelined):
    pass


@right('stages, each of which runs backward as soon as it can (Narayanan et al., "PipeDream", 2019)')
class OneForwardOneBackward(Pipelined):
    def run_passes(self, batches: Sequence[Batch], tokens: Tensor) -> None:
        ahead = self.size("pp") - 1 - self.rank("pp")
        waiting: list[tuple[Tensor, Tensor]] = []
        for index in range(len(batches)):
            waiting.append(self.forward_pass(index, batches, tokens))
            if len(waiting) > ahead:
                self.backward_pass(*waiting.pop(0), last=index == len(batches) - 1)
        while waiting:
            self.backward_pass(*waiting.pop(0), last=len(waiting) == 0)
