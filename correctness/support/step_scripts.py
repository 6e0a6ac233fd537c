"""What is done with a training step, as data: played by an implementation and, in float64, by autograd and SGD alone.

script = Script([Event("forward"), Event("backward"), Event("update")], frozen=(2,))
play(implementation, script, "float32", device)  # fails after the first event whose outcome is not as expected
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from correctness.support.stepping import BATCH, SIZE, Gradients, gradients, relative_error, setting, values
from impl.model.mlp import MLPLanguageModel
from shardmark.registry import Implementation

CLOSE = {"float32": 1e-3, "float16": 0.1}
"""Relative error allowed of losses, gradients and what updates have added up to: the rounding of several steps."""

OPTIONS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
"""SGD's, with which parameters move also where gradients are zero."""


class Event(NamedTuple):
    """`value` says which: batch, waiting loss, modes, param group or parameter, counted round."""

    kind: str
    value: int = 0


EVENTS = {
    "forward": "a loss, which waits; every fourth batch has no targets that count, the next one a few",
    "backward": "of a waiting loss",
    "drop": "a waiting loss is freed",
    "update": "after which no loss waits, as autograd refuses them",
    "call": "all three in one",
    "clear": "gradients to None",
    "zero": "gradients to zero, in place",
    "modes": "of each module, at random",
    "rate": "of a param group",
    "weights": "changed by the caller, in place",
}


@dataclass(frozen=True)
class Script:
    events: Sequence[Event]
    frozen: Sequence[int] = ()
    """Parameters that are not trainable."""


class Doubles(nn.Module):
    """In training mode alone."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else x


def moody_model() -> nn.Module:
    """A model whose submodules' modes change its loss."""
    model = MLPLanguageModel(SIZE)
    for block in model.blocks:
        block.gelu = nn.Sequential(block.gelu, Doubles())
    model.norm = nn.Sequential(model.norm, Doubles())
    return model


def set_modes(model: nn.Module, number: int) -> None:
    """Of each module on its own, at random."""
    draw = torch.Generator().manual_seed(number)
    for module in model.modules():
        module.training = bool(torch.randint(2, (), generator=draw))


def what_stays(model: nn.Module) -> dict[str, Any]:
    """What a step may not change: by words that a failure says."""
    modes = {f"the training mode of {name or 'the model'}": module.training for name, module in model.named_modules()}
    for name, p in model.named_parameters():
        modes |= {f"{what} of {name}": getattr(p, what) for what in ("requires_grad", "dtype")}
    return modes


def assert_stays(model: nn.Module, before: dict[str, Any], when: str) -> None:
    after = what_stays(model)
    for what, value in before.items():
        assert after.get(what) == value, f"{what} was {value}, and is {after.get(what)} {when}"


def play(implementation: Implementation, script: Script, precision: str, device: str) -> None:
    torch.manual_seed(torch.initial_seed())  # the same weights each time that a script is played
    player = _Player(implementation, script, precision, device)
    for event in script.events:
        player.play(event)


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

    def __post_init__(self) -> None:
        model = moody_model()
        parameters = list(model.parameters())
        for i in self.script.frozen:
            parameters[i % len(parameters)].requires_grad_(False)
        self.of = setting(self.implementation, self.device, self.precision, model, **OPTIONS)
        self.wide = copy.deepcopy(self.of.model).double()
        trainable = [p for p in self.wide.parameters() if p.requires_grad]
        self.optimizer = torch.optim.SGD([{"params": trainable[:1]}, {"params": trainable[1:]}], **OPTIONS)
        self.start = values(self.wide)

    def play(self, event: Event) -> None:
        if event.kind in ("backward", "drop") and not self.waiting:
            return
        self.history.append(event.kind)
        if event.kind in ("update", "call", "weights"):
            self.waiting.clear()
        before = what_stays(self.of.model)
        getattr(self, event.kind)(event.value)
        if event.kind != "modes":
            assert_stays(self.of.model, before, self.when)
        self.compare()

    @property
    def when(self) -> str:
        return "after " + ", ".join(self.history)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        draw = torch.Generator().manual_seed(number)
        tokens, targets = torch.randint(SIZE.vocab, (2, *BATCH), generator=draw)
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
        self.compare_loss(found, expected)

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
        self.compare_loss(found, expected)

    def clear(self, value: int) -> None:
        for optimizer in (self.of.optimizer, self.optimizer):
            optimizer.zero_grad()

    def zero(self, value: int) -> None:
        for optimizer in (self.of.optimizer, self.optimizer):
            optimizer.zero_grad(set_to_none=False)

    def modes(self, value: int) -> None:
        for model in (self.of.model, self.wide):
            set_modes(model, value)

    def rate(self, value: int) -> None:
        for optimizer in (self.of.optimizer, self.optimizer):
            optimizer.param_groups[value % 2]["lr"] = (0.0, 0.02, 0.1, 0.2)[value % 4]

    @torch.no_grad()
    def weights(self, value: int) -> None:
        for model in (self.of.model, self.wide):
            parameters = list(model.parameters())
            parameters[value % len(parameters)].mul_(0.8).add_(0.01)

    def compare_loss(self, found: Tensor, expected: Tensor) -> None:
        as_expected = math.isclose(found.item(), expected.item(), rel_tol=CLOSE[self.precision])
        assert as_expected or (found.isnan() and expected.isnan()), (
            f"the loss is {found.item():.7g}, expected {expected.item():.7g}, {self.when}"
        )

    def compare(self) -> None:
        if self.precision != "float16" or not self.scaled:
            found, expected = gradients(self.of.model), gradients(self.wide)
            self.compare_all("gradients", found, {name: x for name, x in expected.items() if name in found})
            missing = [name for name, x in expected.items() if name not in found and x.any()]
            assert not missing, f"{missing[0]} has no gradient {self.when}"
            extra = [name for name, x in found.items() if name not in expected and x.any()]
            assert not extra, f"{extra[0]} has a gradient {self.when}"
        moved = {name: value.double() - self.start[name] for name, value in values(self.of.model).items()}
        expected = {name: value - self.start[name] for name, value in values(self.wide).items()}
        self.compare_all("changes of the parameters", moved, expected)
        found, expected = (
            {
                str(i): optimizer.state[p]["momentum_buffer"]
                for i, p in enumerate(p for group in optimizer.param_groups for p in group["params"])
                if optimizer.state.get(p, {}).get("momentum_buffer") is not None
            }
            for optimizer in (self.of.optimizer, self.optimizer)
        )
        assert set(found) == set(expected), (
            f"{len(found)} parameters have momentum, expected {len(expected)}, {self.when}"
        )
        self.compare_all("momentum", found, expected)

    def compare_all(self, what: str, found: Gradients, expected: Gradients) -> None:
        """All together; where they are all but zero, of a size that rounding may have."""
        if not expected:
            return
        sizes = [torch.stack([each[name].double().norm() for name in expected]).norm() for each in (found, expected)]
        if max(sizes) < 1e-4:
            return
        error = relative_error(found, expected)
        assert error <= CLOSE[self.precision], (
            f"{what}: relative error {error:.2g}, of norm {sizes[0].item():.4g}, expected {sizes[1].item():.4g}, "
            f"{self.when}"
        )
