"""Plays events on a sharded optimizer on each rank and on an unsharded reference beside it."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from correctness.engine.histories import Player, report
from correctness.engine.histories_on_ranks import even_and_odd_ranks, play_on_ranks
from correctness.sharded_optimizer.events import Save
from correctness.sharded_optimizer.training import Checkpoint, History, Make, Training, unsharded
from correctness.support.exact import exact
from correctness.support.global_state import random_state_stays
from shardmark.api import Implementation
from shardmark.ranks.world import World


class Beside:
    """A sharded and an unsharded training on this rank: compares parameters after each event, and saved states."""

    def __init__(
        self,
        implementation: Implementation | None,
        history: History,
        device: str,
        *,
        start: Checkpoint | None = None,
        rtol: float = 1e-10,
    ) -> None:
        make: Make = unsharded if implementation is None else implementation.watched
        group, place = None, None
        if history.in_groups:
            side, group = even_and_odd_ranks()
            history = replace(history, seed=history.seed + side)
            make = partial(make, process_group=group)
        exactly = exact() == torch.float64  # in float32 the noise of the ranks would be rounded
        if history.averages and exactly and implementation is not None and implementation.accepts("average_gradients"):
            make = partial(make, average_gradients=True)
            place = dist.get_rank(group), dist.get_world_size(group)
        self.rtol = rtol
        self.found = Training(make, history, device, start, place)
        self.expected = Training(unsharded, history, device, start)
        self.largest = _magnitudes(self.expected.values())
        """Largest magnitude of each element so far, at least 1: rounding errors of that size stay when it shrinks."""

    def play(self, event: Any) -> None:
        self.before = self.expected.values()
        for training in (self.expected, self.found):
            training.state = None
            with random_state_stays(str(event)):
                event.happens(training)

    def problem(self) -> str:
        wanted = self.expected.values()
        now = zip_longest(_magnitudes(wanted), self.largest)
        self.largest = [x if before is None else x.maximum(before) for x, before in now]
        for i, (x, y) in enumerate(zip(self.found.values(), wanted, strict=True)):
            what = f"parameter {i} of shape {tuple(y.shape)} in group {self.expected.group_of[i]}"
            before = self.before[i] if i < len(self.before) else None
            assert_value(what, x, y, self.rtol, before, self.largest[i])
            if self.found.place is None:
                assert_gradient(
                    f"the gradient of {what}", self.found.parameters[i].grad, self.expected.parameters[i].grad
                )
        if self.expected.state is not None and self.found.state is not None:
            updated = {i for i in self.expected.updated if wanted[i].numel()}
            assert_state(self.found.state, self.expected.state, "state_dict()", updated)
        return ""

    def checkpoint(self) -> Checkpoint:
        Save().happens(self.found)
        return Checkpoint(self.found.values(), self.found.saved)


def _magnitudes(values: Sequence[Tensor]) -> list[Tensor]:
    return [x.double().abs().nan_to_num(0, 0).clamp(min=1) for x in values]


def check(
    implementation: Implementation, world: World, history: History, device: str, make: Callable[..., Player] = Beside
) -> None:
    """Fail, with the events so far, where any rank differs from the unsharded optimizer after an event."""
    __tracebackhide__ = True
    problem = play_on_ranks(world, make, implementation, history, device)
    if problem is not None:
        raise AssertionError(report(history, problem))


def checkpoint_after(implementation: Implementation | None, history: History, device: str) -> Checkpoint:
    """Parameters and state after the events; `check` compares them with the unsharded ones."""
    beside = Beside(implementation, history, device)
    for event in history.events:
        event.happens(beside.found)
    return beside.checkpoint()


def assert_value(
    where: str,
    found: Tensor,
    expected: Tensor,
    rtol: float = 1e-10,
    before: Tensor | None = None,
    magnitudes: Tensor | None = None,
) -> None:
    """Fail where shape, dtype or values differ; show the element furthest off, and say if all still equal `before`.

    An element may be off by `rtol` times its `magnitudes`: by default its expected one, or 1 if that is larger.
    """
    assert found.shape == expected.shape, f"{where}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    assert found.dtype == expected.dtype, f"{where}: {found.dtype}, expected {expected.dtype}"
    still = before is not None and torch.equal(found.cpu(), before.cpu())
    found, wide = found.double().cpu().flatten(), expected.double().cpu().flatten()
    rtol = max(rtol, 4 * torch.finfo(expected.dtype).eps) if expected.is_floating_point() else 0
    magnitudes = wide.abs().clamp(min=1) if magnitudes is None else magnitudes.flatten()
    excess = (found - wide).abs() - rtol * magnitudes
    excess[(found == wide) | (found.isnan() & wide.isnan())] = 0  # also of infinities
    if bool((~(excess <= 0)).any()):
        worst = int(excess.nan_to_num(torch.inf).argmax())
        wrong = int((~(excess <= 0)).sum())
        raise AssertionError(
            f"{where} differs in {wrong} of {wide.numel()} elements"
            + (", which are as before the event" if still else "")
            + f"\nfound {found[worst].item():.9g}, expected {wide[worst].item():.9g} at [{worst}]"
        )


def assert_gradient(where: str, found: Tensor | None, expected: Tensor | None) -> None:
    """Fail where a gradient came, went or changed: users add to what is left of it."""
    is_there = {True: "a tensor", False: "None"}
    here, there = (is_there[x is not None] for x in (found, expected))
    assert here == there, f"{where} is another\nfound {here}, expected {there}"
    if found is not None and expected is not None:
        assert_value(where, found, expected, rtol=0)


def assert_values(ranks: Sequence[Sequence[Tensor]], expected: Sequence[Tensor], when: str = "") -> None:
    """Fail where a parameter on some rank is not as expected; `when` goes behind its name."""
    for rank, found in enumerate(ranks):
        for i, (x, y) in enumerate(zip(found, expected, strict=True)):
            assert_value(f"parameter {i} on rank {rank}{when}", x, y.detach())


def assert_state(found: dict[str, Any], expected: dict[str, Any], where: str, updated: set[int] | None = None) -> None:
    """Compare each parameter's state, by position, and each group's options; `updated` limits the parameters."""
    for key in ("state", "param_groups"):
        assert key in found, f"{where}: state_dict() has {sorted(map(str, found))}, and no {key!r}"
    mine, theirs = ([i for group in each["param_groups"] for i in group["params"]] for each in (found, expected))
    assert len(mine) == len(theirs), f"{where}: state_dict() has {len(mine)} parameters, expected {len(theirs)}"
    for i, (here, there) in enumerate(zip(mine, theirs, strict=True)):
        if updated is not None and i not in updated:
            continue
        values, wanted = found["state"].get(here, {}), expected["state"].get(there, {})
        names, needed = (
            sorted(k for k, v in values.items() if v is not None),
            sorted(k for k, v in wanted.items() if v is not None),
        )
        assert names == needed, f"{where}: the state of parameter {i} has {names or 'nothing'}, expected {needed}"
        for name in needed:
            x, y = (each if isinstance(each, Tensor) else torch.tensor(each) for each in (values[name], wanted[name]))
            assert_value(f"{where}: {name} of parameter {i}", x.to(y.dtype) if not y.dim() else x, y)
    for i, (group, other) in enumerate(zip(found["param_groups"], expected["param_groups"], strict=True)):
        for name, value in other.items():
            if name not in group and (value is False or value is None):
                continue  # torch's optimizers fill in options newer than the checkpoint
            if name not in ("params", "param_names"):
                assert name in group, f"{where}: group {i} has no {name!r}"
                assert group[name] == value, f"{where}: {name!r} of group {i} is {group[name]}, expected {value}"
