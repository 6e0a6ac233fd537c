"""Helpers that run on ranks: wrap a module, run a step, describe the first tensor that is not as expected."""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.fsdp.odd_parameters import Empty, Scalar, Strided
from correctness.support.exact import exact
from correctness.support.exact import tolerance as exact_tolerance
from correctness.support.on_ranks import running_on_ranks
from correctness.support.whole_batch import DIM, adam, batch, loss, module, own_batch, train
from impl.distributed import local
from impl.fsdp import by_type
from shardmark.api import Implementation

LINEARS = by_type(nn.Linear)
HANG = 30.0
"""Deadline in seconds of tests in which a wrong implementation is likely to hang."""


def norm_tolerance() -> float:
    """Tolerance for the norm that clipping returns: it may be in float32, whatever the gradients are."""
    return exact_tolerance(1e-6)


class Odd(nn.Module):
    """Neither two nor three ranks divide the rows and elements evenly. One parameter has one element. Two are added:
    autograd gives both one gradient tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((1,), 0.5))
        self.added = nn.ParameterList(torch.rand(2 * DIM) for _ in range(2))
        self.layers = nn.Sequential(
            nn.Linear(DIM, 7), nn.Tanh(), nn.Linear(7, 5, bias=False), nn.Tanh(), nn.Linear(5, 2 * DIM)
        )

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> (rows, 2 DIM)."""
        return self.layers(x) * self.scale + (self.added[0] + self.added[1])


class Tiny(nn.Module):
    """One element: all ranks but one have empty shards."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> (rows, 2 DIM)."""
        return (x * self.weight).repeat(1, 2)


class Large(nn.Sequential):
    """A parameter of 132,731 elements, more than 1 MB in float64."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, 401), nn.Tanh(), nn.Linear(401, 331), nn.Tanh(), nn.Linear(331, 2 * DIM))


class Deep(nn.Module):
    """Names of one to five parts, some of them names that wrappers often use."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))
        self.output = nn.Linear(DIM, 2 * DIM)  # registered first, used last
        self.module = nn.Sequential(nn.Linear(DIM, DIM), nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()))
        self.blocks = nn.ModuleList(nn.ModuleDict({"module": nn.Sequential(nn.Linear(DIM, DIM))}) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> (rows, 2 DIM)."""
        x = self.module(x * self.weight)
        for block in self.blocks:
            x = block["module"](x).tanh()
        return self.output(x)


class Quantized(nn.Module):
    """A frozen int8 weight, of which forward reads the bits, and a trainable scale of each row, beside a trainable
    layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, 2 * DIM)
        self.quantized = nn.Parameter(torch.randint(-127, 128, (2 * DIM, DIM), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(2 * DIM) / 127)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> (rows, 2 DIM)."""
        low, high = self.quantized & 15, self.quantized >> 4  # an error where a wrapper has cast it
        return self.layer(x) + x @ (16 * high + low).to(x.dtype).T * self.scale


class TeachesItself(nn.Module):
    """A layer is called without gradients, and then with them."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.leave = nn.Linear(DIM, DIM), nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> (rows, 2 DIM)."""
        with torch.no_grad():
            taught = self.layer(x).tanh()
        return self.leave(self.layer(x) - taught)


ODD_MODULES = {
    "odd": Odd,
    "tiny": Tiny,
    "large": Large,
    "deep": Deep,
    "empty": Empty,
    "scalar": Scalar,
    "strided": Strided,
    "quantized": Quantized,
    "teaches_itself": TeachesItself,
}


def make(kind: Any, seed: int, device: str, dtype: torch.dtype | None = None) -> Any:
    """Make a module of the class with seeded weights, by default in the dtype of exact checks."""
    torch.manual_seed(seed)
    return kind().to(device, dtype or exact())


def wrap(implementation: Implementation, module: nn.Module, **options: Any) -> Any:
    """Shard the module; units are its linears by default. Options beyond the contract are passed if the implementation
    accepts them."""
    every = ("process_group", "compute_dtype", "reduce_dtype")
    options = {"wrap": LINEARS, **options}
    return implementation.watched(
        module, **{k: v for k, v in options.items() if k in every or implementation.accepts(k)}
    )


def both(implementation: Implementation, kind: Any, device: str, **options: Any) -> tuple[Any, Any]:
    """Make a sharded and an unsharded module with the same weights."""
    return wrap(implementation, make(kind, 0, device), **options), make(kind, 0, device)


def name_in_module(name: str) -> str:
    """The name before wrapping: FSDP1 puts a module of its own around each unit."""
    return name.replace("_fsdp_wrapped_module.", "")


def full(model: Any) -> dict[str, Tensor]:
    """Gather the full parameters, on the CPU."""
    return {name: tensor.detach().cpu() for name, tensor in model.gather_full_parameters().items()}


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """Copy an unsharded module's parameters under all their names."""
    return {name: p.detach().cpu().clone() for name, p in module.named_parameters(remove_duplicate=False)}


def gradients_of(module: nn.Module) -> dict[str, Tensor]:
    """Return an unsharded module's gradients, zeros where there are none."""
    named = module.named_parameters(remove_duplicate=False)
    return {name: (torch.zeros_like(p) if p.grad is None else p.grad.clone()).cpu() for name, p in named}


def backward(model: Any, step: int, device: str, group: dist.ProcessGroup | None = None) -> None:
    """Run forward and backward on this rank's rows."""
    loss(model, *own_batch(step, device, group)).backward()


def synchronized_backward(model: Any, step: int, device: str, group: dist.ProcessGroup | None = None) -> None:
    """Run forward and backward on this rank's rows, and synchronize the gradients."""
    backward(model, step, device, group)
    model.finish_gradient_synchronization()


def whole_backward(module: nn.Module, step: int, device: str, group: dist.ProcessGroup | None = None) -> None:
    """Run forward and backward on all ranks' rows in an unsharded module: the reference."""
    loss(module, *batch(step, dist.get_world_size(group), device)).backward()


def trained(implementation: Implementation, name: str, device: str, **options: Any) -> dict[str, Tensor]:
    """Train one of MODULES from this rank's own weights. Return the full state under the unwrapped module's names."""
    model = wrap(implementation, module(name, dist.get_rank(), device), **options)
    train(model, adam(model), device, model.finish_gradient_synchronization)
    buffers = {name_in_module(key): local(buffer).cpu() for key, buffer in model.module.named_buffers()}
    found = buffers | full(model)
    return {key: found[key] for key in module(name, 0, "cpu").state_dict()}


def averaged_gradients(model: Any) -> dict[str, Tensor]:
    """Return the full averaged gradients, as the difference that an SGD step with learning rate 1 makes. Changes the
    parameters."""
    before = full(model)
    SGDs(model, lr=1.0).step()
    after = full(model)
    return {name: before[name] - after[name] for name in before}


def poisoned(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorator: fill uninitialized memory with NaN while the function runs."""

    @wraps(function)
    def run(*args: Any) -> Any:
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            return function(*args)
        finally:
            torch.use_deterministic_algorithms(before)

    return run


class SGDs:
    """One SGD per model, made before the first step as users make it."""

    def __init__(self, *models: Any, lr: float = 0.1) -> None:
        self.optimizers = [torch.optim.SGD(model.parameters(), lr=lr) for model in models]

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()


def contains(model: Any, kind: type) -> bool:
    """Return True if the model contains a module of that class (PyTorch's own wrapper, which has limits of its own)."""
    return any(isinstance(part, kind) for part in model.module.modules())


def as_expected(
    what: str, found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float | None = None
) -> str:
    """Return "" if all tensors equal the expected ones, else a line with the first difference: found and expected.
    `what` goes before the parameter's name in that line, such as "the gradient of". The default tolerance is that of
    exact checks."""
    close = exact_tolerance() if tolerance is None else tolerance
    if missing := [name for name in expected if name not in found]:
        return f"gather_full_parameters() has no {missing[0]!r}; it has {', '.join(found)}"
    for name, value in expected.items():
        got = found[name]
        if got.shape != value.shape:
            return f"{what} {name} has the shape {tuple(got.shape)}, expected {tuple(value.shape)}"
        got, value = (torch.view_as_real(x.detach()) if x.is_complex() else x for x in (got, value))
        if not torch.allclose(got.double(), value.double(), rtol=close, atol=close):
            return f"{what} {name} is not as expected: {_difference(got.double(), value.double())}"
    return ""


def gradients_as_expected(what: str, model: Any, plain: nn.Module, tolerance: float | None = None) -> str:
    """`as_expected` of the averaged gradients, against those of an unsharded module. Changes the parameters."""
    return as_expected(what, averaged_gradients(model), gradients_of(plain), tolerance)


def parameters_as_expected(what: str, model: Any, plain: nn.Module, tolerance: float | None = None) -> str:
    """`as_expected` of the full parameters, against those of an unsharded module."""
    return as_expected(what, full(model), parameters_of(plain), tolerance)


def as_sum_of(what: str, found: dict[str, Tensor], backwards: Sequence[dict[str, Tensor]]) -> str:
    """Like `as_expected`, for the sum of several backward passes' gradients; says if the value is one pass's alone."""
    total = {name: sum((each[name] for each in backwards), torch.zeros_like(backwards[0][name])) for name in found}
    for name in found:
        if problem := as_expected(what, {name: found[name]}, {name: total[name]}):
            for i, each in enumerate(backwards):
                if len(backwards) > 1 and not as_expected("", {name: found[name]}, {name: each[name]}):
                    return f"{problem}; it is backward pass {i + 1}'s alone, of {len(backwards)}"
            return problem
    return ""


def _difference(found: Tensor, expected: Tensor) -> str:
    """Describe the difference: a constant factor if there is one, the number of wrong elements, and the first
    of them."""
    if not found.isfinite().all():
        return f"{int((~found.isfinite()).sum())} of {found.numel()} elements are NaN or infinite"
    wrong = ~torch.isclose(found, expected, rtol=1e-9, atol=1e-12)
    wrong = wrong if wrong.any() else found != expected
    first = int(wrong.flatten().nonzero()[0])
    found, expected = found.flatten(), expected.flatten()
    says = f"{int(wrong.sum())} of {found.numel()} elements differ, element {first} is "
    says += f"{found[first].item():.6g} and should be {expected[first].item():.6g}"
    if not found.any():
        return f"it is zero; {says}"
    factor = (found @ expected / (expected @ expected)).item() if len(found) > 3 and expected.any() else 0.0
    if factor and torch.allclose(found, factor * expected, rtol=1e-6, atol=1e-12):
        return f"it is {factor:.4g} times that; {says}"
    return says


def first(problems: Iterator[str] | Sequence[str]) -> str:
    """Return the first problem that is not empty, else ""."""
    return next((problem for problem in problems if problem), "")


def assert_none(problems: Sequence[str]) -> None:
    """Fail with the first rank's problem."""
    __tracebackhide__ = True
    for rank, problem in enumerate(problems):
        if problem:
            pytest.fail(f"rank {rank} of {len(problems)}: {problem}", pytrace=False)


on_every_rank = running_on_ranks(assert_none)
"""Decorator of a test whose body runs on every rank, and returns the first problem there, or ""."""
