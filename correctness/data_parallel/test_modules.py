"""Wrapping preserves the module: calls, parameters, buffers and state."""

import gc
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.data_parallel.averaging import Products, backward, values, wrap, wrong_averages
from correctness.support.contracts import is_ours
from correctness.support.on_ranks import on_every_rank
from shardmark.api import Implementation
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("data_parallel")


class Scaled(nn.Module):
    """Counts forward passes and keeps the last input's mean in buffers; takes keywords, returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5), nn.Linear(3, 2, bias=False))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(()))
        self.register_buffer("scratch", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor, *, scale: float = 1.0, into: Any = None) -> dict[str, Any]:
        """(rows, 2) -> {"out": (rows, 2), "scale": scale}; appends its input to a list in `into`, or fills a tensor."""
        if isinstance(into, Tensor):
            into.fill_(scale)
        elif into is not None:
            (held,) = into.values() if isinstance(into, dict) else into
            held.append(x.sum())
        self.calls += 1
        self.mean.copy_(x.mean())
        self.scratch.copy_(x.sum())
        return {"out": self.inner(x) * scale, "scale": scale}


@on_every_rank
def test_modules_work_as_before(implementation: Implementation, device: str) -> list[str]:
    model = wrap(implementation, Scaled().to(device))
    model.module.eval()
    x = torch.ones(3, 2, device=device)
    cache = torch.zeros(3, device=device)
    found, expected, lines = model(x=x, scale=2.0, into=cache), model.module.inner(x) * 2.0, []
    seen: list[Any] = []
    for given in ({"sums": seen}, [seen], (seen,)):
        model(x, into=given)
    if len(seen) != 3:
        lines.append(f"of what forward writes into lists in dicts, lists and tuples that it is given, {len(seen)} of 3")
    if not bool((cache == 2).all()):
        lines.append(f"what forward writes into a tensor that it is given, as into a cache: {cache.tolist()}, not 2")
    if not isinstance(found, dict) or found.keys() != {"out", "scale"} or found["scale"] != 2.0:
        lines.append(f"the module returns a dict of 'out' and 'scale', and its wrapper {found!r}"[:300])
    elif not torch.equal(found["out"], expected):
        lines.append("the wrapper's output with scale=2.0 is not the module's")
    if isinstance(model, nn.Module):
        if {*map(id, model.parameters())} != {*map(id, model.module.parameters())}:
            lines.append("the wrapper is an nn.Module, and its parameters() are not the module's")
        model.train()
        if not model.module.inner[1].training:
            lines.append("the wrapper is an nn.Module, and its train() does not reach the module")
    return lines


@dataclass
class Answer:
    loss: Tensor


class Pair(NamedTuple):
    loss: Tensor
    more: str


class Named(OrderedDict[str, Tensor]):
    """As outputs of transformers are, of a class that PyTorch's trees do not know."""


RETURNS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {  # forward's output; the loss in it
    "tensor": (lambda loss: loss, lambda output: output),
    "list": (lambda loss: [None, loss], lambda output: output[1]),
    "dict_of_tuple": (lambda loss: {"loss": (loss,)}, lambda output: output["loss"][0]),
    "dataclass": (Answer, lambda output: output.loss),
    "dict_of_its_own": (lambda loss: Named(loss=loss), lambda output: output["loss"]),
    "named_tuple": (lambda loss: Pair(loss, "words"), lambda output: output[0]),
}


class Returning(nn.Linear):
    def __init__(self, returns: str) -> None:
        super().__init__(3, 1, bias=False)
        nn.init.ones_(self.weight)
        self.returned, _ = RETURNS[returns]

    def forward(self, x: Tensor) -> Any:
        """(rows, 3) -> a loss (), as RETURNS has it."""
        return self.returned(super().forward(x).sum())


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("returns", RETURNS)
@on_every_rank
def test_gradients_are_averaged_whatever_forward_returns(
    implementation: Implementation, returns: str, training: bool, device: str
) -> list[str]:
    """And it keeps its class. In evaluation mode too, in which models with batch norm or dropout are fine-tuned."""
    module = Returning(returns).to(device)
    model = wrap(implementation, module)
    (model if isinstance(model, nn.Module) else module).train(training)
    _, loss_of = RETURNS[returns]
    output = model(torch.full((2, 3), dist.get_rank() + 1.0, device=device))
    if type(output) is not (own := type(module.returned(torch.zeros(())))):
        return [f"where forward returns a {own.__name__}, the wrapper returns a {type(output).__name__}"]
    loss_of(output).backward()
    model.finish_gradient_synchronization()
    mean = dist.get_world_size() + 1.0  # of two rows of rank + 1
    found = module.weight.grad
    right = found is not None and torch.allclose(found, torch.full_like(found, mean))
    return [] if right else [f"where forward returns a {returns} the gradient is {found}, expected {mean} everywhere"]


BESIDE: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], Tensor]]] = {  # a loss beside another output
    "tuple": (lambda loss, other: (other, loss), lambda output: output[1]),
    "dict_of_list": (lambda loss, other: {"loss": [loss, other]}, lambda output: output["loss"][0]),
}


class ReturningTwo(nn.Linear):
    """Beside the loss it returns a root of zero, whose derivative is infinite, and times zero not a number."""

    def forward(self, x: Tensor, form: str) -> Any:
        """(rows, 3) -> two of (), as BESIDE has them."""
        loss = super().forward(x).sum()
        return BESIDE[form][0](loss, (0 * loss).sqrt())


@on_every_rank
def test_an_output_that_the_loss_does_not_use_adds_nothing_to_gradients(
    implementation: Implementation, device: str
) -> list[str]:
    """Its gradient is missing, and is not zeros that run back through the module."""
    wrong = []
    for form, (_, loss_of) in BESIDE.items():
        model = wrap(implementation, ReturningTwo(3, 1).to(device))
        loss_of(model(torch.full((2, 3), dist.get_rank() + 1.0, device=device), form)).backward()
        model.finish_gradient_synchronization()
        found, mean = model.module.weight.grad, dist.get_world_size() + 1.0  # of two rows of rank + 1
        if not torch.allclose(found, torch.full_like(found, mean)):
            wrong.append(
                f"where the loss uses one of two outputs in a {form}, the gradient is {found.tolist()}, and without "
                f"the wrapper {mean} everywhere"
            )
    return wrong


class Nested(nn.Module):
    """Takes tensors by position, by keyword and inside lists and dicts; returns two."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor, more: dict[str, list[Tensor]], *, scale: Tensor) -> tuple[Tensor, Tensor]:
        """(rows, 3), {"a": [(rows, 3), (3,)]}, (3,) -> (rows, 3), ()"""
        out = self.inner(x) * scale + sum(more["a"])
        return out, out.square().sum()


def _with_hooks(said: list[str]) -> Nested:
    """Add root hooks that change inputs, outputs and gradients."""
    module = Nested()
    with torch.no_grad():
        module.inner.weight.copy_(torch.arange(9.0).view(3, 3))
        module.inner.bias.copy_(torch.arange(3.0))

    def before(_: nn.Module, args: Any, kwargs: Any) -> Any:
        said.append("forward pre-hook")
        return (args[0] * 2, {"a": [each + 1 for each in args[1]["a"]]}), {"scale": kwargs["scale"] * 3}

    def after(_: nn.Module, args: Any, kwargs: Any, out: Any) -> Any:
        said.append("forward hook")
        return out[0] + kwargs["scale"], out[1] * 5

    def before_backward(_: nn.Module, grads: Any) -> Any:
        said.append("backward pre-hook")
        return tuple(grad * 2 for grad in grads)

    def after_backward(_: nn.Module, grads: Any, __: Any) -> Any:
        said.append("backward hook")
        return tuple(grad if grad is None else grad * 7 for grad in grads)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(after, with_kwargs=True)
    module.register_full_backward_pre_hook(before_backward)
    module.register_full_backward_hook(after_backward)
    return module


@on_every_rank
def test_a_call_is_the_modules_own_with_its_hooks(implementation: Implementation, device: str) -> list[str]:
    """Describe differences from the unwrapped module, for equal input on every rank."""
    outcomes = []
    for wrapped in (True, False):
        said: list[str] = []
        module = _with_hooks(said).to(device)
        model = wrap(implementation, module) if wrapped else module
        tensors = [torch.arange(1.0, 7.0, dtype=torch.float64, device=device).view(2, 3) * i for i in (1, 2, 3)]
        x, a, scale = (tensor.requires_grad_() for tensor in tensors)
        first, second = model(x, {"a": [a, a[0]]}, scale=scale[0])
        (first.sum() + second).backward()
        if wrapped:
            model.finish_gradient_synchronization()
            module = model.module
        found = {"the first output": first, "the second output": second, "the input's gradient": x.grad}
        found |= {"that of a nested input": a.grad, "that of a keyword": scale.grad}
        found |= {f"the gradient of {name!r}": p.grad for name, p in module.named_parameters()}
        outcomes.append((found, said))
    (found, said), (expected, expected_said) = outcomes
    called = [f"the wrapper's call runs the module's hooks {said}, and the module's {expected_said}"]
    return called * (said != expected_said) + [
        f"with hooks of the root module that change values, {name} is another than without the wrapper: "
        f"found {found[name].flatten()[:3].tolist()}, expected {value.flatten()[:3].tolist()}"
        for name, value in expected.items()
        if not torch.allclose(found[name], value)
    ]


@pytest.mark.should("state_dict has the module's own names")
@on_every_rank
def test_the_state_dict_has_the_modules_own_names_and_values(implementation: Implementation, device: str) -> list[str]:
    model = wrap(implementation, Scaled().double().to(device))
    found, expected = model.state_dict(), model.module.state_dict()
    if list(found) != list(expected):
        return [f"state_dict() has the names {list(found)}, and the module's has {list(expected)}"]
    return [
        f"state_dict() has another {name!r}: {found[name]}, and the module's has {expected[name]}"
        for name in found
        if found[name].dtype != expected[name].dtype or not torch.equal(found[name], expected[name])
    ]


def load(implementation: Implementation, device: str) -> str:
    """Load a state with the module's own names; return "loaded", "an error" or "nothing"."""
    model = wrap(implementation, Scaled().to(device))
    state = {name: torch.full_like(tensor, 3) for name, tensor in model.module.state_dict().items()}
    if not hasattr(model, "load_state_dict"):
        return "an error"
    try:
        model.load_state_dict(state)
    except RuntimeError:  # torch reports missing names
        return "an error"
    return "loaded" if all(bool((x == 3).all()) for x in model.module.state_dict().values()) else "nothing"


def test_a_state_dict_is_loaded(
    implementation: Implementation, world: World, device: str, record_property: Callable[[str, object], None]
) -> None:
    found = set(world.run(load, implementation, device))
    assert "nothing" not in found, "load_state_dict() with the module's own names raises nothing and loads nothing"
    if found == {"an error"} and not is_ours(implementation):
        record_property("note", "load_state_dict() does not take the module's own names: call the module's")
    else:
        assert found == {"loaded"}, found


@pytest.mark.should("buffers that forward changes stay each rank's own")
@on_every_rank
def test_buffers_that_forward_changes_are_not_synchronized(implementation: Implementation, device: str) -> list[str]:
    """Buffers that forward writes keep this rank's values; rank 0 runs forward once more."""
    model, rank, lines = wrap(implementation, Scaled().to(device)), dist.get_rank(), []
    for step in range(1, 4):
        x = torch.full((2, 2), float(10 * step + rank), device=device)
        model(x)["out"].sum().backward()
        model.finish_gradient_synchronization()
        if rank == 0:
            model.module(x)
        expected = {"calls": step * (1 + (rank == 0)), "mean": x.mean().item(), "scratch": x.sum().item()}
        lines += [
            f"in step {step}: the buffer {name!r}, which forward writes, is {found.item()} and not this rank's own "
            f"{expected[name]}"
            for name, found in model.module.named_buffers()
            if found.item() != expected[name]
        ]
    return lines


def _own(like: list[Tensor], step: int, rank: int) -> list[Tensor | None]:
    return [*values(rank, *like, step=step)]


@pytest.mark.should("a module may be wrapped again once its wrapper is deleted")
@on_every_rank
def test_a_module_may_be_wrapped_again_once_its_wrapper_is_deleted(
    implementation: Implementation, device: str
) -> list[str]:
    """Hooks that the first wrapper has left on parameters must not reduce beside the second's."""
    module, wrong = Products(torch.zeros(5), torch.zeros(2, 3)).to(device), []
    for step, when in enumerate(("of the first wrapper", "of a second one, once the first is deleted")):
        model = wrap(implementation, module)
        like = [p.detach().cpu() for p in module.parameters()]
        own = partial(_own, like, step)
        module.zero_grad()
        backward(model, own(dist.get_rank()), device)
        model.finish_gradient_synchronization()
        wrong += wrong_averages(model, own, when)
        del model
        gc.collect()
    return wrong
