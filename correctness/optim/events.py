"""Events of an AdamW's life, and random histories of them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st

from correctness.engine.histories import one_in

LRS, DECAYS, EPSILONS = (0.0, 1e-3, 0.3), (0.0, 0.1, 1.0), (1e-8, 1e-3, 1.0)
BETAS = tuple((beta1, beta2) for beta1 in (0.0, 0.5, 0.9) for beta2 in (0.5, 0.95, 0.999))
LOADS = {
    "new": "state loaded into a new optimizer",
    "used": "state loaded into a new optimizer that has made another step",
    "back": "an earlier state loaded into the optimizer that saved it",
    "copied": "a deep copy of optimizer and parameters in their place",
    "pickled": "optimizer and parameters pickled, and what is unpickled in their place",
    "cleared": "the optimizer's state cleared, as restarts do",
}
ERRORS = ("closure", "group", "state")
"""Errors of the caller's before a step: a closure that raises, a group and a state that the optimizer refuses."""
Sizes = tuple[float | None, ...]
LAYOUTS = ("contiguous", "transposed", "apart", "channels_last")
STEPS_IN = (
    "gradients", "no_grad", "default dtype bfloat16", "default dtype float64", "autocast to bfloat16",
    "no_grad, autocast to bfloat16",
)  # fmt: skip
"""Modes of `correctness.engine.calls.MODES` in which callers make optimizers and step."""


@dataclass(frozen=True)
class Event:
    """A step with a gradient for each parameter, some 0 or None, and what happens before it."""

    sizes: Sizes
    """Scales of the parameters' gradients, used in turn; None: no gradient."""
    loads: str | None
    """How a state is loaded, or all copied, before the step: one of `LOADS`."""
    others: Sizes
    """`sizes` of the step that a "used" optimizer makes before it loads the state."""
    remembers: bool
    """Save state and parameters after the step; a later event may load them "back"."""
    weights: tuple[str, int] | None
    """How the caller changes a parameter, and its index."""
    group: int
    """Index of the group that takes `changes`."""
    changes: dict[str, Any]
    """New arguments of the group."""
    by_closure: bool
    same_tensors: bool
    """Write the gradients into the tensors of the previous gradients, where there are some."""
    freezes: int | None
    """Index of a parameter whose `requires_grad` flips once it has its gradient."""
    layout: str
    """Memory layout of the gradients, one of `LAYOUTS`."""
    steps: int | None
    """Step count to set in the loaded state, as after a long training."""
    mode: str = "gradients"
    """The step and what comes before it happen in it, one of `STEPS_IN`."""
    error: str | None = None
    """One of `ERRORS`, after which the caller goes on."""

    def __str__(self) -> str:
        said = [LOADS[self.loads]] if self.loads else []
        said += [f"its step counts set to {self.steps}"] if self.loads in ("new", "used") and self.steps else []
        said += [f"parameter {self.weights[1]} changed by the caller, {self.weights[0]}"] if self.weights else []
        said += [f"group {self.group} takes {self.changes}"] if self.changes else []
        said += ["step(closure)"] if self.by_closure else []
        said += ["gradients in the same tensors"] if self.same_tensors else []
        said += [f"an error of the caller's, by a {self.error}"] if self.error else []
        said += [f"{self.layout} gradients"] if self.layout != "contiguous" else []
        said += [f"parameter {self.freezes} frozen or thawed after backward"] if self.freezes is not None else []
        said += [f"in {self.mode}"] if self.mode != "gradients" else []
        return ", ".join([*said, f"gradients of scale {', '.join(map(str, self.sizes))} in turn"])


@dataclass(frozen=True)
class History:
    groups: list[tuple[list[tuple[int, ...]], dict[str, Any]]]
    """Shapes of each group's parameters, and the group's own arguments."""
    events: list[Event]
    added: int
    """Event before which all groups but the first are added, or the last event."""
    layout: str
    """Memory layout of the parameters."""
    dtypes: tuple[torch.dtype, ...] = (torch.float64,)
    """Dtypes of the parameters, used in turn."""
    options: dict[str, Any] = field(default_factory=dict)
    """Options of the optimizer."""
    defaults: dict[str, Any] = field(default_factory=dict)
    """Arguments of the optimizer, which groups take that have none of their own, those added to a copy too."""
    mode: str = "gradients"
    """The optimizer is made in it, one of `STEPS_IN`."""
    scheduled: bool = False
    """It has a scheduler, which wraps its `step`."""
    another: bool = False
    """Another optimizer of the same target plays each event too, with other values, and clips by another norm."""

    def __str__(self) -> str:
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        said = [f"{self.layout} {dtypes} parameters of shapes {self.groups[0][0]} with {self.groups[0][1]}"]
        for shapes, arguments in self.groups[1:]:
            said.append(f"before event {self.added_before + 1} a group of shapes {shapes} with {arguments}")
        said += [f"{name}={value}" for name, value in (self.options | self.defaults).items()]
        said += ["with a scheduler"] * self.scheduled + ["another optimizer in turn with it"] * self.another
        return "; ".join([*said, *[f"made in {self.mode}"] * (self.mode != "gradients")])

    @property
    def added_before(self) -> int:
        """Index of the event before which the param groups after the first are added."""
        return min(self.added, len(self.events) - 1)


NUMBERS: dict[str, st.SearchStrategy[Any]] = {
    "lr": st.sampled_from(LRS),
    "betas": st.sampled_from(BETAS) | st.sampled_from(BETAS).map(list),  # as a file of JSON has them
    "eps": st.sampled_from(EPSILONS),
    "weight_decay": st.sampled_from(DECAYS),
}
OF_CALLERS: dict[str, st.SearchStrategy[Any]] = {
    "name": st.sampled_from(("decayed", "others")),
    "initial_lr": st.sampled_from(LRS),  # as schedulers write it
}
arguments = st.fixed_dictionaries({}, optional=NUMBERS | OF_CALLERS)
shapes = st.one_of(
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.tuples(st.integers(0, 10).map(lambda k: 2**k) | st.sampled_from((31, 33, 127, 129, 1023, 1025))),
    st.tuples(*[st.integers(2, 4)] * 4),  # as channels_last takes
)

first = st.tuples(st.lists(shapes, min_size=1, max_size=3), arguments)
others = st.tuples(st.lists(shapes, max_size=3), arguments)
"""A group may have no parameters: of a model without biases, those that do not decay."""
groups = st.builds(lambda one, more: [one, *more], first, st.lists(others, max_size=2))


def histories(
    layouts: tuple[str, ...], not_finite: bool = False, **parts: st.SearchStrategy[Any]
) -> st.SearchStrategy[History]:
    """Up to six events; `not_finite` scales gradients by infinity too, for optimizers that skip such a step."""
    sizes = (None, 0.0, 1e-3, 1.0, 1e3, *((torch.inf,) if not_finite else ()))
    some = st.lists(st.sampled_from(sizes), min_size=1, max_size=4).map(tuple)
    events = st.builds(
        Event,
        sizes=some,
        loads=st.none() | st.sampled_from(tuple(LOADS)),
        others=some,
        remembers=st.booleans(),
        weights=st.none() | st.tuples(st.sampled_from(("in place", "by .data =")), st.integers(0, 3)),
        group=st.integers(0, 2),
        changes=st.just({}) | arguments,
        by_closure=st.booleans(),
        same_tensors=st.booleans(),
        freezes=st.none() | st.integers(0, 5),
        layout=st.sampled_from(layouts),
        steps=st.none() | st.sampled_from((300, 1001, 100_001)),
        mode=st.sampled_from(STEPS_IN),
        error=st.none() | st.sampled_from(ERRORS),
    )
    found = st.builds(
        History,
        groups=groups,
        events=st.lists(events, min_size=1, max_size=6),
        added=st.integers(0, 3),
        layout=st.sampled_from(layouts),
        mode=st.sampled_from(STEPS_IN),
        defaults=st.fixed_dictionaries({}, optional=NUMBERS),
        scheduled=st.booleans(),
        another=one_in(3),
        **parts,
    )
    return found.map(_without_refused_autocast)


def _without_refused_autocast(history: History) -> History:
    """Autocast to bfloat16 refuses to concatenate tensors of float16, as an optimizer may for their norm."""
    if torch.float16 not in history.dtypes:
        return history
    modes = {mode: "no_grad" if mode.startswith("no_grad") else "gradients" for mode in STEPS_IN if "autocast" in mode}
    events = [replace(each, mode=modes.get(each.mode, each.mode)) for each in history.events]
    return replace(history, events=events, mode=modes.get(history.mode, history.mode))
