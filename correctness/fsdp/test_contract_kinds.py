"""Contract for unusual parameters: unused, unused on some ranks, frozen, tied, of two dtypes, very many."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from correctness.engine.examples import BESIDE_LAUNCHES
from correctness.fsdp.checks import (
    LINEARS,
    Odd,
    SGDs,
    as_expected,
    assert_none,
    averaged_gradients,
    both,
    first,
    full,
    gradients_as_expected,
    gradients_of,
    make,
    on_every_rank,
    parameters_as_expected,
    parameters_of,
    poisoned,
    synchronized_backward,
    whole_backward,
    wrap,
)
from correctness.fsdp.two_dtypes import wrong_of_two_dtypes
from correctness.support.default_dtype import OTHERS, default_dtype
from correctness.support.whole_batch import DIM, TiedAndFrozen, batch, loss, own_batch
from impl.fsdp import by_type, whole
from shardmark.api import Implementation, NotAsked
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("fsdp")


class Skipping(nn.Module):
    """Three layers, of which a call may skip the second, and a parameter that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.perhaps, self.last = (nn.Linear(DIM, n) for n in (DIM, DIM, 2 * DIM))
        self.unused = nn.Parameter(torch.ones(5))

    def forward(self, x: Tensor, skip: bool = False) -> Tensor:
        """(rows, DIM) -> (rows, 2 DIM)."""
        x = self.layer(x).tanh()
        return self.last(x if skip else self.perhaps(x).tanh())


@on_every_rank
@poisoned
def test_an_unused_parameter_gets_no_gradient_and_stops_nothing(implementation: Implementation, device: str) -> str:
    """Take a step that uses all layers, one that skips a layer, and one that uses all again."""
    model, plain = both(implementation, Skipping, device)
    optimizers = SGDs(plain, model)
    for step, skip in enumerate((False, True, False)):
        optimizers.zero_grad()
        x, y = own_batch(step, device)
        (model(x, skip=skip) - y).square().mean().backward()
        model.finish_gradient_synchronization()
        loss(lambda rows, skip=skip: plain(rows, skip=skip), *batch(step, dist.get_world_size(), device)).backward()
        optimizers.step()
        when = "which left a layer out, parameter" if skip else "parameter"
        if problem := parameters_as_expected(f"after step {step + 1}, {when}", model, plain):
            return problem
    return ""


class Either(nn.Module):
    """Two parameters that forward reads, of which it uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.full((DIM,), value)) for value in (1.0, 2.0))
        self.layer = nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor, which: int) -> Tensor:
        """(rows, DIM) -> (rows, 2 DIM)."""
        either = self.a, self.b
        return self.layer(x * either[which])


class OwnIsUnused(nn.Module):
    """A parameter beside the layer, which forward reads, and of which `which` 0 has no use."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.full((DIM,), 2.0)), nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor, which: int) -> Tensor:
        """(rows, DIM) -> (rows, 2 DIM)."""
        return self.layer(x * self.scale if which else x.clone())


@pytest.mark.parametrize("module", [Either, OwnIsUnused], ids=["one_of_a_unit", "all_of_a_unit"])
@on_every_rank
@poisoned
def test_a_parameter_that_one_rank_uses_counts_as_zero_on_the_others(
    implementation: Implementation, module: type[nn.Module], device: str
) -> str:
    model, plain = both(implementation, module, device, wrap=whole if module is Either else LINEARS)
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise NotAsked("DTensors are reduced one by one, so every rank must have each gradient")
    ranks = dist.get_world_size()
    x, y = batch(0, ranks, device)
    for rank in range(ranks):
        rows = slice(rank * len(x) // ranks, (rank + 1) * len(x) // ranks)
        ((plain(x[rows], min(rank, 1)) - y[rows]).square().mean() / ranks).backward()
    x, y = own_batch(0, device)
    (model(x, min(dist.get_rank(), 1)) - y).square().mean().backward()
    model.finish_gradient_synchronization()
    return gradients_as_expected("where some ranks do not use it, the gradient of", model, plain)


@on_every_rank
def test_frozen_parameters_have_no_gradient_and_do_not_change(implementation: Implementation, device: str) -> str:
    """Step AdamW over all parameters: its weight decay would change a frozen one that has a zero gradient."""
    frozen = ("frozen.weight", "frozen.bias")
    model = wrap(implementation, make(TiedAndFrozen, 0, device), wrap=whole)
    start = parameters_of(make(TiedAndFrozen, 0, device))
    count = sum(p.requires_grad for p in make(TiedAndFrozen, 0, device).parameters())
    trainable = [p for p in model.parameters() if p.requires_grad]
    if len(list(model.parameters())) == count + len(frozen) and len(trainable) != count:
        return f"{len(trainable)} parameters require a gradient, expected {count}"
    synchronized_backward(model, 0, device)
    if any(p.grad is not None for p in model.parameters() if not p.requires_grad):
        return "a frozen parameter has a gradient, expected None"
    torch.optim.AdamW(model.parameters(), lr=0.1).step()
    found = full(model)
    return as_expected("after a step, the frozen", {n: found[n] for n in frozen}, {n: start[n] for n in frozen}, 0)


class OddlyTied(nn.Module):
    """Two layers share a weight of 35 elements, which few numbers of ranks divide."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.embed = nn.Linear(DIM, 5), nn.Linear(5, 7)
        self.back, self.tied = nn.Linear(7, 5), nn.Linear(5, 7)
        self.leave = nn.Linear(7, 2 * DIM)
        self.tied.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> (rows, 2 DIM)."""
        x = self.embed(self.enter(x)).tanh()
        logits: Tensor = self.leave(self.tied(self.back(x)).tanh())
        return logits


class OfTwoNames(nn.Module):
    """A layer that is registered twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.leave = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM)
        self.tied = self.embed

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> (rows, 2 DIM)."""
        logits: Tensor = self.leave(self.tied(self.embed(x).tanh()).tanh())
        return logits


@pytest.mark.parametrize("kind", [TiedAndFrozen, OddlyTied, OfTwoNames], ids=["even", "odd", "a_unit_of_two_names"])
@on_every_rank
def test_tied_parameters_stay_one(implementation: Implementation, kind: type[nn.Module], device: str) -> str:
    """All names of a tied parameter have equal values, before and after steps with the sum of both gradients."""
    model, plain = both(implementation, kind, device, wrap=LINEARS if kind is OfTwoNames else whole)
    if problem := parameters_as_expected("at the start, the gathered", model, plain, tolerance=0):
        return problem
    for step in range(2):
        for p in (*model.parameters(), *plain.parameters()):  # a wrapper need not have zero_grad()
            p.grad = None
        whole_backward(plain, step, device)
        synchronized_backward(model, step, device)
        found = averaged_gradients(model)  # by an update
        if problem := as_expected(f"in step {step}, tied to another, the gradient of", found, gradients_of(plain)):
            return problem
        if not torch.equal(found["embed.weight"], found["tied.weight"]):
            return "embed.weight and tied.weight are one parameter and got different gradients"
        torch.optim.SGD(plain.parameters(), lr=1.0).step()
        if problem := parameters_as_expected(f"after step {step}, tied to another, the gathered", model, plain):
            return problem
    return ""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.complex64], ids=["bfloat16", "complex"])
@on_every_rank
def test_parameters_of_two_dtypes_keep_theirs_or_are_an_error(
    implementation: Implementation, dtype: torch.dtype, device: str
) -> str:
    try:
        return wrong_of_two_dtypes(implementation, dtype, device)
    except Exception as error:
        raise NotAsked(f"parameters of two dtypes in a unit are an error: {type(error).__name__}") from None


class Shift(nn.Module):
    """Holds one parameter with one element."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> (rows, DIM)."""
        return x + self.by.sin()


class Shifts(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.shifts = nn.Sequential(*(Shift() for _ in range(count)))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> (rows, 2 DIM)."""
        return self.shifts(x).repeat(1, 2)


@poisoned
def many_on_rank(implementation: Implementation, count: int, of: str, device: str) -> str:
    units = by_type(Shift) if of == "units" else whole
    model, plain = both(implementation, partial(Shifts, count), device, wrap=units)
    whole_backward(plain, 0, device)
    synchronized_backward(model, 0, device)
    return gradients_as_expected(f"of {count} {of}, the gradient of", model, plain)


@pytest.mark.examples(1, 3, 6)
@pytest.mark.parametrize("of", ["parameters", "units"])
def test_no_gradient_is_left_of_any_number(
    implementation: Implementation, world: World, examples: int, of: str, device: str
) -> None:
    for count in BESIDE_LAUNCHES[:examples]:
        assert_none(world.run(many_on_rank, implementation, count, of, device))


@on_every_rank
def test_another_default_dtype_rounds_neither_parameters_nor_gradients(
    implementation: Implementation, device: str
) -> str:
    """Parameters are float32; a buffer that is made without a dtype has the job's default. Gradients are sums of fewer
    than a hundred roundings."""
    plain, problems = make(Odd, 0, device, torch.float32), []
    whole_x, whole_y = (x.float() for x in batch(0, dist.get_world_size(), device))
    loss(plain, whole_x, whole_y).backward()
    own_x, own_y = (x.float() for x in own_batch(0, device))
    for default in OTHERS:
        module = make(Odd, dist.get_rank(), device, torch.float32)
        with default_dtype(default):
            model = wrap(implementation, module)
            start = full(model)
            loss(model, own_x, own_y).backward()
            model.finish_gradient_synchronization()
            gradients = averaged_gradients(model)
        where = f"where the default dtype is {default}, "
        problems.append(as_expected(f"{where}rank 0's", start, parameters_of(plain), tolerance=0))
        problems.append(as_expected(f"{where}the gradient of", gradients, gradients_of(plain), tolerance=1e-5))
    return first(problems)
