"""Contract of full sharding, one property per test, from wrapping to a step: the first failure names the fault."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.fsdp.checks import (
    ODD_MODULES,
    Deep,
    Odd,
    as_expected,
    assert_none,
    both,
    first,
    full,
    gradients_as_expected,
    make,
    name_in_module,
    on_every_rank,
    parameters_of,
    poisoned,
    synchronized_backward,
    trained,
    whole_backward,
    wrap,
)
from correctness.fsdp.of_pytorch import FSDP1, expect_failures
from correctness.support.exact import ROUNDINGS
from correctness.support.global_state import global_state_stays
from correctness.support.own_model import (
    OWN,
    Trained,
    assert_as_in_one_process,
    clipping,
    optimizer_of,
    own_model,
    train,
)
from correctness.support.whole_batch import (
    DIM,
    MODULES,
    STEPS,
    batch,
    exact_single_process,
    loss,
    own_batch,
)
from impl.distributed import local
from impl.fsdp import by_type, whole, with_blocks
from shardmark.api import Implementation, OwnModelCase
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("fsdp")


@pytest.fixture(autouse=True)
def integers(request: pytest.FixtureRequest, implementation: Implementation) -> None:
    expect_failures(request, implementation, {"quantized": FSDP1})


@pytest.mark.parametrize("name", ["odd", "tied_and_frozen", "strided", "quantized"])
@on_every_rank
def test_every_rank_starts_from_rank_0s_parameters(implementation: Implementation, name: str, device: str) -> str:
    kind = (ODD_MODULES | MODULES)[name]
    model = wrap(implementation, make(kind, dist.get_rank(), device), wrap=whole)
    return as_expected("rank 0's", full(model), parameters_of(make(kind, 0, device)), tolerance=0)


@on_every_rank
def test_the_random_state_is_the_callers(implementation: Implementation, device: str) -> str:
    """Ranks seed their data and their dropout differently, before they wrap a module."""
    module = make(Odd, 0, device)
    with global_state_stays("wrapping a module"):
        model = wrap(implementation, module)
    with global_state_stays("a step of a module that draws nothing"):
        synchronized_backward(model, 0, device)
    return ""


class Table(nn.Module):
    """A module with buffers and no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("positions", torch.randn(3, 2))
        self.register_buffer("transposed", torch.randn(3, 2).T)
        self.register_buffer("hidden", torch.randn(5), persistent=False)
        self.register_buffer("count", torch.randint(2**40, ()))
        self.register_buffer("absent", None)


class Buffered(nn.Module):
    """Buffers in the root, in a module with parameters, in modules without, and deep below modules without."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        self.layer.register_buffer("mask", torch.rand(7) > 0.5)
        self.register_buffer("offset", torch.randn(DIM))
        self.table = Table()
        self.deep = nn.Sequential(nn.Identity(), nn.ModuleList([Table()]))


@pytest.mark.parametrize("units", [None, nn.Linear], ids=["whole", "linears"])
@on_every_rank
def test_every_rank_starts_with_rank_0s_buffers(
    implementation: Implementation, units: type[nn.Module] | None, device: str
) -> str:
    model = wrap(
        implementation, make(Buffered, dist.get_rank(), device), wrap=by_type(units) if units is not None else whole
    )
    expected = dict(make(Buffered, 0, device).named_buffers())
    found = {name_in_module(name): local(b) for name, b in model.module.named_buffers()}
    if missing := [name for name in expected if name not in found]:
        return f"the buffer {missing[0]} is gone"
    return as_expected("rank 0's buffer", found, expected, tolerance=0)


@on_every_rank
def test_names_are_the_unwrapped_modules(implementation: Implementation, device: str) -> str:
    plain = make(Deep, 0, device)
    model = wrap(implementation, make(Deep, 0, device))
    expected, found = parameters_of(plain), full(model)
    if extra := [name for name in found if name not in expected]:
        return f"gather_full_parameters() has {extra[0]!r}; the module's names are {', '.join(expected)}"
    return as_expected("the gathered", found, expected, tolerance=0)


@on_every_rank
def test_modules_keep_their_classes(implementation: Implementation, device: str) -> str:
    """Wrappers may insert modules around the user's."""
    model = wrap(implementation, make(Deep, 0, device))
    found = list(model.module.modules())
    for kind in {type(part) for part in Deep().modules()}:
        before = sum(isinstance(part, kind) for part in Deep().modules())
        after = sum(isinstance(part, kind) for part in found)
        if after < before:
            return f"of {before} modules that were a {kind.__name__} only {after} are still one by isinstance"
    return ""


@pytest.mark.parametrize("name", ODD_MODULES)
@on_every_rank
def test_forward_computes_with_the_full_parameters(implementation: Implementation, name: str, device: str) -> str:
    kind = ODD_MODULES[name]
    casts = name == "quantized"  # and leaves integers as they are
    model, plain = both(implementation, kind, device, compute_dtype=torch.float32 if casts else None)
    x, _ = own_batch(0, device)
    before = x.clone()
    close = ROUNDINGS * torch.finfo(torch.float32).eps if casts else None
    with torch.no_grad():
        output = as_expected("the output of", {"forward": model(x)}, {"forward": plain(x)}, close)
    return output or ("" if torch.equal(x, before) else "forward changed its input")


@pytest.mark.parametrize("name", ODD_MODULES)
@on_every_rank
@poisoned
def test_one_step_applies_the_mean_of_the_ranks_gradients(
    implementation: Implementation, name: str, device: str
) -> str:
    kind = ODD_MODULES[name]
    model, plain = both(implementation, kind, device)
    whole_backward(plain, 0, device)
    synchronized_backward(model, 0, device)
    return gradients_as_expected("the mean over the ranks of the gradient of", model, plain)


@on_every_rank
def test_each_gradient_has_the_shape_and_dtype_of_its_shard(implementation: Implementation, device: str) -> str:
    options = {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
    model = wrap(implementation, make(Odd, 0, device), **options)
    x, _ = own_batch(0, device)
    model(x).sum().backward()
    model.finish_gradient_synchronization()
    for i, parameter in enumerate(model.parameters()):
        if parameter.grad is None:
            if local(parameter).numel():
                return f"shard {i} of shape {tuple(parameter.shape)} has no gradient"
        elif parameter.grad.shape != parameter.shape:
            return f"shard {i} has the shape {tuple(parameter.shape)} and its gradient {tuple(parameter.grad.shape)}"
        elif parameter.grad.dtype != parameter.dtype:
            return f"shard {i} is of {parameter.dtype} and its gradient of {parameter.grad.dtype}"
    return ""


@on_every_rank
@poisoned
def test_an_inputs_gradient_is_the_ranks_own(implementation: Implementation, device: str) -> str:
    model, plain = both(implementation, Odd, device)
    x, y = own_batch(0, device)
    mine, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
    loss(model, mine, y).backward()
    model.finish_gradient_synchronization()
    loss(plain, expected, y).backward()
    if mine.grad is None:
        return "the input requires a gradient and got none"
    assert expected.grad is not None
    return as_expected("this rank's own gradient of", {"the input": mine.grad}, {"the input": expected.grad})


class Arguments(nn.Module):
    """Module with keyword arguments, integer tensors and nested outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer = nn.Embedding(7, DIM), nn.Linear(DIM, DIM)

    def forward(self, tokens: Tensor, pair: tuple[Tensor, float], *, scale: Tensor) -> dict[str, Any]:
        """(rows) -> hidden (rows, DIM) and more."""
        hidden = self.layer(self.embedding(tokens)) * scale + pair[0] * pair[1]
        return {"hidden": hidden, "more": (hidden.sum(), len(tokens)), "nothing": None}


@on_every_rank
def test_arguments_and_outputs_are_the_modules_own(implementation: Implementation, device: str) -> str:
    model, plain = both(implementation, Arguments, device)
    tokens, (x, _) = torch.tensor([0, 3, 6], device=device), batch(0, 1, device)  # equal on every rank
    found, expected = (each(tokens, (x, 0.5), scale=x.abs()) for each in (model, plain))
    if not isinstance(found, dict) or list(found) != list(expected) or found["more"][1] != 3:
        return f"the module returns a dict of {', '.join(expected)}, and the sharded one {type(found).__name__}"
    for output in (found, expected):
        (output["hidden"].square().mean() + output["more"][0]).backward()
    model.finish_gradient_synchronization()
    hidden = as_expected("the output", {"hidden": found["hidden"]}, {"hidden": expected["hidden"]})
    return first([hidden, gradients_as_expected("the gradient of", model, plain)])


@pytest.mark.parametrize("name", MODULES)
def test_twenty_steps_equal_a_single_process_on_the_whole_batch(
    implementation: Implementation, world: World, name: str, device: str
) -> None:
    expected, close = exact_single_process(name, world.size, device)
    ranks = world.run(trained, implementation, name, device)
    assert_none([as_expected(f"after {STEPS} steps,", found, expected, close) for found in ranks])


def train_own_model_on_rank(implementation: Implementation, case: OwnModelCase, device: str) -> Trained:
    own = own_model(case, device, dist.get_rank())
    model = wrap(implementation, own.module, wrap=with_blocks(own.blocks))
    optimizer = optimizer_of(case, own)(list(model.parameters()))
    return train(model, case, device, lambda: full(model), optimizer, model, clipping(model))


@pytest.mark.cases(OWN)
def test_a_users_own_model_trains_as_in_one_process(
    implementation: Implementation, world: World, case: OwnModelCase, device: str
) -> None:
    ranks = world.run(train_own_model_on_rank, implementation, case, device)
    assert_as_in_one_process(ranks, case, device)
