"""Rules that find how a published row is predicted, or why it is not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")

Row = dict[str, str]
"""A published row, by the names of its columns."""
Rules = tuple[tuple[str, Callable[[Row], T | None]], ...]
"""Each for the rows of some experiments, whose names begin as a regular expression says."""
Unknown = tuple[str, str, str, str, str]
"""Regular expressions for a row's experiment, case, metric and unit; and why no prediction is held to such rows."""


def by_rule(row: Row, rules: Rules[T]) -> T | None:
    """Result of the first rule for the row's experiment; None without one."""
    return next((rule(row) for experiment, rule in rules if re.match(experiment, row["experiment"])), None)


def why_unknown(row: Row, unknown: Iterable[Unknown]) -> str:
    """The reason why the row is compared with no prediction; empty if it is compared."""
    about = row["experiment"], row["case"], row["metric"], row["unit"]
    for *patterns, why in unknown:
        if all(map(re.search, patterns, about)):
            return why
    return ""
