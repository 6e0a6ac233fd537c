"""Plays the events of a history on a training step, and compares it with autograd and SGD in float64."""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from correctness.engine.calls import MODES
from correctness.engine.histories import Problem, play
from correctness.training_step.events import AROUND, Event, History
from correctness.training_step.models import (
    assert_stays,
    assert_values_stay,
    moody_model,
    set_modes,
    values_of,
    what_stays,
)
from correctness.training_step.stepping import ALL_BFLOAT16, assert_together, made, numbered_batch, setting
from shardmark.api import Implementation

CLOSE = {"float32": 1e-3, "float16": 0.1, "bfloat16": 0.2, ALL_BFLOAT16: 0.2}
"""Allowed relative error of losses, gradients, momentum and sums of updates: the rounding of several steps."""

OPTIONS = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}
"""SGD options that change parameters even if gradients are zero."""

FIRST_OVERFLOWS, OVERFLOWS = 4, 6
"""In float16: skipped steps before the first event, so that nothing else overflows; and most skipped steps in one
history, as too small a loss scale loses gradients."""

MIXED = 1
"""The seed of modes that some modules of each model have and others have not."""


def problem_of(implementation: Implementation, history: History, precision: str, device: str) -> Problem | None:
    """Play the history; return the first thing that is not as expected."""
    if precision == "bfloat16" and history.narrow:
        precision = ALL_BFLOAT16
    torch.manual_seed(torch.initial_seed())  # the same weights each time that a history is played
    return play(Beside(implementation, history, precision, device), history)


class Beside:
    """One or two training steps, each with its reference."""

    def __init__(self, implementation: Implementation, history: History, precision: str, device: str) -> None:
        self.players = [_Player(implementation, history, precision, device) for _ in range(1 + history.twice)]

    def play(self, event: Event) -> None:
        for i, player in enumerate(self.players):
            player.play(event._replace(value=event.value + i))

    def problem(self) -> str:
        return ""  # each event raises its own error


class _Player:
    def __init__(self, implementation: Implementation, history: History, precision: str, device: str) -> None:
        self.implementation, self.precision, self.device, self.mode = implementation, precision, device, AROUND[0]
        self.waiting: list[tuple[Tensor, Tensor]] = []
        """Pairs of losses: found, expected."""
        self.losses: list[tuple[Tensor, float]] = []
        """Every loss, and its value when it was new, as callers read losses after backward and update too."""
        self.scaled = False
        """True if a backward ran since the last update."""
        self.overflows = 0
        model = moody_model(history.kind).to(device, torch.bfloat16 if precision == ALL_BFLOAT16 else torch.float32)
        parameters = list(model.parameters())
        for i in history.frozen:
            parameters[i % len(parameters)].requires_grad_(False)
        graded = history.graded and precision != "float16"
        for p in parameters if graded else ():
            p.grad = 0.1 * torch.randn_like(p) if p.requires_grad else None
        if history.mixed:
            set_modes(model, MIXED)
        before, values = what_stays(model), values_of(model)
        self.of = setting(implementation, device, precision, model, all_parameters=True, **OPTIONS)
        assert_stays(model, before, "once the step is made")
        assert_values_stay(model, values, "once the step is made")
        self.wide = copy.deepcopy(self.of.model).double()
        self.names = [name for name, _ in self.wide.named_parameters()]
        self.found, self.expected = (list(each.parameters()) for each in (self.of.model, self.wide))
        for own, right in zip(self.found, self.expected, strict=True):
            right.grad = None if own.grad is None else own.grad.double()
        self.optimizer = torch.optim.SGD([{"params": self.expected[:1]}, {"params": self.expected[1:]}], **OPTIONS)
        self.start = [p.detach().clone() for p in self.expected]
        self.hooked: list[str] = []  # the hooks of the optimizer's step that ran
        self.of.optimizer.register_step_pre_hook(lambda *_: self.hooked.append("before"))
        self.of.optimizer.register_step_post_hook(lambda *_: self.hooked.append("after"))
        if precision == "float16":
            for i in range(FIRST_OVERFLOWS):
                self.play(Event("overflow", i))

    def play(self, event: Event) -> None:
        if not self.can(event):
            return
        if event.kind in ("update", "update_fails", "anew", "call", "weights", "data", "freeze", "modes"):
            self.waiting.clear()
        before = what_stays(self.of.model, self.of.optimizer)
        self.hooked.clear()
        self.mode = event.mode
        getattr(self, event.kind)(event.value)
        steps = ("update", "update_fails", "call")
        expected = ["before", "after"][: 1 + (event.kind != "update_fails" or event.value % 2)] * (event.kind in steps)
        assert self.hooked == expected, (
            f"{event.kind} ran the hooks {self.hooked} of the optimizer's step, not {expected}"
        )
        if event.kind not in ("modes", "freeze", "rate"):
            assert_stays(self.of.model, before, f"after {event.kind}", self.of.optimizer)
        self.compare()
        if self.precision == ALL_BFLOAT16 and not self.waiting:
            self.follow()

    @torch.no_grad()
    def follow(self) -> None:
        """Go on from the parameters and momentum found, whose roundings would add up."""
        for own, right in zip(self.found, self.expected, strict=True):
            right.copy_(own)
            for name, value in self.of.optimizer.state.get(own, {}).items():
                self.optimizer.state[right][name].copy_(value)

    def can(self, event: Event) -> bool:
        half = self.precision == "float16"
        used = {name for name, p in zip(self.names, self.expected, strict=True) if p.requires_grad} - {"unused"}
        match event.kind:
            case "backward" | "backward_fails" | "drop":
                return bool(self.waiting)
            case "overflow":
                return half and self.overflows < OVERFLOWS
            case "anew":
                return not half  # which would begin with its largest scale
            case "halve" | "replace":
                return not (half and self.scaled)
            case "freeze":
                return bool(used - {self.names[self.turned(event.value)]})
        return True

    def turned(self, value: int) -> int:
        """Index of the parameter to freeze or thaw: an odd value picks a frozen one, if there is any."""
        frozen = [i for i, p in enumerate(self.expected) if not p.requires_grad]
        return frozen[value // 2 % len(frozen)] if value % 2 and frozen else value % len(self.expected)

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        return numbered_batch(number, self.device)

    def expected_loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(self.wide(tokens).flatten(0, 1), targets.flatten())

    def forward(self, value: int) -> None:
        inputs = self.batch(value)
        with MODES[self.mode](self.device):
            found = self.of.step.forward(*inputs)
        expected = self.expected_loss(*inputs)
        self.waiting.append((found, expected))
        self.compare_loss(found, expected, inputs, value)

    def evaluate(self, value: int) -> None:
        inputs = self.batch(value)
        with torch.inference_mode() if value % 2 else torch.no_grad():
            with MODES[self.mode](self.device):
                found = self.of.step.forward(*inputs)
            expected = self.expected_loss(*inputs)
        assert not found.requires_grad, "a loss that was computed without autograd requires a gradient"
        self.compare_loss(found, expected, inputs, value)

    def fails(self, value: int) -> None:
        for forward, model in ((self.of.step.forward, self.of.model), (self.expected_loss, self.wide)):
            hook = model.get_submodule("output").register_forward_pre_hook(lambda *_: 1 / 0)
            with suppress(Exception), torch.set_grad_enabled(value % 2 == 0):  # a compiler raises its own
                forward(*self.batch(value))
            hook.remove()
        with torch.inference_mode():  # as buffers that `evaluate` replaced may be of it
            for found, expected in zip(self.of.model.buffers(), self.wide.buffers(), strict=True):
                expected.copy_(found)  # whether the model got as far as to change them is not asked

    def backward(self, value: int) -> None:
        found, expected = self.waiting.pop(value % len(self.waiting))
        self.of.step.backward(found)
        expected.backward()
        self.scaled = True

    def backward_fails(self, value: int) -> None:
        found, expected = self.waiting.pop(value % len(self.waiting))
        for backward, loss in ((self.of.step.backward, found), (Tensor.backward, expected)):
            loss.register_hook(lambda _: 1 / 0)
            with suppress(Exception):  # a compiler raises its own
                backward(loss)
        self.scaled = True

    def drop(self, value: int) -> None:
        self.waiting.pop(value % len(self.waiting))

    def update(self, value: int) -> None:
        self.of.step.update()
        self.optimizer.step()
        self.scaled = False

    def update_fails(self, value: int) -> None:
        for update, optimizer in ((self.of.step.update, self.of.optimizer), (self.optimizer.step, self.optimizer)):
            add = optimizer.register_step_post_hook if value % 2 else optimizer.register_step_pre_hook
            hook, raised = add(lambda *_: 1 / 0), True
            with suppress(Exception):  # a compiler raises its own
                update()
                raised = False
            hook.remove()
            assert raised, "update raises no error where a hook of the optimizer's step does"

    def anew(self, value: int) -> None:
        with suppress(ValueError):  # as of blocks that are checkpointed already
            self.of.step = made(self.implementation, self.precision, self.of.model, self.of.optimizer)

    def call(self, value: int) -> None:
        inputs = self.batch(value)
        with MODES[self.mode](self.device):
            found = self.of.step(*inputs)
        expected = self.expected_loss(*inputs)
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
        self.expected_loss(*self.batch(1))  # which may change buffers
        assert any(issubclass(each.category, RuntimeWarning) for each in caught), (
            "a skipped step gives no RuntimeWarning"
        )
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

    def replace(self, value: int) -> None:
        for p in (*self.found, *self.expected):
            p.grad = None if p.grad is None else p.grad * 0.5

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
    def copy(self, value: int) -> None:
        logits = []
        for model in (self.of.model, self.wide):
            own = copy.deepcopy(model)
            for p in own.parameters():
                p.mul_(-0.5)
            logits.append(own(self.batch(value)[0]))
            for p in own.parameters():
                p.fill_(torch.nan)
        self.compare_all("logits of a copy of the model", *([each] for each in logits))

    @torch.no_grad()
    def weights(self, value: int) -> None:
        for parameters in (self.found, self.expected):
            parameters[value % len(parameters)].mul_(0.8).add_(0.01)

    def data(self, value: int) -> None:
        for parameters in (self.found, self.expected):
            p = parameters[value % len(parameters)]
            p.data = 0.01 - 0.8 * p.data

    def compare_loss(self, found: Tensor, expected: Tensor, inputs: tuple[Tensor, Tensor], value: int) -> None:
        for x, before in zip(inputs, self.batch(value), strict=True):
            assert torch.equal(x, before), "the tokens or targets have changed"
        assert found.dtype == torch.float32, f"the loss is {found.dtype}, not torch.float32"
        self.losses.append((found.detach(), found.item()))
        as_expected = math.isclose(found.item(), expected.item(), rel_tol=CLOSE[self.precision])
        assert as_expected or (found.isnan() and expected.isnan()), (
            f"the loss of a batch of shape {tuple(inputs[0].shape)} is not as expected\n"
            f"found {found.item():.7g}, expected {expected.item():.7g}"
        )

    def compare(self) -> None:
        for (name, x), y in zip(self.of.model.named_buffers(), self.wide.buffers(), strict=True):
            error, size = (x.double() - y).norm().item(), y.double().norm().item()
            assert error <= CLOSE[self.precision] * max(size, 1e-3), (
                f"{name} is not what one forward after another makes of it\nfound {x.tolist()}, expected {y.tolist()}"
            )
        for loss, value in self.losses:
            now = loss.item()
            assert now == value or (math.isnan(now) and math.isnan(value)), (
                f"a loss of {value:.7g} has become {now:.7g}"
            )
        if self.precision != "float16" or not self.scaled:
            found, expected = ([p.grad for p in parameters] for parameters in (self.found, self.expected))
            for name, x, y in zip(self.names, found, expected, strict=True):
                if (x is None) != (y is None):
                    here, there = ("no gradient", y) if x is None else ("a gradient", x)
                    assert not there.any(), f"{name} has {here}"
            self.compare_all("gradients", found, expected)
        moved = [p.detach() - x for p, x in zip(self.found, self.start, strict=True)]
        wanted = [p.detach() - x for p, x in zip(self.expected, self.start, strict=True)]
        rounded = 2**-8 * torch.stack([p.norm() for p in self.expected]).norm().item()
        self.compare_all("changes of the parameters", moved, wanted, rounded * (self.precision == ALL_BFLOAT16))
        found, expected = (
            [optimizer.state.get(p, {}).get("momentum_buffer") for p in parameters]
            for optimizer, parameters in ((self.of.optimizer, self.found), (self.optimizer, self.expected))
        )
        for name, x, y in zip(self.names, found, expected, strict=True):
            assert (x is None) == (y is None), f"{name} has {'no ' * (x is None)}momentum"
        self.compare_all("momentum", found, expected)

    def compare_all(
        self, what: str, found: Sequence[Tensor | None], expected: Sequence[Tensor | None], rounded: float = 0.0
    ) -> None:
        assert_together(what, self.names, found, expected, CLOSE[self.precision], rounded)
