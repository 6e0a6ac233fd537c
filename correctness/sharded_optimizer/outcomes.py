"""Whether what was played on each rank is what the unsharded optimizer gives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from correctness.sharded_optimizer.events import Played


def assert_played(ranks: Sequence[Played], expected: Played, rtol: float = 1e-10) -> None:
    """Every rank's parameters are the expected ones after every step."""
    for step, values in enumerate(expected.parameters, 1):
        for i, value in enumerate(values):
            for rank, played in enumerate(ranks):
                where = (
                    f"after step {step} ({expected.events[step - 1]}) parameter {i} of shape {tuple(value.shape)} in "
                    f"group {expected.group_of[i]} on rank {rank} of {len(ranks)}"
                )
                assert_value(where, played.parameters[step - 1][i], value, rtol, expected.before[step - 1][i])
    for rank, played in enumerate(ranks):
        assert not played.wrong, f"on rank {rank} of {len(ranks)} {played.wrong[0]}"


def assert_value(
    where: str, found: Tensor, expected: Tensor, rtol: float = 1e-10, before: Tensor | None = None
) -> None:
    """Close, in the expected shape and dtype; a failure shows the element that is furthest off, and says whether all
    are still as `before`.
    """
    assert found.shape == expected.shape, f"{where}: shape {tuple(found.shape)}, expected {tuple(expected.shape)}"
    assert found.dtype == expected.dtype, f"{where}: {found.dtype}, expected {expected.dtype}"
    still = before is not None and torch.equal(found.cpu(), before.cpu())
    found, wide = found.double().cpu().flatten(), expected.double().cpu().flatten()
    rtol = max(rtol, 4 * torch.finfo(expected.dtype).eps) if expected.is_floating_point() else 0
    excess = (found - wide).abs() - rtol * wide.abs().clamp(min=1)
    if bool((~(excess <= 0)).any()):
        worst = int(excess.nan_to_num(torch.inf).argmax())
        wrong = int((~(excess <= 0)).sum())
        raise AssertionError(
            f"{where}: element {worst} is {found[worst].item():.9g}, expected {wide[worst].item():.9g}; "
            f"{wrong} of {wide.numel()} elements differ" + ", all still of the value from before the step" * still
        )


def assert_state(found: dict[str, Any], expected: dict[str, Any], where: str, updated: set[int] | None = None) -> None:
    """The state of each parameter, or of those, by position, and its group's options, are the expected ones."""
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
                continue  # torch's optimizers fill in what is newer than a checkpoint
            if name not in ("params", "param_names"):
                assert name in group, f"{where}: group {i} has no {name!r}"
                assert group[name] == value, f"{where}: {name!r} of group {i} is {group[name]}, expected {value}"
