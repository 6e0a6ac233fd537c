"""The options that compare a run with earlier ones or with another commit: opened and checked."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from shardmark.plugin import options
from shardmark.ranks import torchrun
from shardmark.ranks.checkout import check_out
from shardmark.rows.against import Against
from shardmark.rows.against_ref import AgainstRef
from shardmark.rows.writer import RowFile
from shardmark.verdict.accept import Accepted, read_accepted
from shardmark.verdict.budget import SMALLEST_EFFECT
from shardmark.verdict.slowdown import LARGEST

LARGEST_SHARE = 10.0
"""Largest value of --largest-slowdown: eleven times as long."""


def is_helping() -> bool:
    """Whether another process writes the rows: this one is a further rank of torchrun or a worker of pytest-xdist."""
    return "PYTEST_XDIST_WORKER" in os.environ or (torchrun.launched() and torchrun.rank() > 0)


def read_accept_file(option: Callable[..., Any]) -> Accepted:
    """Read the file of `--accept`."""
    if option("accept") is None:
        return Accepted()
    if not option("against") and option("against_ref") is None:
        raise ValueError("--accept needs --against or --against-ref, which name what a change is compared with")
    return read_accepted(options.path("accept", option))


def open_against(option: Callable[..., Any], rows: RowFile, accepted: Accepted) -> Against | None:
    """Open the file of `--against`."""
    if not option("against"):
        if option("update_baseline"):
            raise ValueError("--update-baseline needs --against, which names the file")
        return None
    options.check_measures("--against", option)
    paths = [options.as_path("--against", each) for each in option("against")]
    largest = largest_slowdown(option("largest_slowdown"))
    return None if is_helping() else Against(paths, option("update_baseline"), rows, largest, accepted)


def open_against_ref(option: Callable[..., Any], device: str, folder: Path, accepted: Accepted) -> AgainstRef | None:
    """Check out the version of `--against-ref`."""
    ref = option("against_ref")
    if ref is None:
        return None
    if torchrun.launched() or option("link") is not None:
        raise ValueError(f"--against-ref {ref} has ranks of its own on this machine: not with torchrun or --link")
    options.check_measures("--against-ref", option)
    if is_helping():
        return None
    checkout = check_out(ref, folder)
    path = option("accept")
    if path is not None and (before := checkout.moved(path)) != path:
        accepted = accepted.since(Path(before))
    return AgainstRef(checkout, device, largest_slowdown(option("largest_slowdown")), accepted)


def largest_slowdown(value: str | None) -> float:
    """`--largest-slowdown` as a share: 0.05 for "5%" and for "0.05"."""
    if value is None:
        return LARGEST
    with suppress(ValueError):
        share = float(value.removesuffix("%")) / (100 if value.endswith("%") else 1)
        if SMALLEST_EFFECT <= share <= LARGEST_SHARE:  # nan is neither
            return share
    raise ValueError(f"--largest-slowdown is from 1% to {LARGEST_SHARE:.0%}, not {value!r}")


def undecided_fails(option: Callable[..., Any]) -> bool:
    given = option("largest_slowdown") is not None
    if given and not (option("against") or option("against_ref")):
        raise ValueError("--largest-slowdown needs --against or --against-ref, which say what to compare with")
    return options.one_of("--undecided", option("undecided"), ("pass", "fail")) == "fail" or given
