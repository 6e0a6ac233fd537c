"""Stacked bars, a row each: memory by kind beside its budget, after each stage, and where the step's time goes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from shardmark.meter.kernels import CATEGORIES
from shardmark.meter.timeline import KINDS, WORKSPACE
from shardmark.report.page.figure import Bar, Bars, by_case, cell, first, tip
from shardmark.report.plots import finite, labels, number
from shardmark.rows.columns import Entry
from shardmark.rows.figures import figure
from shardmark.text import mib, ms

COMMUNICATION = "communication"
PARTS = ("forward", "backward", COMMUNICATION, "optimizer")
"""Parts of a step that are drawn; a test may time others."""

TENSORS = "tensors"
_COLOURS = {TENSORS: len(KINDS), **{kind: place for place, kind in enumerate(KINDS)}}
_HELD = {"live": "allocated", "reserved": "reserved"}
"""Key in a row's stages, and PyTorch's word for it."""
ALIKE = 0.001
"""Relative difference up to which the kinds at a step's peak add up to its tensors."""

OWN_SCALE = "Each case has a scale of its own."


def memory(entries: Sequence[Entry], anchors: Mapping[str, str]) -> Bars | None:
    """Each row's peak by kind where the row has kinds, otherwise tensors and workspace; None for fewer than two."""
    found = [entry for entry in entries if number(entry, "memory.tensors")]
    if len(found) < 2:
        return None
    notes = [f"Tensors of their budget; workspace is the processor's and has none. {OWN_SCALE}"]
    shown = first(found, notes)
    amounts = {id(entry): _at_peak(entry) for entry in shown}
    kinds = [kind for kind in (TENSORS, *KINDS) if any(kind in each for each in amounts.values())]
    numbers = {kind: _COLOURS[kind] for kind in kinds}
    groups = []
    for heading, named in by_case(shown):
        same = [entry for _, entry in named]
        budgets = [number(entry, "memory.budget") or 0.0 for entry in same]
        longest = max(*budgets, *(sum(amounts[id(entry)].values()) for entry in same))
        ordered = sorted(named, key=lambda each: sum(amounts[id(each[1])].values()))
        bars = [_memory_bar(name, entry, amounts[id(entry)], numbers, longest, anchors) for name, entry in ordered]
        groups.append((heading, bars))
    return Bars("Peak memory", [(numbers[kind], kind) for kind in kinds], groups, "budget", notes)


def _at_peak(entry: Entry) -> dict[str, float]:
    """Bytes by kind at the step's peak, if they add up to its tensors, otherwise the tensors; and the workspace."""
    tensors, workspace = number(entry, "memory.tensors") or 0.0, number(entry, "memory.workspace") or 0.0
    moments = figure(entry, "memory.curve") or [{}]
    peak = max(moments, key=lambda moment: sum(moment.values()))
    kinds = {kind: float(peak[kind]) for kind in KINDS if kind != WORKSPACE and peak.get(kind)}
    if abs(sum(kinds.values()) - tensors) > ALIKE * tensors:
        kinds = {TENSORS: tensors}
    return kinds | ({WORKSPACE: workspace} if workspace else {})


def _memory_bar(
    name: str,
    entry: Entry,
    amounts: Mapping[str, float],
    numbers: Mapping[str, int],
    longest: float,
    anchors: Mapping[str, str],
) -> Bar:
    budget = number(entry, "memory.budget")
    text = " of ".join(filter(None, [cell("tensors MiB", entry), cell("budget MiB", entry)])) + " MiB"
    by_kind = "".join(f" | {kind} {mib(nbytes)}" for kind, nbytes in amounts.items() if kind != TENSORS)
    return Bar(
        name,
        anchors[entry["fullname"]],
        [(numbers[kind], _percent(nbytes, longest)) for kind, nbytes in amounts.items()],
        None if budget is None else _percent(budget, longest),
        text,
        tip(entry) + by_kind,
    )


def after_stages(entries: Sequence[Entry], anchors: Mapping[str, str]) -> Iterator[Bars]:
    """Memory allocated, and on CUDA reserved, after each stage of making a model, with the formula as a tick."""
    notes = ["On the rank that holds most, after each stage. One scale for all stages."]
    shown = first([entry for entry in entries if figure(entry, "memory.stages")], notes)
    stages = dict.fromkeys(name for each in shown for name in figure(each, "memory.stages"))
    named = [*zip(labels(shown), shown, strict=True)]
    for key, word in _HELD.items():
        held = {
            name: [
                (label, entry, nbytes)
                for label, entry in named
                if (nbytes := number(entry, f"memory.stages.{name}.{key}")) is not None
            ]
            for name in stages
        }
        longest = max((nbytes for rows in held.values() for *_, nbytes in rows), default=0.0)
        if not longest:
            continue
        groups = [
            (
                name.replace("_", " "),
                [_stage_bar(*row, longest, name if key == "live" else None, anchors) for row in rows],
            )
            for name, rows in held.items()
            if rows
        ]
        tick = "formula" if any(bar.tick is not None for _, bars in groups for bar in bars) else ""
        yield Bars(f"Memory {word} after each stage", [(1, word)], groups, tick, notes)


def _stage_bar(
    label: str, entry: Entry, nbytes: float, longest: float, with_formula: str | None, anchors: Mapping[str, str]
) -> Bar:
    formula = number(entry, f"memory.stages.{with_formula}.formula") if with_formula else None
    text = f"{mib(nbytes)} MiB"
    tick = None if formula is None else _percent(formula, longest)
    said = f"{text}" if formula is None else f"{text} | formula {mib(formula)} MiB"
    return Bar(label, anchors[entry["fullname"]], [(1, _percent(nbytes, longest))], tick, text, f"{label} | {said}")


def time_by_part(entries: Sequence[Entry], anchors: Mapping[str, str]) -> Bars | None:
    """Each step's time divided into its parts; None if no row has more than one part."""
    notes = ["Mean of each part over rounds and ranks.", OWN_SCALE]
    shown = first([each for each in entries if len(set(PARTS) & _parts(each).keys()) > 1], notes)
    if any(COMMUNICATION in _parts(each) for each in shown):
        notes.append("Communication is the time that it adds to the step.")
    if any(each["extra_info"]["world_size"] > 1 and COMMUNICATION not in _parts(each) for each in shown):
        notes.append("Without a part of its own, communication is in the part that waits for it, mostly backward.")
    groups = [
        (
            heading,
            [(name, entry, {part: finite(_parts(entry).get(part)) or 0.0 for part in PARTS}) for name, entry in named],
        )
        for heading, named in by_case(shown)
    ]
    return _times("Where the step's time goes", PARTS, groups, notes, anchors) if shown else None


def time_by_kernel(entries: Sequence[Entry], anchors: Mapping[str, str]) -> Bars | None:
    """Time of each phase of a step by kind of kernel; None if no row was profiled."""
    notes = ["One step under the profiler, which slows the host: read the shares, not the times.", OWN_SCALE]
    shown = first([each for each in entries if isinstance(figure(each, "kernels.phases"), dict)], notes)
    groups = [
        (
            label,
            [
                (phase, entry, {kind: finite(found["categories"].get(kind)) or 0.0 for kind in CATEGORIES})
                for phase, found in figure(entry, "kernels.phases").items()
            ],
        )
        for label, entry in zip(labels(shown), shown, strict=True)
    ]
    return _times("Kernels that the time goes to", CATEGORIES, groups, notes, anchors) if shown else None


Timed = tuple[str, Entry, Mapping[str, float]]
"""(name, entry, seconds by kind) of a bar."""


def _times(
    title: str,
    kinds: Sequence[str],
    groups: Sequence[tuple[str, Sequence[Timed]]],
    notes: Sequence[str],
    anchors: Mapping[str, str],
) -> Bars:
    shown, notes = [], [*notes]
    if any(each < 0 for _, rows in groups for *_, seconds in rows for each in seconds.values()):
        notes.append("A difference of two times can be negative by noise: it is drawn as 0.")
    for heading, measured in groups:
        rows = [(*row, {kind: max(0.0, each) for kind, each in row[2].items()}) for row in measured]
        longest = max(sum(seconds.values()) for *_, seconds in rows)
        bars = []
        for name, entry, as_measured, seconds in rows:
            said = " | ".join(f"{kind} {ms(each)} ms" for kind, each in as_measured.items() if each)
            shares = ", ".join(f"{kind} {100 * each / sum(seconds.values()):.0f}%" for kind, each in _largest(seconds))
            parts = [(kinds.index(kind), _percent(each, longest)) for kind, each in seconds.items() if each]
            bars.append(
                Bar(name, anchors[entry["fullname"]], parts, None, shares, f"{heading} {name} | {said}".strip())
            )
        shown.append((heading, bars))
    present = [kind for kind in kinds if any(seconds[kind] for _, rows in groups for *_, seconds in rows)]
    return Bars(title, [(kinds.index(kind), kind) for kind in present], shown, "", notes)


def _largest(seconds: Mapping[str, float]) -> list[tuple[str, float]]:
    """The two largest parts."""
    return sorted(((kind, each) for kind, each in seconds.items() if each), key=lambda part: -part[1])[:2]


def _parts(entry: Entry) -> Entry:
    return found if isinstance(found := figure(entry, "time.parts"), dict) else {}


def _percent(amount: float, longest: float) -> float:
    return round(100 * amount / longest, 3) if longest else 0.0
