"""Plots of a question: declared beside its test, saved with the run, drawn on the page (`--report out.html`).

    @pytest.mark.question("What does a nap cost?", plots=[Lines("Time by length", x="case.length", y="stats.median")])

A plot names where its figures are: "stats.median" in an entry of pytest-benchmark, "case.seq" in its row. It draws the
rows that have them. The page shows a question's first plot, and the others on demand. Times beside the peer's, peak
memory, the step's parts, what ranks do when, and memory by kind and by stage are drawn without declaration, after the
declared ones; a question that one of them answers names it first: `plots=[MEMORY]`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from shardmark.rows.columns import Entry
from shardmark.rows.figures import figure

T = TypeVar("T")


@dataclass(frozen=True)
class Lines:
    """One line for each implementation, through all rows that have both figures. Both axes are logarithmic, y unless
    `log_y` is false.

    `unit` is that of y in the rows: "s", "B", "FLOP/s", "B/s" or none. The other texts are places in an entry: `panels`
    divides the rows; `limit` is each row's limit at its x, such as the roofline; `curve` is a model's figure by x, and
    `best` the x and y of its minimum. `start` is a point of every line, such as one rank's efficiency of 1. Where y is
    a list, such as the losses of steps, x are its places.
    """

    title: str
    x: str
    y: str
    unit: str = ""
    x_title: str = ""
    y_title: str = ""
    panels: str | None = None
    limit: str | None = None
    limit_title: str = "roofline"
    curve: str | None = None
    curve_title: str = "by the model"
    best: tuple[str, str] | None = None
    x_scale: float = 1.0
    """Factor on the x of `best`."""
    start: tuple[float, float] | None = None
    log_y: bool = True


@dataclass(frozen=True)
class Points:
    """A point for each row's figures, and hollow ones for figures that others have published, on their hardware; with
    such figures the plot is on a page of their own.

    `ours` maps a metric's name to where it is in a row, for all rows; `units` has the units of the published ones too.
    """

    title: str
    ours: dict[str, str]
    units: dict[str, str]
    published: tuple[Published, ...] = ()
    note: str = ""
    """More that a reader should know about the published figures."""


@dataclass(frozen=True)
class Published:
    """A published figure, in seconds or bytes, and what stands beside it: a row of this run of the same sizes and on
    the same hardware, otherwise what is predicted for its program on its hardware."""

    source: str
    hardware: str
    case: str
    metric: str
    value: float
    on: str = ""
    """The hardware's name in `hardware.toml`; empty where it is not known."""
    predicted: float | None = None
    row: str = ""
    """A regular expression of "implementation case ranks" for the rows of the same sizes; empty where none are."""
    where: str = ""
    """Where the figure is in such a row."""


AUTOMATIC = ("times", "memory", "parts", "kernels", "streams", "spans", "kinds", "stages")
"""Plots that are drawn without declaration, in this order."""


@dataclass(frozen=True)
class Automatic:
    """One of `AUTOMATIC`, in the place where a question names it. Raises ValueError for another name."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in AUTOMATIC:
            raise ValueError(f"no plot is called {self.name!r}, only {', '.join(AUTOMATIC)}")


TIMES, MEMORY, TIME_BY_PART, TIME_BY_KERNEL, STREAMS, SPANS, MEMORY_BY_KIND, MEMORY_BY_STAGE = map(Automatic, AUTOMATIC)

Plot = Lines | Points | Automatic
KINDS: dict[str, type[Plot]] = {kind.__name__: kind for kind in (Lines, Points, Automatic)}


def saved(plot: Plot) -> dict[str, Any]:
    """The plot as JSON."""
    return {"kind": type(plot).__name__, **asdict(plot)}


def restored(plot: Mapping[str, Any]) -> Plot:
    """The inverse of `saved`. Raises KeyError, TypeError or ValueError for a plot of another version."""
    kind = KINDS[plot["kind"]]
    known = {field.name: plot[field.name] for field in fields(kind) if field.name in plot}
    known |= {name: tuple(value) for name, value in known.items() if isinstance(value, list)}
    if kind is Points:
        known["published"] = tuple(_checked(Published, each) for each in known["published"])
    return _checked(kind, known)


def _checked(kind: type[T], values: Mapping[str, Any]) -> T:
    """An object of these values. Raises TypeError for one of another type than its field."""
    hints = get_type_hints(kind)
    for name, value in values.items():
        if not _fits(value, hints.get(name, Any)):
            raise TypeError(f"{kind.__name__}.{name} is of type {type(value).__name__}")
    return kind(**values)


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value of JSON, with tuples for its lists, is of that type."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, UnionType):
        return any(_fits(value, each) for each in inside)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, inside[1]) for each in value.values())
    if origin is tuple:
        return isinstance(value, tuple) and all(_fits(each, inside[0]) for each in value)
    return isinstance(value, int | float if hint is float else hint)


def number(entry: Entry, where: str) -> float | None:
    """The finite number at that place of an entry; None if there is none."""
    return finite(figure(entry, where))


def finite(found: Any) -> float | None:
    """`found` as a float if it is a finite number; otherwise None."""
    real = isinstance(found, int | float) and not isinstance(found, bool) and math.isfinite(found)
    return float(found) if real else None


UNITS: dict[str, tuple[float, str]] = {
    "s": (1e-3, "ms"),
    "B": (2**20, "MiB"),
    "FLOP/s": (1e12, "TFLOP/s"),
    "B/s": (1e9, "GB/s"),
    "": (1.0, ""),
}
"""By the unit in rows: the size of the unit that people read, and its name."""


LONGEST = 80
"""Most characters of a name in a plot; the table has the whole name."""


def apart(names: Iterable[str]) -> list[str]:
    """Names, cut to `LONGEST` characters; equal ones are numbered."""
    found: list[str] = []
    for name in names:
        short = name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"
        numbered = (short, *(f"{short} ({n})" for n in range(2, len(found) + 2)))
        found.append(next(each for each in numbered if each not in found))
    return found


def labels(entries: Sequence[Entry]) -> list[str]:
    """A name for each entry: its implementation, and the parts of its case and ranks that not all entries share."""
    parts = [tokens(entry) for entry in entries]
    ranks = {entry["extra_info"]["world_size"] for entry in entries}
    shared = set.intersection(*map(set, parts)) if parts else set()
    found = []
    for entry, each in zip(entries, parts, strict=True):
        row = entry["extra_info"]
        own = [token for token in each if token not in shared]
        own += [f"{row['world_size']} ranks"] if len(ranks) > 1 else []
        found.append(" ".join([row["implementation"], *(["·", *own] if own else [])]))
    return apart(found)


def line_names(entries: Sequence[Entry], *same: str) -> list[str]:
    """The line each entry belongs to: its implementation, and the parts of its case that vary where `same` is equal."""
    groups: dict[tuple[Any, ...], list[set[Any]]] = {}
    for entry in entries:
        where = entry["extra_info"]["implementation"], *(str(figure(entry, each)) for each in same)
        groups.setdefault(where, []).append(set(tokens(entry)))
    different = {token for each in groups.values() for token in set.union(*each) - set.intersection(*each)}
    names = [
        " ".join([entry["extra_info"]["implementation"], *(each for each in tokens(entry) if each in different)])
        for entry in entries
    ]
    short = dict(zip(dict.fromkeys(names), apart(dict.fromkeys(names)), strict=True))
    return [short[name] for name in names]


def tokens(entry: Entry) -> list[str]:
    """The parts of the case's id, without the implementation's name, which some ids contain."""
    row = entry["extra_info"]
    return [token for token in row["case"]["id"].split("-") if token != row["implementation"]]
