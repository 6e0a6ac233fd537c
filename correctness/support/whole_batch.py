"""Training in one process on the whole batch, in exact(): the reference for data_parallel, sharded_optimizer, fsdp."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.support.exact import exact, exactly, tolerance

STEPS = 20
ROWS = 3
"""Rows of the batch on each rank."""
DIM = 6


class TiedAndFrozen(nn.Module):
    """An input layer that shares its weight with the output, a frozen layer between them, and a buffer that forward
    uses."""

    offset: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(DIM, 2 * DIM)
        self.frozen = nn.Linear(2 * DIM, 2 * DIM).requires_grad_(False)
        self.hidden = nn.Linear(2 * DIM, DIM)
        self.tied = nn.Linear(DIM, 2 * DIM)
        self.tied.weight = self.embed.weight
        self.register_buffer("offset", torch.randn(DIM))

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> (rows, 2 DIM)."""
        x = self.frozen(self.embed(x).tanh())
        return self.tied(self.hidden(x).tanh() + self.offset)


class UsedTwice(nn.Module):
    """Each forward pass goes through one layer twice. Parameters are views of one memory, as an RNN's are on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Linear(DIM, DIM)
        self.output = nn.Linear(DIM, 2 * DIM)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "UsedTwice":
        """Move or cast the parameters, as `to` does, and lay them one after another once more."""
        super()._apply(fn, recurse)
        own = list(self.parameters())
        memory = torch.cat([parameter.detach().flatten() for parameter in own])
        for parameter, view in zip(own, memory.split([parameter.numel() for parameter in own]), strict=True):
            parameter.data = view.view_as(parameter)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> (rows, 2 DIM)."""
        return self.output(self.twice(self.twice(x).tanh()).tanh())


def _plain() -> nn.Module:
    return nn.Sequential(nn.Linear(DIM, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 2 * DIM))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "plain": _plain,
    "tied_and_frozen": TiedAndFrozen,
    "used_twice": UsedTwice,
}
"""The modules that tests train, by name, so that ranks can make their own."""
ONE_MODULE = [name if name == "tied_and_frozen" else pytest.param(name, marks=pytest.mark.judged) for name in MODULES]
"""The module tested by default; the others are tested for an implementation of `--impl`."""


def module(name: str, seed: int, device: str) -> nn.Module:
    """Make one of MODULES in the dtype of exact checks; the same seed gives the same weights."""
    torch.manual_seed(seed)
    return MODULES[name]().to(device, exact())


def batch(step: int, ranks: int, device: str) -> tuple[Tensor, Tensor]:
    """Inputs and targets of the whole batch, equal on every rank."""
    generator = torch.Generator().manual_seed(step)
    x, y = (torch.randn(ranks * ROWS, n, generator=generator, dtype=torch.float64) for n in (DIM, 2 * DIM))
    return x.to(device, exact()), y.to(device, exact())


def share(rank: int) -> slice:
    """Return the slice of the batch that the rank gets."""
    return slice(rank * ROWS, (rank + 1) * ROWS)


def own_batch(step: int, device: str, group: dist.ProcessGroup | None = None) -> tuple[Tensor, Tensor]:
    """Return this rank's rows of the group's batch."""
    x, y = batch(step, dist.get_world_size(group), device)
    own = share(dist.get_rank(group))
    return x[own], y[own]


def loss(model: Any, x: Tensor, y: Tensor) -> Tensor:
    """Mean squared error: the mean of the losses on equal shares is the loss on the whole batch."""
    return (model(x) - y).square().mean()


def adam(model: nn.Module) -> torch.optim.Optimizer:
    """Adam over the trainable parameters: a wrong gradient stays visible in its state, and by an eps of the gradients'
    size so does a wrong factor."""
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01, eps=0.01)


def train(
    model: Any,
    optimizer: torch.optim.Optimizer,
    device: str,
    finish: Callable[[], object] = lambda: None,
    *,
    accumulate: bool = False,
) -> None:
    """Take STEPS steps on this rank's rows; `finish` synchronizes gradients. With `accumulate`, in two backward passes
    a step: the first row's in `no_sync`, then the rest."""
    for step in range(STEPS):
        optimizer.zero_grad()
        x, y = own_batch(step, device)
        if accumulate:
            with model.no_sync():
                loss(model, x[:1], y[:1]).backward()
            x, y = x[1:], y[1:]
        loss(model, x, y).backward()
        finish()
        optimizer.step()


def single_process(
    name: str,
    ranks: int,
    device: str,
    *,
    accumulate: bool = False,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam,
) -> dict[str, Tensor]:
    """The state after STEPS steps on the whole batch, from seed 0's weights, on the CPU.

    With `accumulate`, in two backward passes a step: each rank's first row, then the rest.
    """
    model = module(name, 0, device)
    update = optimizer(model)
    for step in range(STEPS):
        update.zero_grad()
        x, y = batch(step, ranks, device)
        if not accumulate:
            loss(model, x, y).backward()
        else:
            by_rank = [tensor.view(ranks, ROWS, -1) for tensor in (x, y)]
            for part in (slice(0, 1), slice(1, None)):
                loss(model, *(tensor[:, part].flatten(0, 1) for tensor in by_rank)).backward()
        update.step()
    return {key: tensor.cpu() for key, tensor in model.state_dict().items()}


def exact_single_process(name: str, ranks: int, device: str, **options: Any) -> tuple[dict[str, Tensor], float]:
    """`single_process` in float64, and the tolerance: in float32, twice one process's own error."""
    with exactly(torch.float64):
        expected = single_process(name, ranks, device, **options)
    if exact() == torch.float64:
        return expected, tolerance()
    found = single_process(name, ranks, device, **options)
    error = max((found[key].double() - value).abs().max().item() for key, value in expected.items())
    return expected, 2 * (error + torch.finfo(exact()).eps)


def draw_rows_of_two_ranks(generator: torch.Generator) -> dict[str, Any]:
    """Draw what test_unwatched.py of wrappers trains on: {"dim": int, "x": (2, rows, dim), a rank's rows in each}."""
    dim, rows = (3 + torch.randint(20, (2,), generator=generator)).tolist()
    return {"dim": dim, "x": torch.randn(2, rows, dim, generator=generator)}


class WholeBatch(nn.Module):
    """A wrapper in one process: each call is of the whole batch `x` of shape (ranks, rows, dim), and not of the rows
    that it is given. The mean of its loss is that over ranks, which have equally many rows."""

    def __init__(self, module: nn.Module, x: Tensor) -> None:
        super().__init__()
        self.module, self.x = module, x

    def forward(self, x: Tensor) -> Tensor:
        """(rows, dim) -> (ranks rows, out)."""
        return self.module(self.x.flatten(0, 1))

    def finish_gradient_synchronization(self) -> None:
        """Do nothing: the gradients of the whole batch are there."""

    def gather_full_parameters(self) -> dict[str, Tensor]:
        """Return the module's parameters, by name."""
        return dict(self.module.named_parameters())


def assert_equal_states(
    found: list[dict[str, Tensor]], expected: dict[str, Tensor], close: float | None = None
) -> None:
    """Assert on each rank: the expected names and dtypes, values within the tolerance, by default that of exact checks,
    and bitwise the same state as on rank 0."""
    close = tolerance() if close is None else close
    for rank, state in enumerate(found):
        assert list(state) == list(expected), f"the state on rank {rank} has the names {list(state)}"
        for key, value in state.items():
            wanted = expected[key].to(exact()) if expected[key].is_floating_point() else expected[key]
            assert value.dtype == wanted.dtype, f"{key!r} on rank {rank} is of {value.dtype} in the state"
            error = (value - wanted).abs().max().item()
            assert torch.allclose(value, wanted, rtol=close, atol=close), (
                f"after training, {key!r} on rank {rank} differs from a single process's by up to {error:.3g}"
            )
            assert torch.equal(value, found[0][key]), f"after training, {key!r} on rank {rank} is not that of rank 0"


def error_line(kind: type[Exception], function: Callable[..., Any], *args: Any) -> str:
    """Return the one-line error that a call must raise, caught on the rank so that the world survives."""
    with pytest.raises(kind) as caught:
        function(*args)
    line = str(caught.value)
    assert "\n" not in line, line
    return line
