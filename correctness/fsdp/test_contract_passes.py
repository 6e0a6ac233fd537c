"""Contract over several passes: accumulation, several forwards before backward, evaluation, two models, saved state."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1

from correctness.fsdp.checks import (
    Odd,
    SGDs,
    as_expected,
    as_sum_of,
    assert_none,
    averaged_gradients,
    backward,
    both,
    contains,
    first,
    full,
    gradients_as_expected,
    gradients_of,
    make,
    on_every_rank,
    parameters_as_expected,
    parameters_of,
    synchronized_backward,
    whole_backward,
    wrap,
)
from correctness.fsdp.of_pytorch import FSDP1 as OF_FSDP1
from correctness.fsdp.of_pytorch import expect_failures
from correctness.support.whole_batch import DIM, UsedTwice, batch, loss, own_batch
from impl.fsdp import whole
from shardmark.api import Implementation, NotAsked
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("fsdp")


@pytest.fixture(autouse=True)
def known_failures(request: pytest.FixtureRequest, implementation: Implementation) -> None:
    expect_failures(request, implementation, {"twice_after_one_forward": OF_FSDP1})


@pytest.mark.parametrize("finish_each", [False, True], ids=["finish_once", "finish_each"])
@on_every_rank
def test_several_backward_passes_add_up(implementation: Implementation, finish_each: bool, device: str) -> str:
    model, plain = both(implementation, Odd, device)
    each = []
    for step in range(3):
        plain.zero_grad()
        whole_backward(plain, step, device)
        each.append(gradients_of(plain))
        backward(model, step, device)
        if finish_each:
            model.finish_gradient_synchronization()
    model.finish_gradient_synchronization()
    return as_sum_of("of three backward passes, the gradient of", averaged_gradients(model), each)


@on_every_rank
def test_backward_may_run_twice_after_one_forward(implementation: Implementation, device: str) -> str:
    model, plain = both(implementation, Odd, device)
    whole_backward(plain, 0, device)
    of = loss(model, *own_batch(0, device))
    of.backward(retain_graph=True)
    try:
        of.backward()
    except RuntimeError:
        return ""  # refused, and not wrong in silence
    model.finish_gradient_synchronization()
    what = "of two backward passes after one forward pass, the gradient of"
    return as_sum_of(what, averaged_gradients(model), [gradients_of(plain)] * 2)


def steps_on_rank(implementation: Implementation, zeroing: bool, device: str) -> str:
    """Take three SGD steps, with or without zero_grad() before each."""
    model, plain = both(implementation, Odd, device)
    optimizers = SGDs(model, plain)
    for step in range(3):
        if zeroing:
            optimizers.zero_grad()
        whole_backward(plain, step, device)
        synchronized_backward(model, step, device)
        optimizers.step()
        if problem := parameters_as_expected(f"after step {step + 1},", model, plain):
            return problem
    return ""


def test_gradients_add_up_until_zero_grad(implementation: Implementation, world: World, device: str) -> None:
    assert_none(world.run(steps_on_rank, implementation, False, device))


def test_zero_grad_leaves_nothing_of_the_step_before(implementation: Implementation, world: World, device: str) -> None:
    assert_none(world.run(steps_on_rank, implementation, True, device))


@pytest.mark.parametrize("order", ["together", "in_order", "reversed"])
@on_every_rank
def test_two_forwards_may_precede_their_backwards(implementation: Implementation, order: str, device: str) -> str:
    """Run two steps, as an implementation may predict a step from the one before."""
    model, plain = both(implementation, UsedTwice, device)
    if order != "together" and contains(model, FSDP1):
        raise NotAsked("PyTorch's FSDP1 takes one backward for all forwards before it")
    optimizers = SGDs(model, plain, lr=1.0)
    for step in (0, 2):
        optimizers.zero_grad()
        each_backward = []
        for i in (1, 0) if order == "reversed" else (0, 1):
            plain.zero_grad()
            whole_backward(plain, step + i, device)
            each_backward.append(gradients_of(plain))
        losses = [loss(model, *own_batch(step + i, device)) for i in range(2)]
        if order == "together":
            (losses[0] + losses[1]).backward()
        else:
            for each in losses if order == "in_order" else losses[::-1]:
                each.backward()
        model.finish_gradient_synchronization()
        what = "of two forwards and then their backwards, the gradient of"
        if problem := as_sum_of(what, averaged_gradients(model), each_backward):
            return problem
        plain.load_state_dict(full(model))  # the check of the gradients took a step
    return ""


class AtTimes(nn.Module):
    """Two parameters of one unit, of which a call may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.rand(4)) for _ in range(2))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        """(4) -> (4)."""
        return x * self.first + x * self.second if both else x * self.first


@pytest.mark.parametrize("last", [False, True], ids=["first", "last"])
@on_every_rank
def test_in_low_precision_one_of_two_passes_may_use_a_parameter(
    implementation: Implementation, last: bool, device: str
) -> str:
    """The sum of two passes may have another dtype than a gradient of one."""
    model = wrap(
        implementation, AtTimes().to(device), wrap=whole, compute_dtype=torch.bfloat16, reduce_dtype=torch.float32
    )
    losses = [model(torch.ones(4, device=device), used).float().sum() for used in (not last, last)]
    if contains(model, FSDP1):  # it takes one backward for all forwards before it
        losses = [losses[0] + losses[1]]
    for each in losses:
        each.backward()
    model.finish_gradient_synchronization()
    expected = {"first": torch.full((4,), 2.0), "second": torch.ones(4)}
    what = "of two passes, one of which uses both parameters, the gradient of"
    return as_expected(what, averaged_gradients(model), expected, torch.finfo(torch.bfloat16).eps)


class Square(nn.Sequential):
    """A layer that may be applied to its own output."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, 7), nn.Tanh(), nn.Linear(7, DIM))


@on_every_rank
def test_a_model_may_be_applied_to_its_own_output(implementation: Implementation, device: str) -> str:
    model, plain = both(implementation, Square, device)
    x, _ = batch(0, dist.get_world_size(), device)
    plain(plain(x)).square().mean().backward()
    x, _ = own_batch(0, device)
    model(model(x)).square().mean().backward()
    model.finish_gradient_synchronization()
    return gradients_as_expected("of the model of the model, the gradient of", model, plain)


def _chained(first: Any, second: Any) -> Callable[[Tensor], Tensor]:
    return lambda x: second(first(x)[:, :DIM])  # type: ignore[no-any-return]


@on_every_rank
def test_two_models_do_not_disturb_each_other(implementation: Implementation, device: str) -> str:
    """Two models of equal shapes: a backward for each, one for the sum of their losses, one for the second of the
    first."""
    seeds = (0, 1)
    models = [wrap(implementation, make(Odd, seed, device)) for seed in seeds]
    plains = [make(Odd, seed, device) for seed in seeds]
    optimizers = SGDs(*models, *plains)
    for step in range(3):
        optimizers.zero_grad()
        sharded, whole = (each if step < 2 else [_chained(*each)] for each in (models, plains))
        losses = [loss(model, *own_batch(step + 5 * i, device)) for i, model in enumerate(sharded)]
        for i, plain in enumerate(whole):
            whole_backward(plain, step + 5 * i, device)
        for each in losses if step == 0 else [torch.stack(losses).sum()]:
            each.backward()
        for model in models:
            model.finish_gradient_synchronization()
        optimizers.step()
    found = [
        parameters_as_expected(f"of two models, model {i + 1}'s", model, plain)
        for i, (model, plain) in enumerate(zip(models, plains, strict=True))
    ]
    return first(found)


def evaluate_on_rank(implementation: Implementation, within: bool, device: str) -> str:
    """Evaluate before each step, or between its forward and backward, with other batch sizes."""
    model, plain = both(implementation, Odd, device)
    optimizers = SGDs(model, plain)
    everyone, _ = batch(7, dist.get_world_size(), device)
    for step in range(3):
        _set_training(model, plain, to=False)
        with torch.no_grad():
            found, expected = model(everyone), plain(everyone)
        if problem := as_expected(f"evaluation after {step} steps,", {"output": found}, {"output": expected}):
            return problem
        _set_training(model, plain, to=True)
        optimizers.zero_grad()
        whole_backward(plain, step, device)
        forward = loss(model, *own_batch(step, device))
        if within:
            _set_training(model, plain, to=False)
            with torch.no_grad():
                model(everyone)
            _set_training(model, plain, to=True)
        forward.backward()
        model.finish_gradient_synchronization()
        optimizers.step()
    return parameters_as_expected("after three steps with evaluation in between,", model, plain)


def _set_training(model: Any, plain: nn.Module, to: bool) -> None:
    for each in (model if isinstance(model, nn.Module) else model.module, plain):
        each.train(to)


def test_training_goes_on_after_evaluation(implementation: Implementation, world: World, device: str) -> None:
    assert_none(world.run(evaluate_on_rank, implementation, False, device))


def test_evaluation_between_forward_and_backward_changes_nothing(
    implementation: Implementation, world: World, device: str
) -> None:
    assert_none(world.run(evaluate_on_rank, implementation, True, device))


def _cpu(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.cpu() for name, tensor in tensors.items()}


@pytest.mark.should("what gather_full_parameters returns is a copy")
@on_every_rank
def test_gathered_parameters_are_copies(implementation: Implementation, device: str) -> str:
    """Keep what was gathered while the model trains, then write to a gathered copy: neither may affect the other."""
    model, plain = both(implementation, Odd, device)
    optimizers = SGDs(model, plain)
    gathered, before = model.gather_full_parameters(), parameters_of(plain)
    for step in range(2):
        optimizers.zero_grad()
        whole_backward(plain, step, device)
        synchronized_backward(model, step, device)
        optimizers.step()
        model.gather_full_parameters()
    kept = as_expected("gathered before training, then changed by it:", _cpu(gathered), before, tolerance=0)
    with torch.no_grad():
        for tensor in model.gather_full_parameters().values():
            tensor.fill_(7.0)
    return kept or parameters_as_expected("after its gathered copy was written to,", model, plain)


def _step(model: Any, optimizers: SGDs, step: int, device: str) -> None:
    optimizers.zero_grad()
    synchronized_backward(model, step, device)
    optimizers.step()


@on_every_rank
def test_a_state_dict_loaded_brings_the_parameters_back(implementation: Implementation, device: str) -> str:
    """Load the state of two steps ago, and train on from there."""
    model, plain = both(implementation, Odd, device)
    if not isinstance(model, nn.Module):
        return ""
    mine, reference = SGDs(model), SGDs(plain)
    saved = {name: value.detach().clone() for name, value in model.state_dict().items()}
    before = parameters_of(plain)
    for step in range(2):
        _step(model, mine, step, device)
    model.load_state_dict(saved)
    if problem := as_expected("after load_state_dict(),", full(model), before, tolerance=0):
        return problem
    for step in range(2, 4):
        _step(model, mine, step, device)
        reference.zero_grad()
        whole_backward(plain, step, device)
        reference.step()
    return parameters_as_expected("after load_state_dict() and two steps,", model, plain)
