"""What is done with an AdamW before and in each step, as data, and strategies for Hypothesis to choose it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st

LRS, DECAYS, EPSILONS = (0.0, 1e-3, 0.3), (0.0, 0.1, 1.0), (1e-8, 1e-3, 1.0)
BETAS = tuple((beta1, beta2) for beta1 in (0.0, 0.5, 0.9) for beta2 in (0.5, 0.95, 0.999))
LOADS = {
    "new": "state loaded into a new optimizer",
    "used": "state loaded into an optimizer that has made other steps",
    "back": "an earlier state loaded into the optimizer that it is of",
}
Sizes = tuple[float | None, ...]
LAYOUTS = ("contiguous", "transposed", "apart", "channels_last")


@dataclass(frozen=True)
class Event:
    """A step with a gradient for each parameter, some 0 or None, and what happens before it."""

    sizes: Sizes
    """Of each parameter's gradient, used in turn."""
    loads: str | None
    others: Sizes
    """Of the gradients of the other step that the optimizer has made into which a state is loaded."""
    remembers: bool
    """State and parameters, to which a later event goes back."""
    weights: tuple[str, int] | None
    """How a parameter is changed from outside, and which."""
    group: int
    changes: dict[str, Any]
    """Arguments of a group that change, and which group's."""
    by_closure: bool
    same_tensors: bool
    """The gradients are written into the tensors that the last ones were in, where there are some."""
    freezes: int | None
    """A parameter that is frozen once it has its gradient, or is trained again."""
    layout: str
    """Of the gradients."""
    steps: int | None
    """The count of steps in a loaded state, as after a long training."""

    def __str__(self) -> str:
        said = [LOADS[self.loads]] if self.loads else []
        said += [f"its step counts set to {self.steps}"] if self.loads and self.steps else []
        said += [f"parameter {self.weights[1]} changed from outside, {self.weights[0]}"] if self.weights else []
        said += [f"{self.changes} in group {self.group}"] if self.changes else []
        said += ["step(closure)"] if self.by_closure else []
        said += ["gradients in the same tensors"] if self.same_tensors else []
        said += [f"{self.layout} gradients"] if self.layout != "contiguous" else []
        said += [f"parameter {self.freezes} frozen, or thawed, after backward"] if self.freezes is not None else []
        return ", ".join([*said, f"gradients of size {', '.join(map(str, self.sizes))} in turn"])


arguments = st.fixed_dictionaries(
    {}, optional={
        "lr": st.sampled_from(LRS),
        "betas": st.sampled_from(BETAS),
        "eps": st.sampled_from(EPSILONS),
        "weight_decay": st.sampled_from(DECAYS),
    },
)  # fmt: skip
shapes = st.one_of(
    st.lists(st.integers(0, 5), max_size=4).map(tuple),
    st.tuples(st.integers(0, 10).map(lambda k: 2**k) | st.sampled_from((31, 33, 127, 129, 1023, 1025))),
)
plans = st.lists(st.tuples(st.lists(shapes, min_size=1, max_size=3), arguments), min_size=1, max_size=3)


def scripts(*, not_finite: bool = False, layouts: tuple[str, ...] = LAYOUTS) -> st.SearchStrategy[list[Event]]:
    """Of up to six events; with gradients that are not finite, where a step is skipped for them."""
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
    )
    return st.lists(events, min_size=1, max_size=6)
