"""Random models for tests of full sharding: layers of every kind that the contract names, in any order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from correctness.engine.histories import one_in
from correctness.support.default_dtype import default_dtype
from correctness.support.exact import exact
from correctness.support.whole_batch import DIM, ROWS


class Extra(NamedTuple):
    """Further input of a call, nested as users nest it; wrappers must keep the tuple's type."""

    shift: list[Tensor]
    """One tensor of (rows, DIM), added to the last layer's inputs."""
    rows: dict[str, Tensor]
    """"mask", boolean, (rows, 1): the rows that pass through an optional layer."""


class Layer(nn.Module):
    """(rows, DIM) -> (rows, DIM), residual; the ranks need not divide its width."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(DIM, width, bias), nn.Linear(width, DIM, bias)

    def forward(self, x: Tensor, extra: Extra) -> Tensor:
        return x + self.outer(self.inner(x).tanh())


class Tied(Layer):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__(DIM, bias)
        self.outer.weight = self.inner.weight


class Unused(Layer):
    """The forward runs, but its result is not used."""

    def forward(self, x: Tensor, extra: Extra) -> Tensor:
        return x


class SomeRows(Layer):
    """Every rank reads the parameter; on a rank without rows in the mask it gets no gradient. Backward passes through
    the layer on every rank, as the contract requires."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__(width, bias)
        del self.inner, self.outer
        self.shift = nn.Parameter(torch.rand(width))

    def forward(self, x: Tensor, extra: Extra) -> Tensor:
        shift, mask = self.shift.mean(), extra.rows["mask"]
        return torch.where(mask, x + shift, x) if mask.any() else x.clone()


class Counting(Layer):
    """Buffers that each forward in training mode changes, independent of the data, and some that stay: a mask, and
    complex numbers that rotate pairs of values."""

    calls: Tensor
    decay: Tensor
    not_saved: Tensor
    mask: Tensor
    rotations: Tensor

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__(width, bias)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("decay", torch.rand(3))
        self.register_buffer("not_saved", torch.rand(()), persistent=False)
        self.register_buffer("mask", torch.rand(DIM) < 0.9)
        self.register_buffer("rotations", torch.polar(torch.ones(DIM // 2), torch.rand(DIM // 2)))

    def forward(self, x: Tensor, extra: Extra) -> Tensor:
        if self.training:
            self.calls += 1
            self.decay *= 0.9
        rotations = self.rotations.to(x.dtype.to_complex())
        rotated = torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2))) * rotations).flatten(-2)
        return super().forward(rotated * self.mask * (1 + self.decay.mean() + self.not_saved), extra)


class Branches(Layer):
    """Nested outputs: the model uses one of them, and a loss may use the others."""

    def forward(self, x: Tensor, extra: Extra) -> dict[str, tuple[Tensor, list[Tensor]]]:  # type: ignore[override]
        hidden = self.inner(x).tanh()
        return {"of": (x + self.outer(hidden), [hidden, hidden.square()])}


class Parametrized(Layer):
    """Its weight is computed from other parameters whenever it is read."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__(width, bias)
        weight_norm(self.inner)


class Recurrent(Layer):
    """A module of several parameters, which keeps a list of them beside."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__(width, bias)
        del self.inner, self.outer
        self.cell = nn.GRU(DIM, DIM, bias=bias)

    def forward(self, x: Tensor, extra: Extra) -> Tensor:
        return x + self.cell(x[None])[0][0]


class Dropping(Layer):
    """Drops columns at random, for all rows the same ones."""

    def forward(self, x: Tensor, extra: Extra) -> Tensor:
        return super().forward(x * (torch.rand(DIM) > 0.3).to(x.device), extra)


class Scaled(Layer):
    """A parameter of its own, read before and after its linear layers, which may be units within its unit."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__(width, bias)
        self.scale = nn.Parameter(0.5 + torch.rand(1))

    def forward(self, x: Tensor, extra: Extra) -> Tensor:
        return super().forward(x * self.scale, extra) * self.scale


KINDS: dict[str, type[Layer]] = {
    "layer": Layer,
    "tied": Tied,
    "unused": Unused,
    "some rows": SomeRows,
    "counting": Counting,
    "branches": Branches,
    "parametrized": Parametrized,
    "recurrent": Recurrent,
    "dropping": Dropping,
    "scaled": Scaled,
}


class Made(NamedTuple):
    """A layer of a recipe, by its key in `KINDS`."""

    kind: str
    width: int
    bias: bool
    frozen: str
    """"all" of its parameters, the "first" half, or none."""
    times: int
    """How often a forward pass calls it."""
    recomputed: bool
    """Its activations are recomputed in backward."""

    def __str__(self) -> str:
        words = [f"{self.kind} of width {self.width}", *["with bias"] * self.bias]
        words += [f"{self.frozen} frozen"] * bool(self.frozen) + [f"called {self.times} times"] * (self.times > 1)
        words += ["recomputed"] * self.recomputed
        return " ".join(words)

    def layer(self) -> Layer:
        layer = KINDS[self.kind](self.width, self.bias)
        parameters = list(layer.parameters())
        for parameter in parameters[: len(parameters) // (1 if self.frozen == "all" else 2)] if self.frozen else ():
            parameter.requires_grad_(False)
        return layer


@dataclass(frozen=True)
class Recipe:
    """A model."""

    layers: tuple[Made, ...]
    units: str
    """Modules to wrap: the linear layers, the layers, both, or the root module alone."""
    order: tuple[int, ...]
    """The layers, by their index, in the order of their calls."""

    def __str__(self) -> str:
        return f"{', '.join(map(str, self.layers))}; called in the order {self.order}; units: {self.units}"

    def make(self, seed: int, device: str) -> RandomModel:
        """Make the model in the dtype of exact checks; the same seed gives the same weights."""
        torch.manual_seed(seed)
        with default_dtype(exact()):
            return RandomModel(self).to(device)

    def wrap(self, module: nn.Module) -> list[nn.Module]:
        """Wrap policy of this recipe. Tied parameters belong to the root module."""
        kinds: Any = {"linears": nn.Linear, "layers": Layer, "both": (Layer, nn.Linear), "root": ()}[self.units]
        layers = [layer for layer in module.modules() if isinstance(layer, Layer)]
        roots = {part for layer in layers if isinstance(layer, Tied) for part in layer.modules()}
        return [part for part in module.modules() if isinstance(part, kinds) and part not in roots]


IN_LINEARS = ("layer", "unused", "counting", "branches", "parametrized", "dropping")
RECOMPUTED = {
    "root": (),
    "layers": (*IN_LINEARS, "recurrent", "scaled"),
    "both": (*IN_LINEARS, "recurrent", "scaled"),
    "linears": IN_LINEARS,
}
"""By the units, kinds of layers that may be recomputed in backward: those that read no parameter of the root, as only a
unit's own forward runs again. A rank without rows saves nothing of "some rows": ranks would differ in what runs."""


@st.composite
def recipes(draw: st.DrawFn, without: tuple[str, ...] = (), recomputes: bool = True) -> Recipe:
    """Draw one to four layers, with widths down to one. With `recomputes`, some may be recomputed."""
    units = draw(st.sampled_from(list(RECOMPUTED)))
    kinds = st.sampled_from([kind for kind in KINDS if kind not in without])

    def made() -> Made:
        kind = draw(kinds)
        again = recomputes and kind in RECOMPUTED[units] and draw(one_in(3))
        frozen, times = draw(st.sampled_from(["", "", "", "all", "first"])), draw(st.sampled_from([1, 1, 1, 2]))
        return Made(kind, draw(st.sampled_from([1, 2, 5, 9])), draw(st.booleans()), frozen, times, again)

    layers = tuple(made() for _ in range(draw(st.integers(1, 4))))
    order = draw(st.permutations([i for i, layer in enumerate(layers) for _ in range(layer.times)]))
    return Recipe(layers, units, tuple(order))


class RandomModel(nn.Module):
    """(rows, DIM) -> "output" of (rows, 2 DIM), "sides": additional outputs of layers with several, and "found": a
    number that needs no gradient, and whether autocast is enabled."""

    def __init__(self, recipe: Recipe) -> None:
        super().__init__()
        self.layers = nn.ModuleList(made.layer() for made in recipe.layers)
        self.order = recipe.order
        self.recomputed = {i for i, made in enumerate(recipe.layers) if made.recomputed}
        self.scale = nn.Parameter(torch.rand(1))  # PyTorch shards no parameter without dimensions
        self.output = nn.Linear(DIM, 2 * DIM)

    def forward(self, x: Tensor, *, extra: Extra) -> dict[str, list[Tensor]]:
        if type(extra) is not Extra:
            raise TypeError(f"the argument was an Extra, and arrived as a {type(extra).__name__}")
        sides: list[Tensor] = []
        x = x * self.scale  # so that backward runs through the same layers on every rank
        for i in self.order:
            layer = self.layers[i]
            x = checkpoint(layer, x, extra, use_reentrant=False) if i in self.recomputed else layer(x, extra)
            if isinstance(x, dict):
                x, more = x["of"]
                sides += more
        output = self.output(x + extra.shift[0])
        autocast = output.new_tensor(float(torch.is_autocast_enabled(x.device.type)))
        return {"output": [output], "sides": sides, "found": [output.detach().mean(), autocast]}


@dataclass(frozen=True)
class Rows:
    """Inputs and targets of the whole batch, equal on every rank, or one rank's share of them."""

    x: Tensor
    shift: Tensor
    mask: Tensor
    y: Tensor

    @staticmethod
    def of(step: int, ranks: int, device: str) -> Rows:
        """Draw a batch; in some steps a rank has rows in the mask, in others none."""
        generator = torch.Generator().manual_seed(step)
        x, shift, y = (
            torch.randn(ranks * ROWS, n, generator=generator, dtype=torch.float64).to(device, exact())
            for n in (DIM, DIM, 2 * DIM)
        )
        in_mask = torch.rand(ranks, generator=generator) < 0.6
        return Rows(x, shift, in_mask.repeat_interleave(ROWS)[:, None].to(device), y)

    def share(self, rank: int) -> Rows:
        own = slice(rank * ROWS, (rank + 1) * ROWS)
        return Rows(*(tensor[own].clone() for tensor in (self.x, self.shift, self.mask, self.y)))

    def require_gradients(self, of: set[str]) -> None:
        for name in of:
            getattr(self, name).requires_grad_()

    def outputs(self, model: nn.Module) -> dict[str, list[Tensor]]:
        return model(self.x, extra=Extra([self.shift], {"mask": self.mask}))  # type: ignore[no-any-return]

    def loss(self, outputs: dict[str, list[Tensor]], sides: set[int]) -> Tensor:
        """Mean over the rows: the mean of the losses on equal shares equals the loss on the whole batch."""
        found = (outputs["output"][0] - self.y).square().mean()
        return sum((side.square().mean() for i, side in enumerate(outputs["sides"]) if i in sides), found)
