"""Several forward or backward passes per step, several models at once, and `no_sync`."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.data_parallel.averaging import Products, backward, values, wrap, wrong_averages
from correctness.support.communication import recorded
from correctness.support.contracts import is_ours
from correctness.support.on_ranks import on_every_rank
from shardmark.api import Implementation
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("data_parallel")

LIKE = [torch.empty(4, 3), torch.empty(5), torch.empty(7)]


def _model(implementation: Implementation, device: str, like: list[Tensor] = LIKE) -> Any:
    return wrap(implementation, Products(*map(torch.zeros_like, like)).to(device))


def _own(*steps: int) -> Callable[[int], list[Tensor | None]]:
    """Sum a rank's gradients over some steps."""
    return lambda rank: [sum(terms) for terms in zip(*(values(rank, *LIKE, step=step) for step in steps), strict=True)]


def _backward(model: Any, step: int, device: str) -> None:
    backward(model, values(dist.get_rank(), *LIKE, step=step), device)


@on_every_rank
def test_gradients_accumulate_over_steps_until_they_are_zeroed(
    implementation: Implementation, device: str
) -> list[str]:
    """Gradients after two steps without zeroing, and after a third that starts from gradients zeroed in place."""
    model = _model(implementation, device)
    for step in (1, 2):
        _backward(model, step, device)
        model.finish_gradient_synchronization()
    wrong = wrong_averages(model, _own(1, 2), "after two synchronized steps without zero_grad()")
    model.module.zero_grad(set_to_none=False)
    _backward(model, 3, device)
    model.finish_gradient_synchronization()
    return wrong + wrong_averages(model, _own(3), "after zero_grad(set_to_none=False) and one more step")


@pytest.mark.parametrize("set_to_none", [True, False], ids=["set to None", "zeroed in place"])
@on_every_rank
def test_gradients_may_be_cleared_between_forward_and_backward(
    implementation: Implementation, set_to_none: bool, device: str
) -> list[str]:
    """In the third step, when gradients have a place that earlier steps gave them."""
    model = _model(implementation, device)
    for step in (1, 2):
        _backward(model, step, device)
        model.finish_gradient_synchronization()
    loss = model([weight.to(device) for weight in values(dist.get_rank(), *LIKE, step=3)])
    model.module.zero_grad(set_to_none=set_to_none)
    loss.backward()
    model.finish_gradient_synchronization()
    return wrong_averages(model, _own(3), f"after zero_grad(set_to_none={set_to_none}) between forward and backward")


@on_every_rank
def test_a_second_backward_before_synchronizing_counts_or_is_an_error(
    implementation: Implementation, device: str
) -> list[str]:
    """Outside of `no_sync`: gradients are in flight already where backward communicates."""
    model = _model(implementation, device)
    try:
        for step in (1, 2):
            _backward(model, step, device)
        model.finish_gradient_synchronization()
    except RuntimeError:
        return []
    return wrong_averages(model, _own(1, 2), "after two backward passes and one synchronization")


@pytest.mark.parametrize("set_to_none", [True, False], ids=["set to None", "zeroed in place"])
@on_every_rank
def test_a_pass_whose_gradients_are_cleared_does_not_count_or_the_next_is_an_error(
    implementation: Implementation, set_to_none: bool, device: str
) -> list[str]:
    """As where a step is skipped: what a wrapper noted or sent in backward is not what `.grad` is then."""
    model = _model(implementation, device)
    try:
        _backward(model, 1, device)
        model.module.zero_grad(set_to_none=set_to_none)
        _backward(model, 2, device)
        model.finish_gradient_synchronization()
    except RuntimeError:
        return []
    when = f"after a pass, zero_grad(set_to_none={set_to_none}), another pass and one synchronization"
    return wrong_averages(model, _own(2), when)


def _not_local(model: Any, *steps: int) -> list[str]:
    own = _own(*steps)(dist.get_rank())
    return [
        f"after no_sync(): the gradient of {name!r} is not this rank's own sum of its backward passes: "
        f"found {None if p.grad is None else p.grad.flatten()[:3].tolist()}, expected {mine.flatten()[:3].tolist()}"
        for (name, p), mine in zip(model.module.named_parameters(), own, strict=True)
        if p.grad is None or not torch.allclose(p.grad.cpu(), mine)
    ]


@on_every_rank
def test_no_sync_leaves_gradients_local_and_the_next_step_averages_their_sum(
    implementation: Implementation, device: str
) -> list[str]:
    model, wrong = _model(implementation, device), []
    for start in (1, 4):  # twice, as the first step may be special
        model.module.zero_grad()
        with recorded() as sent, model.no_sync():
            for step in (start, start + 1):
                _backward(model, step, device)
        wrong += _not_local(model, start, start + 1)
        wrong += [f"in no_sync(): it communicates, in {each}" for each in sent if each.dtype.is_floating_point]
        _backward(model, start + 2, device)
        model.finish_gradient_synchronization()
        passes = (start, start + 1, start + 2)
        wrong += wrong_averages(model, _own(*passes), "after two backward passes in no_sync() and one outside of it")
    return wrong


class ExpectedError(Exception):
    """Raised by the test."""


@on_every_rank
def test_no_sync_ends_with_an_error_too(implementation: Implementation, device: str) -> list[str]:
    model = _model(implementation, device)
    with pytest.raises(ExpectedError), model.no_sync():
        raise ExpectedError
    _backward(model, 1, device)
    model.finish_gradient_synchronization()
    return wrong_averages(model, _own(1), "in the step after an error inside no_sync()")


class TwoExperts(nn.Module):
    """A pass reaches one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterList(nn.Parameter(torch.zeros(3)) for _ in range(2))

    def forward(self, expert: int, scale: Tensor) -> Tensor:
        return (self.experts[expert] * scale).sum()


@pytest.mark.parametrize("local", [True, False], ids=["in no_sync", "outside of it"])
@on_every_rank
def test_passes_before_an_error_count_where_later_ones_do_not_reach(
    implementation: Implementation, local: bool, device: str
) -> list[str]:
    """As where a micro-batch runs out of memory and is left out. Outside of `no_sync` the later one may be an error."""
    model = wrap(implementation, TwoExperts().to(device), find_unused_parameters=True)
    scale = torch.tensor(1.0 + dist.get_rank(), device=device)

    def fail_after_a_pass() -> None:
        with model.no_sync() if local else nullcontext():
            model(0, scale).backward()
            raise ExpectedError

    with pytest.raises(ExpectedError):
        fail_after_a_pass()
    try:
        model(1, scale).backward()
        model.finish_gradient_synchronization()
    except RuntimeError:
        if local:
            raise
        return []
    mean = (1 + dist.get_world_size()) / 2
    return [
        f"after an error {'in' if local else 'outside of'} no_sync(), before and after which passes reach expert 0 and "
        "1: the gradient of "
        f"expert {number} is {'missing' if p.grad is None else p.grad.tolist()}, not {mean} everywhere"
        for number, p in enumerate(model.module.experts)
        if p.grad is None or (p.grad != mean).any()
    ]


@pytest.mark.should("leaving a no_sync() inside another does not end the outer one")
@on_every_rank
def test_leaving_an_inner_no_sync_does_not_end_the_outer_one(implementation: Implementation, device: str) -> list[str]:
    model = _model(implementation, device)
    with model.no_sync():
        with model.no_sync():
            _backward(model, 1, device)
        _backward(model, 2, device)
        model.finish_gradient_synchronization()
    wrong = _not_local(model, 1, 2)
    _backward(model, 3, device)
    model.finish_gradient_synchronization()
    return wrong or wrong_averages(model, _own(1, 2, 3), "after two passes in no_sync(), one of them in an inner one")


@on_every_rank
def test_ranks_may_have_other_numbers_of_passes_in_no_sync(implementation: Implementation, device: str) -> list[str]:
    model, last = _model(implementation, device), 9
    with model.no_sync():
        for step in range(1, 2 + dist.get_rank()):
            _backward(model, step, device)
    _backward(model, last, device)
    model.finish_gradient_synchronization()
    when = "after one pass in no_sync() on rank 0, two on rank 1 and so on, and one outside of it"
    return wrong_averages(model, lambda rank: _own(*range(1, 2 + rank), last)(rank), when)


@on_every_rank
def test_two_models_side_by_side(implementation: Implementation, device: str) -> list[str]:
    """Interleave the passes of two wrapped models; their order alternates between steps. Last, one pass is of both."""
    models, wrong, rank = [_model(implementation, device) for _ in range(2)], [], dist.get_rank()
    for step in range(6):
        for model in models:
            model.module.zero_grad()
        losses = [
            model([x.to(device) for x in values(rank, *LIKE, step=2 * step + i)]) for i, model in enumerate(models)
        ]
        for loss in losses[:: 1 if step < 2 else -1] if step < 4 else [sum(losses)]:
            loss.backward()
        for model in models[:: -1 if step % 2 else 1]:
            model.finish_gradient_synchronization()
        for i, model in enumerate(models):
            when = f"in step {step + 1} of the {['first', 'second'][i]} of two models side by side"
            wrong += wrong_averages(model, _own(2 * step + i), when)
    return wrong


def kept_gradients(implementation: Implementation, device: str) -> bool:
    """Return True if gradients that the caller keeps from step 1 are unchanged after step 2."""
    model = _model(implementation, device)
    _backward(model, 1, device)
    model.finish_gradient_synchronization()
    kept = [p.grad for p in model.module.parameters()]
    copies = [gradient.clone() for gradient in kept]
    model.module.zero_grad()
    _backward(model, 2, device)
    model.finish_gradient_synchronization()
    return all(map(torch.equal, kept, copies))


def test_gradients_that_are_kept(
    implementation: Implementation, world: World, device: str, record_property: Callable[[str, object], None]
) -> None:
    """If gradients live in a buffer (DDP's `gradient_as_bucket_view`), the next step overwrites them."""
    if not all(world.run(kept_gradients, implementation, device)) and not is_ours(implementation):
        record_property("note", "a gradient that is kept changes in the next step: copy it to keep it")
