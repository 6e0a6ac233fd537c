"""Bytes that autograd saves for backward, in steps that save known tensors."""

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shardmark.api.workload import Mark
from tests.support.counting import Step, counted, plain, two_linears


def checkpointed(model: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(model, x, use_reentrant=False)  # type: ignore[no-any-return]


def test_a_checkpointed_region_saves_nothing_and_computes_twice() -> None:
    found, without = counted(Step(checkpointed)), counted(Step(plain))
    assert found.saved_bytes == 0
    assert found.operators is not None and without.operators is not None
    assert without.operators < found.operators <= without.operators + 3


class Unmarked(Step):
    """Does not mark the end of forward."""

    def step(self, mark: Mark) -> None:
        super().step(lambda part: None)


def test_without_a_mark_it_is_weighed_when_backward_asks_for_it() -> None:
    assert counted(Unmarked(plain)).saved_bytes == 2 * 16 * 4


class Logged(Step):
    """Logs the parts of each step."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__(plain, model)
        self.log: list[str] = []

    def step(self, mark: Mark) -> None:
        def logged(part: str) -> None:
            self.log.append(part)
            mark(part)

        super().step(logged)


def test_the_step_ends_where_forward_does_if_it_says_so() -> None:
    """A backward under hooks may differ from one without them."""
    step = Logged()
    assert counted(step).saved_bytes == 2 * 16 * 4
    assert step.log == 4 * ["forward", "backward"] + ["forward"]


class Twice(nn.Sequential):
    """Runs twice, and frees what the first run saved."""

    def forward(self, x: Tensor) -> Tensor:
        super().forward(x)
        return super().forward(x)  # type: ignore[no-any-return]


def test_what_forward_saved_and_has_freed_does_not_count() -> None:
    assert counted(Logged(Twice(two_linears()))).saved_bytes == 2 * 16 * 4


class Optimizes(Step):
    def step(self, mark: Mark) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                p.mul_(0.5)


def test_without_a_backward_nothing_is_saved() -> None:
    found = counted(Optimizes(plain))
    assert found.saved_bytes is None and found.operators == 2 and found.flops == 0


class BackwardAlone(Step):
    """Runs forward before the step, as the timing of attention's backward does."""

    def prepare(self) -> None:
        super().prepare()
        self.loss = self.forward(self.model, self.x).sum()

    def step(self, mark: Mark) -> None:
        assert self.loss is not None
        self.loss.backward()
        mark("backward")


def test_a_backward_alone_has_its_operators_and_what_was_saved_for_it() -> None:
    found = counted(BackwardAlone(plain))
    assert found.operators == 5 and found.saved_bytes == 2 * 16 * 4
    compiled = counted(BackwardAlone(torch.compile(plain, backend="aot_eager")))
    assert (compiled.operators, compiled.flops) == (None, None)
