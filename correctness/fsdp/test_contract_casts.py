"""Calls where `compute_dtype` is another than the parameters' dtype: gradients of inputs, containers of any class, and
parameters that some ranks use more often. All in float32, which every implementation takes."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from correctness.fsdp.checks import averaged_gradients, make, on_every_rank, wrap
from correctness.fsdp.of_pytorch import FSDP1, FSDP2
from correctness.support.complaints import assert_none
from correctness.support.whole_batch import DIM
from shardmark.api import Implementation, NotAsked
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("fsdp")

COMPUTE = pytest.mark.parametrize("compute", [None, torch.bfloat16], ids=["float32", "bfloat16"])


def _linear(device: str) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(DIM, DIM).to(device)


@COMPUTE
@on_every_rank
def test_what_comes_before_has_its_gradients_through_the_cast(
    implementation: Implementation, compute: torch.dtype | None, device: str
) -> str:
    """The input comes from a layer outside, which is trained too: by position, by name, and in a list."""
    for how in ("by position", "by name", "in a list"):
        before, plain = _linear(device), _linear(device)
        model, inner = (make(Taking, 0, device, torch.float32) for _ in range(2))
        wrapped = wrap(implementation, model, compute_dtype=compute)
        x = torch.rand(3, DIM, device=device)
        for first, second in ((before, wrapped), (plain, inner)):
            h = first(x)
            given: Any = {"by position": ((h,), {}), "by name": ((), {"x": h}), "in a list": (([h],), {})}[how]
            second(*given[0], **given[1]).float().square().sum().backward()
        wrapped.finish_gradient_synchronization()
        found, expected = before.weight.grad, plain.weight.grad
        if found is None:
            return f"with compute_dtype={compute} an input that is given {how} has no gradient"
        assert expected is not None
        off = ((found - expected).norm() / expected.norm()).item()
        if not (found.dtype == torch.float32 and off <= (0.05 if compute else 1e-5)):
            return f"with compute_dtype={compute} the gradient of an input that is given {how} is off by {off:.2g}"
    return ""


class Taking(nn.Module):
    """Takes a tensor, or a list of one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x: Any) -> Tensor:
        return self.layer(x[0] if isinstance(x, list) else x)


@COMPUTE
@on_every_rank
def test_weights_that_are_written_by_data_are_read(
    implementation: Implementation, compute: torch.dtype | None, device: str
) -> str:
    """Some optimizers, and averages of weights, write them so: no version counts it."""
    model = wrap(implementation, make(Taking, 0, device, torch.float32), compute_dtype=compute)
    x = torch.rand(3, DIM, device=device)
    for trains in (False, True, False):
        with torch.set_grad_enabled(trains):
            before = model(x)
            if trains:
                before.sum().backward()
                model.finish_gradient_synchronization()
            for p in model.parameters():
                p.data.mul_(2)  # the outputs too, to the bit
            after = model(x)
        if not torch.equal(after, 2 * before):
            return f"with compute_dtype={compute} a call after weights were written by .data does not read them"
    return ""


class Attributes(dict[str, Any]):
    """A dict whose items are attributes too, as libraries' outputs are."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        return self[name]


class Pair(NamedTuple):
    of: Tensor
    rest: Any = None


@dataclass
class Fields:
    of: Tensor


CONTAINERS = {
    "a dict with attributes": Attributes,
    "an OrderedDict": OrderedDict,
    "a named tuple": Pair,
    "a dataclass": Fields,
}


class Passing(nn.Module):
    """Gives a container of the class that it gets, and notes which it gets."""

    def __init__(self, of: Any) -> None:
        super().__init__()
        self.layer, self.of, self.got = nn.Linear(DIM, DIM), of, object

    def forward(self, given: Any) -> Any:
        self.got = type(given)
        x = given["of"] if isinstance(given, dict) else given.of
        return self.of(of=self.layer(x))


@pytest.mark.parametrize("container", CONTAINERS)
@COMPUTE
def test_containers_keep_their_classes(
    implementation: Implementation,
    compute: torch.dtype | None,
    container: str,
    world: World,
    device: str,
    request: pytest.FixtureRequest,
) -> None:
    of_pytorch = FSDP1 + FSDP2 if compute else FSDP1
    if CONTAINERS[container] is Attributes and implementation.spec in of_pytorch:
        why = "it makes a plain dict of a subclass: docs/pytorch-defects.md"
        request.applymarker(pytest.mark.xfail(reason=why))
    assert_none(filter(None, world.run(passed_on_rank, implementation, compute, container, device)))


def passed_on_rank(implementation: Implementation, compute: torch.dtype | None, container: str, device: str) -> str:
    """A line if a container arrives as one of another class."""
    of: Any = CONTAINERS[container]
    inner = Passing(of).to(device)
    wrapped = wrap(implementation, inner, compute_dtype=compute)
    out = wrapped(of(of=torch.rand(3, DIM, device=device)))
    where = f"with compute_dtype={compute}"
    if inner.got is not of:
        return f"{where} {container} arrives in forward as {inner.got.__name__}"
    if type(out) is not of:
        return f"{where} {container} that forward returns arrives as {type(out).__name__}"
    (out["of"] if isinstance(out, dict) else out.of).float().sum().backward()
    wrapped.finish_gradient_synchronization()
    return (
        "" if averaged_gradients(wrapped)["layer.weight"].any() else f"{where} there are no gradients after {container}"
    )


class Either(nn.Module):
    """Two weights of one module, so that they are always in one unit; a call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.rand(DIM, DIM)) for _ in range(2))

    def forward(self, x: Tensor, a: bool) -> Tensor:
        return x @ (self.a if a else self.b).T


@COMPUTE
@on_every_rank
def test_a_parameter_may_be_reached_in_more_passes_on_one_rank(
    implementation: Implementation, compute: torch.dtype | None, device: str
) -> str:
    """Rank 0 uses `a` twice before the synchronization, others once, and `b` once: gradients add up on each rank, and
    are averaged then, of ones: but for thirds every number is exact in bfloat16."""
    model = make(Either, 0, device, torch.float32)
    wrapped = wrap(implementation, model, compute_dtype=compute)
    if any(isinstance(parameter, DTensor) for parameter in wrapped.parameters()):
        raise NotAsked("DTensors are reduced one by one: every rank must have each gradient")
    x, rank, ranks = torch.ones(2, DIM, device=device), dist.get_rank(), dist.get_world_size()
    for a in (True, rank == 0):
        wrapped(x, a).float().sum().backward()
    wrapped.finish_gradient_synchronization()
    found = averaged_gradients(wrapped)
    for name, passes in (("a", 1 + 1 / ranks), ("b", 1 - 1 / ranks)):
        value = found[name].double()
        if not torch.allclose(value, torch.full_like(value, 2 * passes), rtol=torch.finfo(torch.bfloat16).eps):
            return f"the gradient of {name} is {value.flatten()[0].item():.6g}, expected {2 * passes:.6g}"
    return ""
