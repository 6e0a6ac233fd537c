"""Events of a training with a sharded optimizer, and how Hypothesis draws histories of them.

history = History([Group([(5, 3), (7,)])], [Step(), Change(0, {"lr": 0.3}), Step(without=(1,)), Save()])
check(implementation, world, history, device)  # every rank beside the unsharded optimizer, after each event
"""

from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from math import inf, nan
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn, SearchStrategy
from torch import Tensor

from correctness.engine.histories import events_of, one_in
from correctness.sharded_optimizer.training import Group, History, Options, Training, listed
from correctness.sharded_optimizer.unusual_optimizers import OPTIMIZERS, Wide


@dataclass(frozen=True)
class Step:
    """One optimizer step. With `closure`, the closure computes the gradients; gradients from before it are stale."""

    without: tuple[int, ...] = ()
    """Indices of parameters that get no gradient."""
    closure: bool = False
    freezes: tuple[int, ...] = ()
    """Indices of parameters frozen after backward: the step updates them nevertheless."""
    transposed: bool = False
    """Gradients with two or more dimensions are not contiguous."""
    autocast: bool = False
    """Backward and step run under the caller's autocast to bfloat16."""
    lacked: tuple[int, ...] = ()
    """Indices of parameters whose gradients the first rank lacks, where gradients are each rank's own."""
    sets: Options = field(default_factory=dict)
    """Options that the closure sets in the first group."""
    early: tuple[int, ...] = ()
    """Indices of parameters whose gradients come in an earlier pass in `no_sync`, where they are each rank's own."""
    in_place: bool = False
    """Gradients are written into those of the step before, as after `zero_grad(set_to_none=False)`."""

    def __str__(self) -> str:
        said = "step(closure)" if self.closure else "step()"
        said += f" that sets {listed(self.sets)} in group 0" * bool(self.closure and self.sets)
        said += ", gradients in place" * self.in_place
        said += f", no gradients for parameters {list(self.without)}" * bool(self.without)
        said += f", parameters {list(self.freezes)} frozen after backward" * bool(self.freezes)
        said += f", gradients of {list(self.early)} in no_sync" * bool(self.early)
        said += f", the first rank lacks gradients of {list(self.lacked)}" * bool(self.lacked)
        return said + ", gradients transposed" * self.transposed + ", under autocast" * self.autocast

    def happens(self, training: Training) -> None:
        device = torch.device(training.device).type
        with torch.autocast(device, torch.bfloat16) if self.autocast else nullcontext():
            self._happens(training)

    def _happens(self, training: Training) -> None:
        calls = 0

        def closure() -> float:
            nonlocal calls
            calls += 1
            set_gradients()
            training.held[0].update(self.sets)
            return 0.5 + calls

        set_gradients = partial(
            training.set_gradients,
            self.without,
            self.freezes,
            self.transposed,
            self.lacked,
            self.early,
            in_place=self.in_place,
        )
        if not self.closure:
            set_gradients()
            training.optimizer.step()
        else:
            loss = training.optimizer.step(closure)
            if (loss, calls) != (1.5, 1):
                raise AssertionError(
                    f"step(closure) must call the closure once and return its loss\n"
                    f"found {loss} after {calls} calls, expected 1.5 after 1"
                )
        training.updated |= {i for i, p in enumerate(training.parameters) if p.grad is not None}


@dataclass(frozen=True)
class Overflow:
    """A step in which one element of one gradient is that value: it alone is not finite afterwards."""

    value: float

    def __str__(self) -> str:
        return f"step(), an element of a gradient is {self.value}"

    def happens(self, training: Training) -> None:
        training.set_gradients((), (), False)
        for gradient in [p.grad for p in training.parameters if p.grad is not None and p.numel()][:1]:
            gradient.view(-1)[-1] = self.value
        training.optimizer.step()
        training.updated |= {i for i, p in enumerate(training.parameters) if p.grad is not None}


@dataclass(frozen=True)
class Scaled:
    """A step by a `GradScaler`, of gradients times its scale; it leaves out one with an infinite element."""

    is_finite: bool

    def __str__(self) -> str:
        return f"GradScaler.step(), gradients scaled{'' if self.is_finite else ', one of them infinite'}, zero_grad()"

    def happens(self, training: Training) -> None:
        training.set_gradients((), (), False)
        gradients = [p.grad for p in training.parameters if p.grad is not None and p.numel()]
        if not gradients:
            return
        scaler = torch.amp.GradScaler(torch.device(training.device).type, init_scale=4.0)
        scaler.scale(torch.zeros((), device=training.device))
        for gradient in gradients:
            gradient.mul_(4)
        if not self.is_finite:
            gradients[0].view(-1)[-1] = inf
        scaler.step(training.optimizer)
        scaler.update()
        if self.is_finite:
            training.updated |= {i for i, p in enumerate(training.parameters) if p.grad is not None}
        training.optimizer.zero_grad()  # fused optimizers leave gradients scaled


@dataclass(frozen=True)
class Failure:
    """A step whose closure raises once it has computed gradients, which the user clears."""

    def __str__(self) -> str:
        return "step(closure) whose closure raises, zero_grad()"

    def happens(self, training: Training) -> None:
        def closure() -> float:
            training.set_gradients((), (), False)
            raise ArithmeticError("the closure's own")

        try:
            training.optimizer.step(closure)
        except ArithmeticError:
            training.optimizer.zero_grad()
        else:
            raise AssertionError("step(closure) must raise what its closure raises")


@dataclass(frozen=True)
class Clear:
    """Clear gradients, also of parameters that were frozen since."""

    set_to_none: bool

    def __str__(self) -> str:
        return f"zero_grad(set_to_none={self.set_to_none})"

    def happens(self, training: Training) -> None:
        training.optimizer.zero_grad(self.set_to_none)


@dataclass(frozen=True)
class Clamp:
    """Change every parameter in place, as a limit of weights or loaded values do."""

    def __str__(self) -> str:
        return "parameters clamped"

    def happens(self, training: Training) -> None:
        for p in training.parameters:
            if p.is_floating_point():
                p.detach().clamp_(-0.5, 0.5)


@dataclass(frozen=True)
class Freeze:
    """Flip `requires_grad` of a parameter (index modulo their number); None unfreezes all."""

    parameter: int | None

    def __str__(self) -> str:
        return "thaw all" if self.parameter is None else f"freeze or thaw parameter {self.parameter}, counted round"

    def happens(self, training: Training) -> None:
        if self.parameter is None:
            for p in training.parameters:
                p.requires_grad_(p.is_floating_point())
            return
        p = training.parameters[self.parameter % len(training.parameters)]
        p.requires_grad_(not p.requires_grad and p.is_floating_point())


@dataclass(frozen=True)
class Change:
    """Set options in `param_groups` (group index modulo their number)."""

    group: int
    options: Options

    def __str__(self) -> str:
        return f"set {listed(self.options) or 'nothing'} in group {self.group}, counted round"

    def happens(self, training: Training) -> None:
        training.held[self.group % len(training.held)].update(self.options)


@dataclass(frozen=True)
class Add:
    group: Group

    def __str__(self) -> str:
        return f"add_param_group {self.group}"

    def happens(self, training: Training) -> None:
        training.optimizer.add_param_group(training.new(self.group))
        training.held.append(training.optimizer.param_groups[-1])


@dataclass(frozen=True)
class Save:
    """Take `state_dict()`: it must change nothing and equal the unsharded optimizer's."""

    def __str__(self) -> str:
        return "state_dict()"

    def happens(self, training: Training) -> None:
        training.state = training.saved = deepcopy(training.optimizer.state_dict())
        training.updated_when_saved = set(training.updated)


@dataclass(frozen=True)
class Restore:
    """Load the state of the last `Save`, unless groups were added since."""

    def __str__(self) -> str:
        return "load_state_dict() of the last state_dict()"

    def happens(self, training: Training) -> None:
        saved, optimizer = training.saved, training.optimizer
        if saved and len(saved["param_groups"]) == len(optimizer.param_groups):
            optimizer.load_state_dict(deepcopy(saved))
            training.held = [*optimizer.param_groups]
            training.updated = set(training.updated_when_saved)
            _assert_loaded(saved, optimizer.state_dict())


@dataclass(frozen=True)
class Reload:
    """Load `state_dict()` into a new optimizer that was made with other options."""

    def __str__(self) -> str:
        return "state_dict() loaded into a new optimizer"

    def happens(self, training: Training) -> None:
        state = deepcopy(training.optimizer.state_dict())
        training.optimizer = training.anew()
        training.optimizer.load_state_dict(deepcopy(state))
        training.held = [*training.optimizer.param_groups]
        _assert_loaded(state, training.optimizer.state_dict())


def _assert_loaded(saved: Options, after: Options) -> None:
    """Assert that loading kept every tensor of the state: dtype and bits."""
    for i, values in saved["state"].items():
        for name, value in values.items():
            if not isinstance(value, Tensor):
                continue
            loaded = after["state"].get(i, {}).get(name)
            found = "nothing" if loaded is None else f"{loaded.dtype}"
            if loaded is not None and loaded.dtype == value.dtype:
                here, there = loaded.cpu(), value.cpu()
                if here.shape == there.shape and torch.allclose(here, there, rtol=0, atol=0, equal_nan=True):
                    continue
                found += f", off by {(loaded.double() - value.double()).abs().max().item():.3g}"
            raise AssertionError(f"loading changed {name!r} of parameter {i}\nfound {found}, expected {value.dtype}")


SHAPES = ((5, 3), (7,), (), (1,), (2, 1, 3), (33,), (130,), (64, 9), (0, 4))

DRAWN = {**OPTIMIZERS, "wide": (Wide, {"lr": 0.05})}
OWN_OPTIONS: dict[type[torch.optim.Optimizer], dict[str, list[Any]]] = {
    torch.optim.SGD: {"momentum": [0.5, 0.7], "maximize": [True]},
    torch.optim.Adam: {"betas": [(0.5, 0.6)], "maximize": [True]},
    torch.optim.AdamW: {"betas": [(0.5, 0.6)], "maximize": [True]},
    torch.optim.Adagrad: {"eps": [0.1], "maximize": [True]},
    Wide: {"momentum": [0.0, 0.5]},
}
"""Options to draw from, besides the learning rate and weight decay."""

ENDS = ([Step()], [Step(), Freeze(None), Step()], [Step(), Reload(), Step()])


def _some(n: int, odds: int) -> SearchStrategy[tuple[int, ...]]:
    flags = st.lists(one_in(odds), min_size=n, max_size=n)
    return flags.map(lambda drawn: tuple(i for i, flag in enumerate(drawn) if flag))


@st.composite
def histories(draw: DrawFn, most: int = 9, zero_redundancy: bool = False) -> History:
    """Draw groups, of which one has parameters. `zero_redundancy` leaves out what torch's does wrong: parameters frozen
    between backward and step, options that a closure sets, and a group that is not stepped as soon as it is added."""
    optimizer, defaults = draw(st.sampled_from(list(DRAWN.values())))
    values = {"lr": [0.0, 0.01, 0.3], "weight_decay": [0.0, 0.2], **OWN_OPTIONS[optimizer]}
    options = st.fixed_dictionaries({}, optional={name: st.sampled_from(each) for name, each in values.items()})
    # torch's fused AdamW takes gradients laid out as their parameters; on CPU it misreads others.
    transposed = st.just(False) if defaults.get("fused") else one_in(5)
    others = ["transposed", "strided", "in the middle of a larger one"]
    layouts = st.sampled_from(["contiguous"] * 5 + others[2 if defaults.get("fused") else 0 :])
    groups, filled = (
        st.builds(Group, shapes, st.just({}) | options, _some(4, 5), layouts, st.booleans())
        for shapes in (st.lists(st.sampled_from(SHAPES), min_size=n, max_size=4) for n in (0, 1))
    )
    wide, half = torch.float64, torch.bfloat16
    if optimizer in (torch.optim.SGD, Wide) and draw(one_in(2)):
        half = torch.float16  # Adam's eps is zero in it
    dtypes = draw(st.sampled_from([[wide], [wide], [wide, torch.float32], [half], [half, wide]]))
    averages = dtypes == [wide] and draw(one_in(3))  # of noise that would be rounded in other dtypes
    frozen = st.just(()) if zero_redundancy or averages else st.just(()) | st.just(()) | _some(8, 3)
    lacked, early = (_some(6, n) if averages else st.just(()) for n in (5, 3))
    sets = st.just({}) if zero_redundancy else st.just({}) | options
    in_place = st.just(False) if averages else one_in(3)
    without = st.just(()) if averages else _some(6, 5)
    steps = st.builds(Step, without, one_in(3), frozen, transposed, one_in(4), lacked, sets, early, in_place)
    changes = st.builds(Change, st.integers(0, 2), options)
    rare = [st.builds(Add, groups), st.just(Reload()), st.just(Save()), st.just(Restore()), st.just(Clamp())]
    # Fused AdamW on CPU: its maximum of NaN and a number differs between the vectorized loop and the remainder.
    overflows = st.builds(Overflow, st.just(inf) if defaults.get("fused") else st.sampled_from([inf, nan]))
    scaled = [st.builds(Scaled, st.booleans())] * (not averages and half != torch.float16)  # whose scale it refuses
    rare += [st.just(Failure()), st.builds(Clear, st.booleans()), *scaled, *[overflows] * (not averages)]
    rare += [changes, changes, st.builds(Freeze, st.integers(0, 7))]
    kinds = [*[steps] * 7, *rare]
    in_groups = draw(one_in(3))
    events = events_of(draw, most, lambda: draw(draw(st.sampled_from(kinds))))
    events = list(chain(*([each, Step()] if zero_redundancy and isinstance(each, Add) else [each] for each in events)))
    events += [*draw(st.sampled_from(ENDS)), *[Reload(), Step()] * in_groups, Save()]
    first = [draw(filled), *draw(st.lists(groups, max_size=2))][:: draw(st.sampled_from([1, -1]))]
    return History(first, events, optimizer, defaults, dtypes, draw(st.integers(0, 999)), in_groups, averages)
