"""Contract of uses: tensors changed in place, activations recomputed in backward, gradients that the user changes."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from correctness.fsdp.checks import (
    Odd,
    SGDs,
    both,
    gradients_as_expected,
    name_in_module,
    on_every_rank,
    parameters_as_expected,
    synchronized_backward,
    whole_backward,
)
from correctness.fsdp.of_pytorch import FSDP1, FSDP2, expect_failures
from correctness.support.whole_batch import DIM, batch, own_batch
from impl.fsdp import by_type
from shardmark.api import Implementation, NotAsked

pytestmark = pytest.mark.family("fsdp")

WRONG = {
    "outputs": (*FSDP1, "fsdp2"),
    "inputs": FSDP1 + FSDP2,
    "test_an_optimizer_may_be_made_after_an_evaluation": FSDP2,
}
"""PyTorch's own that fail a test, by its id or its name."""


@pytest.fixture(autouse=True)
def wrong(request: pytest.FixtureRequest, implementation: Implementation) -> None:
    expect_failures(request, implementation, WRONG)


class Unit(nn.Module):
    """Returns a view of its layer's output, and may change its input in place."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.layer, self.in_place = nn.Linear(DIM, DIM), in_place

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> (rows, 1, DIM)."""
        return self.layer(x.mul_(0.5) if self.in_place else x * 0.5).unflatten(1, (1, DIM))


class InPlace(nn.Module):
    """Changes what its units return; with `inputs`, its units change what they get."""

    def __init__(self, inputs: bool) -> None:
        super().__init__()
        self.first, self.second, self.last = Unit(False), Unit(inputs), nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> (rows, 2 DIM)."""
        y = self.first(x)
        y += 1
        z = self.second((2 * y).squeeze(1))
        z.mul_(3)
        out = self.last(z.squeeze(1))
        return out.mul_(2)


class OfOutputs(InPlace):
    def __init__(self) -> None:
        super().__init__(False)


class OfInputs(InPlace):
    def __init__(self) -> None:
        super().__init__(True)


@pytest.mark.parametrize("kind", [OfOutputs, OfInputs], ids=["outputs", "inputs"])
@on_every_rank
def test_tensors_may_be_changed_in_place(implementation: Implementation, kind: type[InPlace], device: str) -> str:
    model, plain = both(implementation, kind, device, wrap=by_type(Unit))
    for each, (x, y) in ((plain, batch(0, dist.get_world_size(), device)), (model, own_batch(0, device))):
        try:
            out = each(x.clone())
            out -= y
            out.square().mean().backward()
        except Exception:
            if each is model:
                return ""  # refused, and not wrong in silence
            raise
    model.finish_gradient_synchronization()
    return gradients_as_expected(f"with {kind.__name__} changed in place, the gradient of", model, plain)


class Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, 7), nn.Tanh(), nn.Linear(7, DIM))


class Blocks(nn.Module):
    """Checkpoints its blocks where they are called; one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.reentrant, self.checkpointed = nn.ModuleList(Block() for _ in range(3)), False, True
        self.blocks[1].requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> (rows, DIM)."""
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=self.reentrant) if self.checkpointed else block(x))
        return x


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved_tensors", "reentrant"])
@on_every_rank
def test_activations_may_be_recomputed_in_backward(implementation: Implementation, reentrant: bool, device: str) -> str:
    """Units are checkpointed where their module calls them; a wrapper that has no units is, where it is called. The
    second step is as the first, which an implementation may expect; in the first, forward runs again to its end."""
    model, plain = both(implementation, Blocks, device, wrap=by_type(Block))
    inside = implementation.accepts("wrap")
    model.module.reentrant, model.module.checkpointed, plain.checkpointed = reentrant, inside, False
    optimizers = SGDs(model, plain)
    for step in range(2):
        optimizers.zero_grad()
        x, _ = own_batch(step, device)
        x.requires_grad_()  # reentrant checkpoints ask for it
        with set_checkpoint_early_stop(step > 0):
            out = model(x) if inside else checkpoint(model, x, use_reentrant=reentrant)
        out.square().mean().backward()
        model.finish_gradient_synchronization()
        x, _ = batch(step, dist.get_world_size(), device)
        plain(x).square().mean().backward()
        optimizers.step()
        if problem := parameters_as_expected(f"after step {step + 1} with activations recomputed,", model, plain):
            return problem
    return ""


@on_every_rank
def test_an_optimizer_may_be_made_after_an_evaluation(implementation: Implementation, device: str) -> str:
    """As trainers do that evaluate once before they train."""
    model, plain = both(implementation, Odd, device)
    with torch.no_grad():
        model(own_batch(0, device)[0])
    optimizers = SGDs(model, plain)
    for step in range(2):
        optimizers.zero_grad()
        whole_backward(plain, step, device)
        synchronized_backward(model, step, device)
        optimizers.step()
        when = f"after step {step + 1} of an optimizer that was made after an evaluation,"
        if problem := parameters_as_expected(when, model, plain):
            return problem
    return ""


def _named(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name_in_module(name): p for name, p in module.named_parameters()}


@on_every_rank
def test_each_gradient_adds_up_to_what_the_user_left_of_it(implementation: Implementation, device: str) -> str:
    """Between two passes some gradients are set to None, some to zero in place, and some are scaled or replaced."""
    model, plain = both(implementation, Odd, device)
    shards, parameters = _named(model.module), _named(plain)
    if shards.keys() != parameters.keys():
        raise NotAsked("its module's parameters have other names, so that none tells which is which")
    for step in range(2):
        whole_backward(plain, step, device)
        synchronized_backward(model, step, device)
        for i, name in enumerate(parameters) if step == 0 else ():
            for p in (shards[name], parameters[name]):
                if p.grad is None or i % 4 == 0:
                    p.grad = None
                elif i % 4 == 1:
                    p.grad.zero_()
                else:
                    p.grad = p.grad.mul_(0.5) if i % 4 == 2 else p.grad * 3
    return gradients_as_expected(
        "after a pass with others, of which the user changed some, the gradient of", model, plain
    )
