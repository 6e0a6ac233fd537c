"""Gradients are averages whatever a loss does with the outputs, the parameters and their gradients."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from correctness.data_parallel.averaging import is_torchs, wrap
from correctness.support.on_ranks import on_every_rank
from shardmark.api import Implementation, NotAsked

pytestmark = pytest.mark.family("data_parallel")


Call = Callable[[nn.Module, Tensor], Tensor]


def _as_it_is(part: nn.Module, x: Tensor) -> Tensor:
    return part(x)  # type: ignore[no-any-return]


class Tables(nn.Module):
    """Adds two tables, as of positions. The gradient of the sum is one tensor: the tables' and what flows on."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ParameterList(nn.Parameter(torch.rand(6, 5)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(6, 5) -> (6, 5)."""
        return x + self.tables[0] + self.tables[1]


class TwoHeads(nn.Module):
    """A trunk with two heads. Backward reads a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.linspace(0.5, 1.5, 4))
        self.trunk = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), Tables())
        self.heads = nn.ModuleList(nn.Linear(5, 3) for _ in range(2))

    def forward(self, x: Tensor, call: Call = _as_it_is) -> list[Tensor]:
        """(6, 4) -> two of (6, 3); `call` calls each part."""
        x = x * self.scale
        for part in self.trunk:
            x = call(part, x)
        return [call(head, x) for head in self.heads]


class Rows(nn.Module):
    """Rows of a table, whose gradient is a sparse tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.output = nn.Embedding(7, 4, sparse=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> list[Tensor]:
        """(rows, 4) -> [(rows, 3)]: each input takes the row of its sign and size."""
        return [self.output(self.table((3 * x[:, 0]).long().clamp(-3, 3) + 3))]


def _loss(outputs: list[Tensor]) -> Tensor:
    return sum(((i + 1) * each.square().mean() for i, each in enumerate(outputs)), torch.zeros(()))


def _all_outputs(model: Any, module: nn.Module, x: Tensor, rank: int) -> None:
    _loss(model(x)).backward()


def _penalty(model: Any, module: nn.Module, x: Tensor, rank: int) -> None:
    loss = _loss(model(x.requires_grad_()))
    [slope] = torch.autograd.grad(loss, x, create_graph=True)
    (loss + slope.square().sum()).backward()


def _gradients_looked_at(model: Any, module: nn.Module, x: Tensor, rank: int) -> None:
    loss = _loss(model(x))
    torch.autograd.grad(loss, [*module.parameters()], retain_graph=True)
    loss.backward()


def _parameters_too(model: Any, module: nn.Module, x: Tensor, rank: int) -> None:
    (_loss(model(x)) + (rank + 1) * sum(p.square().sum() for p in module.parameters())).backward()


def _parameters_alone(model: Any, module: nn.Module, x: Tensor, rank: int) -> None:
    sum((rank + 1) * p.square().sum() for p in module.parameters()).backward()  # type: ignore[union-attr]


def _past_the_wrapper(model: Any, module: nn.Module, x: Tensor, rank: int) -> None:
    _loss(module(x)).backward()


def _changed_in_place(model: Any, module: nn.Module, x: Tensor, rank: int) -> None:
    _loss([each.mul_(rank + 2) for each in model(x)]).backward()


def _graph_of_gradients(model: Any, module: nn.Module, x: Tensor, rank: int) -> None:
    _loss(model(x)).backward(create_graph=True)


def _two_losses(model: Any, module: nn.Module, x: Tensor, rank: int) -> None:
    torch.autograd.backward([each.square().sum() for each in model(x)])


def _first_head(model: Any, module: nn.Module, x: Tensor, rank: int) -> None:
    _loss(model(x)[:1]).backward()


def _other_heads(model: Any, module: nn.Module, x: Tensor, rank: int) -> None:
    _loss(model(x)[rank % 2 :][:1]).backward()


def _after_an_error(model: Any, module: nn.Module, x: Tensor, rank: int) -> None:
    """The error is the last head's: its input is too wide."""
    with suppress(RuntimeError):
        model(x, lambda part, x: part(torch.cat([x, x], 1) if part is module.heads[1] else x))
    _loss(model(x)).backward()


def _recomputed(part: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(part, x, use_reentrant=False)  # type: ignore[no-any-return]


def _reentrant(part: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(part, x, use_reentrant=True)  # type: ignore[no-any-return]


def _calling(call: Call, model: Any, module: nn.Module, x: Tensor, rank: int) -> None:
    _loss(model(x.requires_grad_(), call)).backward()


def _each_part_twice(call: Call, model: Any, module: nn.Module, x: Tensor, rank: int) -> None:
    _loss(model(x.requires_grad_(), lambda part, x: call(part, x) + call(part, x.flip(-1)))).backward()


def _two_forwards(call: Call, model: Any, module: nn.Module, x: Tensor, rank: int) -> None:
    x.requires_grad_()
    (_loss(model(x, call)) + _loss(model(x.flip(-1), call))).backward()


def _two_forwards_then_two_backwards(model: Any, module: nn.Module, x: Tensor, rank: int) -> None:
    for loss in [_loss(model(x)), _loss(model(x.flip(-1)))]:
        loss.backward()


def _cast_before(model: Any, module: nn.Module, x: Tensor, rank: int) -> None:
    """Cast the module and cast it back, as around an evaluation: the same parameters have other memory."""
    _loss(model(x)).backward()
    if model is not module:
        model.finish_gradient_synchronization()
    module.zero_grad()
    module.float().double()
    _loss(model(x)).backward()


def _a_step_for_each_loss(model: Any, module: nn.Module, x: Tensor, rank: int) -> None:
    """As methods that look at each loss's own gradients do, of one forward pass. The last step is the caller's."""
    first, last = (head.square().mean() for head in model(x))
    first.backward(retain_graph=True)
    if model is not module:
        model.finish_gradient_synchronization()
    module.zero_grad()
    last.backward()


@dataclass(frozen=True)
class Use:
    """How a loss is made. `every`: it reaches every parameter. `refusable`: an error on every rank is right too.
    `through`: it comes from a forward pass of the wrapper. `torchs`: torch's DDP averages its gradients."""

    run: Callable[[Any, nn.Module, Tensor, int], None]
    module: type[nn.Module] = TwoHeads
    every: bool = True
    refusable: bool = False
    through: bool = True
    torchs: bool = True


USES = {
    "all_outputs": Use(_all_outputs),
    "a_gradient_penalty": Use(_penalty),
    "gradients_looked_at_before": Use(_gradients_looked_at),
    "parameters_in_the_loss_too": Use(_parameters_too),
    "outputs_changed_in_place": Use(_changed_in_place),
    "a_graph_of_gradients": Use(_graph_of_gradients, refusable=True),
    "two_losses_at_once": Use(_two_losses),
    "one_of_two_heads": Use(_first_head, every=False),
    "another_head_on_each_rank": Use(_other_heads, every=False),
    "after_an_error_in_forward": Use(_after_an_error),
    "each_part_twice": Use(partial(_each_part_twice, _as_it_is)),
    "two_forwards_then_two_backwards": Use(_two_forwards_then_two_backwards, refusable=True, torchs=False),
    "a_step_for_each_of_two_losses": Use(_a_step_for_each_loss, every=False, torchs=False),
    "after_a_cast_and_back": Use(_cast_before, refusable=True, torchs=False),
    "two_forwards": Use(partial(_two_forwards, _as_it_is)),
    "recomputed": Use(partial(_calling, _recomputed)),
    "recomputed_each_part_twice": Use(partial(_each_part_twice, _recomputed)),
    "recomputed_two_forwards": Use(partial(_two_forwards, _recomputed)),
    "recomputed_in_passes_of_their_own": Use(partial(_calling, _reentrant), refusable=True),
    "recomputed_in_passes_of_their_own_each_part_twice": Use(partial(_each_part_twice, _reentrant), refusable=True),
    "recomputed_in_passes_of_their_own_two_forwards": Use(
        partial(_two_forwards, _reentrant), refusable=True, torchs=False
    ),
    "sparse": Use(_all_outputs, Rows, refusable=True),
    "parameters_alone": Use(_parameters_alone, refusable=True, through=False, torchs=False),
    "past_the_wrapper": Use(_past_the_wrapper, refusable=True, through=False, torchs=False),
}
SHOULD = pytest.mark.should("a loss without a forward pass of the wrapper is averaged, or an error")


def _own(use: Use, module: nn.Module, step: int, rank: int) -> list[Tensor]:
    """A rank's gradients before averaging, of the module itself."""
    alone = deepcopy(module)
    use.run(alone, alone, _rows(step, rank), rank)
    return [torch.zeros_like(p) if p.grad is None else p.grad.to_dense() for p in alone.parameters()]


def _rows(step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(6, 4, generator=generator, dtype=torch.float64)


@pytest.fixture
def as_documented(implementation: Implementation, name: str, request: pytest.FixtureRequest) -> None:
    """DDP averages nothing without a forward pass of its own, nor after a cast and back, nor the second of two backward
    passes after two of it."""
    if implementation.spec == "ddp" and not USES[name].torchs:
        request.applymarker(pytest.mark.xfail(reason="as docs/pytorch-defects.md says", strict=True))


@pytest.mark.usefixtures("as_documented")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if use.through else SHOULD) for name, use in USES.items()]
)
@on_every_rank
def test_gradients_are_averaged_whatever_a_loss_does(
    implementation: Implementation, name: str, device: str
) -> list[str]:
    """In two steps, as the first may be special; to finish again changes nothing."""
    use, ranks, wrong = USES[name], dist.get_world_size(), []
    torch.manual_seed(0)
    start = use.module().double()
    model = wrap(implementation, deepcopy(start).to(device), **({} if use.every else {"find_unused_parameters": True}))
    if use.through and not use.torchs and implementation.spec != "ddp" and is_torchs(model):
        raise NotAsked("torch's DDP is wrong here: docs/pytorch-defects.md")
    for step in (1, 2):
        model.module.zero_grad()
        try:
            use.run(model, model.module, _rows(step, dist.get_rank()).to(device), dist.get_rank())
            model.finish_gradient_synchronization()
        except Exception:
            if use.refusable:
                return wrong
            raise
        terms = zip(*(_own(use, start, step, rank) for rank in range(ranks)), strict=True)
        means = [sum(each) / ranks for each in terms]
        for when in ("", ", finished once more"):
            if when:
                model.finish_gradient_synchronization()
            wrong += [
                f"{name.replace('_', ' ')}, step {step}{when}: the gradient of {of!r} is not the average over the "
                f"ranks: found {None if p.grad is None else p.grad.to_dense().flatten()[:3].tolist()}, expected "
                f"{mean.flatten()[:3].tolist()}"
                for (of, p), mean in zip(model.module.named_parameters(), means, strict=True)
                if not _equal(p.grad, mean)
            ]
    return wrong


def _equal(found: Tensor | None, mean: Tensor) -> bool:
    if found is None:
        return not mean.any()
    return torch.allclose(found.detach().to_dense().cpu(), mean, rtol=1e-12, atol=1e-12)
