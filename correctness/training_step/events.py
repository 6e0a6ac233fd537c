"""What is done with a training step, as data: played by an implementation and, in float64, by autograd and SGD alone.

script = Script([Event("forward"), Event("backward"), Event("update")], frozen=(2,))
play(implementation, script, "float32", device)  # fails after the first event whose outcome is not as expected
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from correctness.training_step.models import assert_stays, moody_model, set_modes, what_stays
from correctness.training_step.stepping import SIZE, setting
from shardmark.api import Implementation

CLOSE = {"float32": 1e-3, "float16": 0.1}
"""Relative error allowed of losses, gradients and what updates have added up to: the rounding of several steps."""

OPTIONS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
"""SGD's, with which parameters move also where gradients are zero."""

SHAPES = ((3, 8), (1, 5), (2, 9), (1, 1))
"""(batch, context) of the batches."""

FIRST_OVERFLOWS, OVERFLOWS = 4, 6
"""As many come first, so that nothing else overflows, and in all: a loss scale that is too small loses gradients."""


class Event(NamedTuple):
    """`value` says which: batch, waiting loss, modes, param group or parameter, counted round."""

    kind: str
    value: int = 0


EVENTS = {
    "forward": "a loss, which waits; every fourth batch has no targets that count, the next one a few",
    "evaluate": "a loss without autograd, which does not wait",
    "backward": "of a waiting loss",
    "drop": "a waiting loss is freed",
    "update": "after which no loss waits, as autograd refuses them",
    "call": "all three in one",
    "overflow": "in float16, a step that is skipped while losses wait; then gradients to None",
    "clear": "gradients to None",
    "zero": "gradients to zero, in place",
    "halve": "gradients, in place, as clipping does",
    "modes": "of each module, at random",
    "freeze": "a parameter, or thaw it; no loss waits",
    "rate": "of a param group",
    "reload": "the optimizer's state",
    "weights": "changed by the caller, in place",
}


@dataclass(frozen=True)
class Script:
    events: Sequence[Event]
    frozen: Sequence[int] = ()
    """Parameters that are not trainable at first."""
    kind: str = "plain"
    """Of the model, see `moody_model`."""
    twice: bool = False
    """Another step, of a model of its own, does the same in turn, with other batches."""


def play(implementation: Implementation, script: Script, precision: str, device: str) -> None:
    torch.manual_seed(torch.initial_seed())  # the same weights each time that a script is played
    players = [_Player(implementation, script, precision, device) for _ in range(1 + script.twice)]
    for event in script.events:
        for i, player in enumerate(players):
            player.play(event._replace(value=event.value + i))


@dataclass
class _Player:
    implementation: Implementation
    script: Script
    precision: str
    device: str
    history: list[str] = field(default_factory=list)
    waiting: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """Losses, found and expected."""
    scaled: bool = False
    """Whether a backward came since the last update."""
    overflows: int = 0

    def __post_init__(self) -> None:
        model = moody_model(self.script.kind)
        parameters = list(model.parameters())
        for i in self.script.frozen:
            parameters[i % len(parameters)].requires_grad_(False)
        self.of = setting(self.implementation, self.device, self.precision, model, all_parameters=True, **OPTIONS)
        self.wide = copy.deepcopy(self.of.model).double()
        self.names = [name for name, _ in self.wide.named_parameters()]
        self.found, self.expected = (list(each.parameters()) for each in (self.of.model, self.wide))
        self.optimizer = torch.optim.SGD([{"params": self.expected[:1]}, {"params": self.expected[1:]}], **OPTIONS)
        self.start = [p.detach().clone() for p in self.expected]
        if self.precision == "float16":
            for i in range(FIRST_OVERFLOWS):
                self.play(Event("overflow", i))

    def play(self, event: Event) -> None:
        if not self.can(event):
            return
        extra = f" or thaw {self.names[self.turned(event.value)]}" if event.kind == "freeze" else ""
        self.history.append(event.kind + extra)
        if event.kind in ("update", "call", "weights", "freeze"):
            self.waiting.clear()
        before = what_stays(self.of.model, self.of.optimizer)
        getattr(self, event.kind)(event.value)
        if event.kind not in ("modes", "freeze", "rate"):
            assert_stays(self.of.model, before, self.when, self.of.optimizer)
        self.compare()

    def can(self, event: Event) -> bool:
        half = self.precision == "float16"
        used = {name for name, p in zip(self.names, self.expected, strict=True) if p.requires_grad} - {"unused"}
        match event.kind:
            case "backward" | "drop":
                return bool(self.waiting)
            case "overflow":
                return half and self.overflows < OVERFLOWS
            case "halve":
                return not (half and self.scaled)
            case "freeze":
                return bool(used - {self.names[self.turned(event.value)]})
        return True

    def turned(self, value: int) -> int:
        """The parameter to freeze or thaw: by an odd value a frozen one, if there is any."""
        frozen = [i for i, p in enumerate(self.expected) if not p.requires_grad]
        return frozen[value // 2 % len(frozen)] if value % 2 and frozen else value % len(self.expected)

    @property
    def when(self) -> str:
        of = f", of the {self.script.kind} model" if self.script.kind != "plain" else ""
        return "after " + ", ".join(self.history) + of

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(number)
        tokens, targets = torch.randint(SIZE.vocab, (2, *SHAPES[number // 3 % len(SHAPES)]), generator=draw)
        if number % 4 == 3:
            targets[:] = -100
        elif number % 4 == 0:
            targets[:, 2:] = -100
        return tokens.to(self.device), targets.to(self.device)

    def expected_loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.wide(tokens).flatten(0, 1), targets.flatten())

    def forward(self, value: int) -> None:
        inputs = self.batch(value)
        found, expected = self.of.step.forward(*inputs), self.expected_loss(*inputs)
        self.waiting.append((found, expected))
        self.compare_loss(found, expected, inputs, value)

    def evaluate(self, value: int) -> None:
        inputs = self.batch(value)
        with torch.inference_mode() if value % 2 else torch.no_grad():
            found, expected = self.of.step.forward(*inputs), self.expected_loss(*inputs)
        assert not found.requires_grad, f"a loss that was computed without autograd requires a gradient, {self.when}"
        self.compare_loss(found, expected, inputs, value)

    def backward(self, value: int) -> None:
        found, expected = self.waiting.pop(value % len(self.waiting))
        self.of.step.backward(found)
        expected.backward()
        self.scaled = True

    def drop(self, value: int) -> None:
        self.waiting.pop(value % len(self.waiting))

    def update(self, value: int) -> None:
        self.of.step.update()
        self.optimizer.step()
        self.scaled = False

    def call(self, value: int) -> None:
        inputs = self.batch(value)
        found, expected = self.of.step(*inputs), self.expected_loss(*inputs)
        expected.backward()
        self.optimizer.step()
        self.scaled = False
        self.compare_loss(found, expected, inputs, value)

    def overflow(self, value: int) -> None:
        used = [
            p for name, p in zip(self.names, self.found, strict=True) if p.requires_grad and not name.startswith("unu")
        ]
        hook = used[value % len(used)].register_hook(lambda grad: torch.full_like(grad, torch.inf))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.of.step.backward(self.of.step.forward(*self.batch(1)))
            self.of.step.update()
        hook.remove()
        assert any(issubclass(each.category, RuntimeWarning) for each in caught), f"no RuntimeWarning {self.when}"
        self.overflows += 1
        self.scaled = False
        self.clear(value)

    def clear(self, value: int) -> None:
        for optimizer in (self.of.optimizer, self.optimizer):
            optimizer.zero_grad()

    def zero(self, value: int) -> None:
        for optimizer in (self.of.optimizer, self.optimizer):
            optimizer.zero_grad(set_to_none=False)

    def halve(self, value: int) -> None:
        for p in (*self.found, *self.expected):
            if p.grad is not None:
                p.grad.mul_(0.5)

    def modes(self, value: int) -> None:
        for model in (self.of.model, self.wide):
            set_modes(model, value)

    def freeze(self, value: int) -> None:
        i = self.turned(value)
        for parameters in (self.found, self.expected):
            parameters[i].requires_grad_(not parameters[i].requires_grad)

    def rate(self, value: int) -> None:
        for optimizer in (self.of.optimizer, self.optimizer):
            optimizer.param_groups[value % 2]["lr"] = (0.0, 0.02, 0.1, 0.2)[value % 4]

    def reload(self, value: int) -> None:
        for optimizer in (self.of.optimizer, self.optimizer):
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    @torch.no_grad()
    def weights(self, value: int) -> None:
        for parameters in (self.found, self.expected):
            parameters[value % len(parameters)].mul_(0.8).add_(0.01)

    def compare_loss(self, found: Tensor, expected: Tensor, inputs: tuple[Tensor, Tensor], value: int) -> None:
        for x, before in zip(inputs, self.batch(value), strict=True):
            assert torch.equal(x, before), f"the tokens or targets have changed {self.when}"
        as_expected = math.isclose(found.item(), expected.item(), rel_tol=CLOSE[self.precision])
        assert as_expected or (found.isnan() and expected.isnan()), (
            f"the loss of a batch of shape {tuple(inputs[0].shape)} is {found.item():.7g}, expected "
            f"{expected.item():.7g}, {self.when}"
        )

    def compare(self) -> None:
        if self.precision != "float16" or not self.scaled:
            found, expected = ([p.grad for p in parameters] for parameters in (self.found, self.expected))
            for name, x, y in zip(self.names, found, expected, strict=True):
                if (x is None) != (y is None):
                    here, there = ("no gradient", y) if x is None else ("a gradient", x)
                    assert not there.any(), f"{name} has {here} {self.when}"
            self.compare_all("gradients", found, expected)
        moved = [p.detach() - x for p, x in zip(self.found, self.start, strict=True)]
        self.compare_all("changes of the parameters", moved, self.changes())
        found, expected = (
            [optimizer.state.get(p, {}).get("momentum_buffer") for p in parameters]
            for optimizer, parameters in ((self.of.optimizer, self.found), (self.optimizer, self.expected))
        )
        for name, x, y in zip(self.names, found, expected, strict=True):
            assert (x is None) == (y is None), f"{name} has {'no ' * (x is None)}momentum {self.when}"
        self.compare_all("momentum", found, expected)

    def changes(self) -> list[Tensor]:
        return [p.detach() - x for p, x in zip(self.expected, self.start, strict=True)]

    def compare_all(self, what: str, found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> None:
        """All together; where they are all but zero, of a size that rounding may have."""
        pairs = [(x, y) for x, y in zip(found, expected, strict=True) if x is not None and y is not None]
        if not pairs:
            return
        x, y = (torch.cat([each.flatten().double() for each in some]) for some in zip(*pairs, strict=True))
        sizes = [x.norm().item(), y.norm().item()]
        error = (x - y).norm().item()
        if max(sizes) < 1e-4 or error <= CLOSE[self.precision] * sizes[1]:
            return
        errors = [
            (a.double() - b).norm().item() if a is not None else 0.0 for a, b in zip(found, expected, strict=True)
        ]
        worst = self.names[max(range(len(errors)), key=errors.__getitem__)]
        raise AssertionError(
            f"{what}: off by {error:.4g}, of norm {sizes[0]:.4g}, expected {sizes[1]:.4g}, most of it in {worst}, "
            f"{self.when}"
        )
