"""Events of a training step, and histories of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

EVENTS = {
    "forward": "a loss, which waits for backward",
    "evaluate": "a loss without autograd, which does not wait",
    "backward": "backward of a waiting loss",
    "drop": "a waiting loss is freed",
    "fails": "a forward that raises an error in the model's last module",
    "backward_fails": "a backward that raises an error in a hook of a waiting loss, which is freed",
    "update": "an update, which drops waiting losses, as autograd refuses them",
    "update_fails": "an update that raises an error in a hook of the optimizer's step, before or after it",
    "anew": "the step made anew on the same model and optimizer, unless refused, while no loss waits",
    "call": "forward, backward and update in one call",
    "overflow": "in float16, a step that is skipped while losses wait; then gradients to None",
    "clear": "gradients to None",
    "zero": "gradients to zero, in place",
    "halve": "gradients halved in place, as clipping does",
    "modes": "a random mode for each module, while no loss waits",
    "freeze": "a parameter frozen or thawed while no loss waits",
    "rate": "a new learning rate for a param group",
    "reload": "the optimizer's state saved and loaded",
    "copy": "a deep copy of the model, with weights of its own, as averages of weights are evaluated",
    "weights": "a parameter changed in place by the caller",
    "data": "a parameter that gets other memory by `.data =`",
    "replace": "gradients replaced by tensors of half their values",
}


AROUND = (
    "gradients",
    "autocast to bfloat16",
    "autocast to float16",
    "default dtype bfloat16",
    "default dtype float64",
    "what is saved moves",
)
"""Modes of `correctness.engine.calls.MODES` in which callers call `forward`; steps as a whole, in those of dtypes."""


class Event(NamedTuple):
    kind: str
    """A key of `EVENTS`."""
    value: int = 0
    """Chooses the batch, waiting loss, modes, param group or parameter, modulo how many there are."""

    around: str = AROUND[0]
    """One of `AROUND`."""

    @property
    def mode(self) -> str:
        alone = self.kind in ("forward", "evaluate")
        return self.around if alone or (self.kind == "call" and "default" in self.around) else AROUND[0]

    def __str__(self) -> str:
        within = f", in {self.mode}" if self.mode != AROUND[0] else ""
        return f"{self.kind}({self.value}): {EVENTS[self.kind]}{within}"


@dataclass(frozen=True)
class History:
    events: Sequence[Event]
    frozen: Sequence[int] = ()
    """Indices of parameters that are not trainable at first."""
    kind: str = "plain"
    """Kind of the model, see `moody_model`."""
    twice: bool = False
    """A second step with its own model plays each event too, with other batches."""
    graded: bool = False
    """The model has gradients when the step is made; not in float16, whose scale is the step's own."""
    mixed: bool = False
    """When the step is made, some modules of the model are in training mode and others in evaluation mode."""

    @property
    def narrow(self) -> bool:
        """True if parameters are bfloat16 too, in the histories of bfloat16. Derived, as only these use it."""
        return self.mixed != self.graded

    def __str__(self) -> str:
        frozen = f"parameters {', '.join(map(str, self.frozen))} frozen" if self.frozen else ""
        words = [
            f"a {self.kind} model",
            frozen,
            "two steps in turn" if self.twice else "",
            "with gradients" if self.graded else "",
            "of mixed modes" if self.mixed else "",
            "with parameters of bfloat16 where products are" if self.narrow else "",
        ]
        return ", ".join(filter(None, words))
