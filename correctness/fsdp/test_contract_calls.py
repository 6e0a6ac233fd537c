"""Contract of a call: inputs that reach the module, the user's hooks, and outputs that a loss uses in part."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from correctness.fsdp.checks import (
    Odd,
    SGDs,
    as_expected,
    averaged_gradients,
    both,
    first,
    gradients_as_expected,
    gradients_of,
    make,
    on_every_rank,
    parameters_as_expected,
    poisoned,
    wrap,
)
from correctness.support.whole_batch import DIM, batch
from impl.fsdp import by_type
from shardmark.api import Implementation

pytestmark = pytest.mark.family("fsdp")

FORMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "tuple": lambda a, b: (a, b),
    "dict": lambda a, b: {"a": a, "b": b, "rows": len(a)},
    "nested": lambda a, b: [{"a": (None, a)}, ({"b": b}, torch.arange(3))],
}
LEAVES: dict[str, Callable[[Any], tuple[Tensor, Tensor]]] = {
    "tuple": lambda out: out,
    "dict": lambda out: (out["a"], out["b"]),
    "nested": lambda out: (out[0]["a"][1], out[1][0]["b"]),
}


class Fork(nn.Module):
    """Two outputs; each uses its own layer and a parameter that both share."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.rand(DIM))
        self.form = form

    def forward(self, x: Any) -> Any:
        """(rows, DIM), or a dict with it -> two of the same shape, in the given form."""
        x = x["x"] if isinstance(x, dict) else x
        return FORMS[self.form](self.left(x * self.scale).tanh(), self.right(self.scale * x).sin())


class Forks(nn.Module):
    """One fork of each form; the root has its own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(DIM))
        self.forks = nn.ModuleDict({form: Fork(form) for form in FORMS})

    def forward(self, x: Tensor) -> dict[str, Any]:
        x = (x * self.weight).tanh()
        tuples, dicts, nested = self.forks.values()
        return {"tuple": tuples(x), "dict": dicts(x=x), "nested": nested({"x": x})}


@pytest.mark.parametrize("units", [Fork, pytest.param(nn.Linear, marks=pytest.mark.judged)], ids=["forks", "linears"])
@on_every_rank
@poisoned
def test_a_loss_may_use_some_of_a_units_outputs(
    implementation: Implementation, units: type[nn.Module], device: str
) -> str:
    model, plain = both(implementation, Forks, device, wrap=by_type(units))
    optimizers = SGDs(model, plain, lr=1.0)
    for form in FORMS:
        for used in ((0,), (1,), (0, 1)):
            optimizers.zero_grad()
            x, _ = batch(len(used), 1, device)  # equal on every rank
            for each in (model, plain):
                leaves = LEAVES[form](each(x)[form])
                sum(leaves[i].square().mean() for i in used).backward()  # type: ignore[union-attr]
            model.finish_gradient_synchronization()
            some = " and ".join(("first", "second")[i] for i in used)
            what = f"where the loss uses the {some} output of a {form}, the gradient of"
            expected = gradients_of(plain)
            if problem := as_expected(what, averaged_gradients(model), expected):
                return problem
            optimizers.optimizers[1].step()
    return ""


class Pair(NamedTuple):
    first: Any
    second: Any


class Recording(nn.Module):
    """Records the dtype of each tensor it receives. Owns a parameter itself."""

    def __init__(self) -> None:
        super().__init__()
        self.product: Callable[[Tensor], Tensor] = self.weighted
        self.weight: Tensor | None = nn.Parameter(torch.rand(DIM))
        self.seen: dict[str, torch.dtype] = {}

    def forward(
        self,
        x: Tensor,
        pair: Any,
        many: Any,
        by: Any,
        *,
        named: Tensor,
        deep: Any,
        last: Any,
        rows: Tensor,
        mask: Tensor,
        rotations: Tensor,
    ) -> Tensor:
        """(rows, DIM) -> (rows, DIM)."""
        received = {
            "positional": x,
            "in a named tuple": pair.first,
            "in a dict in a tuple": pair.second["wide"],
            "in a positional list": many[0],
            "in a positional dict": by["name"],
            "keyword": named,
            "in a list of a keyword": deep[0],
            "in a dict of a keyword": deep[1]["in"],
            "in a keyword dict": last["name"],
            "in a tuple of a keyword dict": last["pair"][0],
            "integer": rows,
            "boolean": mask,
            "complex": rotations,
            "complex in a list of a keyword": deep[2],
        }
        self.seen |= {name: tensor.dtype for name, tensor in received.items()}
        return self.product(x)

    def weighted(self, x: Tensor) -> Tensor:
        return x * self.weight


class WithoutParameters(Recording):
    """Has no parameter itself: its linear layer, which is another unit, has them all."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.product = None, nn.Linear(DIM, DIM)


@pytest.mark.parametrize("kind", [Recording, WithoutParameters], ids=["own_parameter", "without_parameters"])
@pytest.mark.parametrize("compute", [None, torch.bfloat16, torch.float16], ids=["none", "bfloat16", "float16"])
@on_every_rank
def test_floating_point_inputs_are_cast_wherever_they_are(
    implementation: Implementation, compute: torch.dtype | None, kind: type[Recording], device: str
) -> str:
    inner = make(kind, 0, device, torch.float32)
    model = wrap(implementation, inner, compute_dtype=compute)
    x = torch.ones(2, DIM, device=device)
    rows, mask = torch.arange(2, device=device), torch.ones(2, dtype=torch.bool, device=device)
    positional: Any = x, Pair(x, {"wide": x.double()}), [x], {"name": x}
    rotations = torch.polar(x, x)  # as a decoder's, which compute one table for all blocks
    keyword: Any = {"named": x, "deep": [x, {"in": x}, rotations], "last": {"name": x, "pair": (x, x)}}
    keyword |= {"rows": rows, "mask": mask, "rotations": rotations}
    before_call = [id(each) for each in tree_leaves((positional, keyword))]
    model(*positional, **keyword).sum().backward()
    if before_call != [id(each) for each in tree_leaves((positional, keyword))]:
        return f"with compute_dtype={compute} the call has put other tensors into its caller's lists or dicts"
    model.finish_gradient_synchronization()
    own = {"in a dict in a tuple": torch.float64, "integer": torch.int64, "boolean": torch.bool}
    own |= dict.fromkeys(("complex", "complex in a list of a keyword"), torch.complex64)
    for name, found in inner.seen.items():
        before = own.get(name, torch.float32)
        expected = compute if compute and before.is_floating_point else before
        if found != expected:
            return f"with compute_dtype={compute} the input that is {name} arrives as {found}, expected {expected}"
    return "" if inner.seen else "the module's forward was not called"


def _double(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return tuple(2 * x for x in args), {name: 2 * x for name, x in kwargs.items()}


def _triple(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return 3 * output


def _halve(module: nn.Module, into: Any, out_of: Any) -> Any:
    return tuple(x if x is None else x / 2 for x in into)


@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("when", ["before", "after"])
@on_every_rank
def test_the_modules_own_hooks_run(implementation: Implementation, when: str, keyword: bool, device: str) -> str:
    """Hooks of the root and of inner layers that change inputs, outputs and gradients."""
    plain, inner = make(Odd, 0, device), make(Odd, 0, device)

    def register(root: nn.Module) -> None:
        for each in (root, *[part for part in root.modules() if isinstance(part, nn.Linear)][:2]):
            each.register_forward_pre_hook(_double, with_kwargs=True)
            each.register_forward_hook(_triple)
            each.register_full_backward_hook(_halve)

    if when == "before":
        register(inner)
    model = wrap(implementation, inner)
    if when == "after":
        register(model.module)
    register(plain)
    x, _ = batch(0, 1, device)  # equal on every rank
    found, expected = (each(x=x) if keyword else each(x) for each in (model, plain))
    for output in (found, expected):
        output.square().mean().backward()
    model.finish_gradient_synchronization()
    where = f"with hooks registered {when} the module is wrapped, the"
    output = as_expected(where, {"output": found.detach()}, {"output": expected.detach()})
    return first([output, gradients_as_expected(f"{where} gradient of", model, plain)])


class Table(nn.Module):
    """Takes nothing, as learned positions do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(3, DIM))

    def forward(self) -> Tensor:
        return self.weight.sin()


class OfATable(nn.Module):
    """(rows, DIM), or nothing -> (3, DIM)."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.linear = Table(), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor | None = None) -> Tensor:
        return self.linear(self.table() if x is None else self.table() * x.mean(0))


@pytest.mark.parametrize("given", [False, True], ids=["root_too", "unit_alone"])
@on_every_rank
def test_a_module_may_take_no_arguments(implementation: Implementation, given: bool, device: str) -> str:
    model, plain = both(implementation, OfATable, device, wrap=by_type(Table, nn.Linear))
    optimizers = SGDs(model, plain)
    for step in range(2):
        optimizers.zero_grad()
        x, _ = batch(step, 1, device)  # equal on every rank
        for each in (model, plain):
            (each(x) if given else each()).square().mean().backward()
        model.finish_gradient_synchronization()
        optimizers.step()
        if problem := parameters_as_expected(f"after step {step + 1} of calls without arguments,", model, plain):
            return problem
    return ""
