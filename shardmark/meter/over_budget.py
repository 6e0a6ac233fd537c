"""Why a memory budget failed: what the formula has at the peak, beside the blocks that the meter found there.

what the formula has at the peak         MiB
--------------------------------------------
parameters                              0.56
...

what was found there  blocks     MiB  where
--------------------------------------------------------
aten::bmm                  3   12.00  in mine.py:31
...
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shardmark.meter.allocations import Allocated, Block, Event, Marked, Released
from shardmark.text import layout, mib

SHOWN = 12
"""Most lines of each list; the rest is one more line."""

STEP = "the metered step"
"""The mark at which the metered step begins: the peak counts from there."""


@dataclass(frozen=True)
class Held:
    """Live blocks at the peak with the same origin."""

    nbytes: int
    blocks: int
    operator: str
    module: str
    line: str
    """The line in the innermost file that is neither PyTorch's nor this plugin's: the operator's call, or the beginning
    of the function that calls it."""


def held_at_peak(events: Sequence[Event]) -> list[Held]:
    """The tensors live at the peak of the step, grouped by operator, module and line, the largest group first."""
    live: dict[Block, None] = {}
    total = most = 0
    at_peak: list[Block] = []
    begun = False
    for event in events:
        match event:
            case Allocated(block) if not block.workspace:
                live[block] = None
                total += block.nbytes
            case Released(block) if not block.workspace:
                if begun and total > most:  # the peak ends here
                    most, at_peak = total, list(live)
                live.pop(block)
                total -= block.nbytes
            case Marked(name) if name == STEP:
                begun = True
    if total > most:
        at_peak = list(live)
    origins: dict[tuple[str, str, str], list[int]] = {}
    for block in at_peak:
        origins.setdefault((block.operator, block.module, block.line), []).append(block.nbytes)
    held = [Held(sum(sizes), len(sizes), *origin) for origin, sizes in origins.items()]
    return sorted(held, key=lambda each: each.nbytes, reverse=True)


def excess_lines(formula: int, found: Sequence[Held]) -> Iterator[str]:
    """Both lists, in MiB; the formula's alone if nothing was found. A formula without named terms is one line.

    A prediction has operators, modules and lines itself: then the lines list the origins that hold more than predicted.
    """
    if found and (predicted := getattr(formula, "held", None)):
        yield from _lines_beyond(predicted(), found)
        return
    entries: Mapping[str, int] = getattr(formula, "entries", {"one number, without named terms": formula})
    name = "what the formula has at the peak"
    shown = [*list(entries.items())[:SHOWN], *_rest(list(entries.values())[SHOWN:])]
    yield from layout([{name: entry, "MiB": mib(nbytes)} for entry, nbytes in shown], left=(name,))
    if found:
        yield ""
        yield from found_lines(found)


def found_lines(found: Sequence[Held]) -> Iterator[str]:
    """A table of the blocks at the peak, in MiB."""
    rows: list[dict[str, Any]] = [
        {
            "what was found there": each.operator or "by no operator",
            "blocks": f"{each.blocks}",
            "MiB": mib(each.nbytes),
            "where": ", ".join(filter(None, [each.module, each.line])),
        }
        for each in found[:SHOWN]
    ]
    for entry, nbytes in _rest([each.nbytes for each in found[SHOWN:]]):
        blocks = sum(each.blocks for each in found[SHOWN:])
        rows.append({"what was found there": entry, "blocks": f"{blocks}", "MiB": mib(nbytes), "where": None})
    yield from layout(rows, left=("what was found there", "where"))


def _lines_beyond(predicted: Sequence[Held], found: Sequence[Held]) -> Iterator[str]:
    """The origins that hold more bytes than predicted, the largest difference first."""
    both = {_origin(each) for each in predicted} & {_origin(each) for each in found}
    expected, there = _by_origin(predicted, both), _by_origin(found, both)
    pairs = [(each, expected.get(origin, Held(0, 0, "", "", ""))) for origin, each in there.items()]
    more = sorted(pairs, key=lambda pair: pair[1].nbytes - pair[0].nbytes)[:SHOWN]
    rows = [
        {
            "what holds more than predicted": each.operator or "by no operator",
            "blocks": f"{each.blocks}",
            "MiB": mib(each.nbytes),
            "predicted blocks": f"{before.blocks}",
            "predicted MiB": mib(before.nbytes),
            "where": ", ".join(filter(None, [each.module, each.line])),
        }
        for each, before in more
        if each.nbytes > before.nbytes
    ]
    yield from layout(rows, left=("what holds more than predicted", "where"))


def _origin(held: Held) -> tuple[str, str, str]:
    return held.operator, held.module, held.line


def _by_origin(held: Sequence[Held], both: Collection[tuple[str, str, str]]) -> dict[tuple[str, str, str], Held]:
    """Blocks by origin. Origins of one side alone are merged by operator and module, with the largest one's line.

    An operator that Python's syntax calls may have its own line on one side, and its function's line on the other.
    """
    merged: dict[tuple[str, str, str], Held] = {}
    for each in held:
        origin = _origin(each) if _origin(each) in both else (each.operator, each.module, "")
        largest = merged.get(origin, replace(each, nbytes=0, blocks=0))
        merged[origin] = replace(largest, nbytes=largest.nbytes + each.nbytes, blocks=largest.blocks + each.blocks)
    return merged


def _rest(sizes: Sequence[int]) -> list[tuple[str, int]]:
    return [(f"{len(sizes)} smaller", sum(sizes))] if sizes else []
