"""Answers read from what observers and cases add to the rows: hidden communication, stages, losses, kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shardmark.api import MB
from shardmark.meter.kernels import MATRIX_PRODUCT
from shardmark.report.answers import Answer, at, fastest_and_smallest, largest_case
from shardmark.report.ranking import beside, fastest_of, implementation, median_seconds, time_beside, times
from shardmark.rows.columns import Entry, Row
from shardmark.text import mib
from shardmark.verdict.betting import UNDECIDED


def hides(other: str) -> Answer:
    """The fastest implementation, its time beside `other`'s, and the share of communication that it hides.

    The share is the row's `hidden`, which is measured beside computation and communication alone. An implementation
    that is faster because it sends fewer messages hides nothing, and none is said to.
    """

    def answer(entries: Sequence[Entry]) -> str:
        case = largest_case(entries)
        fastest = fastest_of(case)
        name, hidden = implementation(fastest.entry), fastest.entry["extra_info"]["time"]["hidden"]
        theirs = _entry_of(case, other)
        if not hidden or theirs is None:
            return at(entries, case) + str(fastest)
        time = beside(time_beside(case, fastest.entry, theirs), other)
        return f"{at(entries, case)}{name} hides {hidden:.0%} of communication, {time}"

    return answer


def _entry_of(case: Sequence[Entry], name: str) -> Entry | None:
    return next((entry for entry in case if implementation(entry) == name), None)


def fastest_by_collective(entries: Sequence[Entry]) -> str:
    """The fastest implementation of each collective, at its largest size that several implementations have."""
    kinds: dict[str, list[Entry]] = {}
    for entry in entries:
        kinds.setdefault(entry["extra_info"]["case"]["collective"], []).append(entry)
    winners: dict[str, list[str]] = {}
    for kind, own in kinds.items():
        fastest = fastest_of(largest_case(own))
        winners.setdefault(UNDECIDED if fastest.rivals else implementation(fastest.entry), []).append(kind)
    return "; ".join(f"{name}: {', '.join(kinds)}" for name, kinds in winners.items())


def best_bucket(entries: Sequence[Entry]) -> str | None:
    """The bucket size of each wrapper's shortest step, and the size that the model of overhead predicts."""
    sizes: dict[str, dict[int, Entry]] = {}
    for entry in entries:
        if (size := entry["extra_info"]["case"].get("bucket_mb")) is not None:
            sizes.setdefault(implementation(entry), {})[size] = entry
    said = [f"{wrapper} {_best_size(of)}" for wrapper, of in sizes.items()]
    models = [row["time"]["model"] for row in rows(entries) if "model" in row["time"]]
    said += [f"model {models[0]['best_bytes'] / MB:.2g} MB"] if models else []
    return ", ".join(said) or None


def _best_size(of: dict[int, Entry]) -> str:
    seconds = {size: median_seconds(entry) for size, entry in of.items()}
    best = min(seconds, key=lambda size: seconds[size].mid)
    tied = sorted(size for size, span in seconds.items() if span.low <= seconds[best].high)
    return UNDECIDED if len(tied) == len(seconds) > 1 else f"{' or '.join(map(str, tied))} MB"


def fastest_and_smallest_rung(entries: Sequence[Entry]) -> str | None:
    """The fastest step and the one of fewest bytes, among steps of one model with the same options.

    A rung's id begins with its step; without that part, rungs that differ in the step alone are one case.
    """
    return fastest_and_smallest([_without_step(entry) for entry in entries])


def _without_step(entry: Entry) -> Entry:
    row, case = entry["extra_info"], entry["extra_info"]["case"]
    return {**entry, "extra_info": {**row, "case": {**case, "id": case["id"].removeprefix(f"{case['step']}-")}}}


def held_while_made(entries: Sequence[Entry]) -> str | None:
    """The peak of a rank while the model is made, on the meta device beside all of it on each rank."""
    peaks = {row["case"]["meta"]: max(s["peak"] for s in row["memory"]["stages"].values()) for row in rows(entries)}
    if len(peaks) < 2:
        return None
    return f"made on meta at most {mib(peaks[True])} MiB, {times(peaks[True] / peaks[False])} made whole"


def who_trains(entries: Sequence[Entry]) -> str:
    """Which variants train (their loss falls), and how many bytes the others hold beside them."""
    losses = {row["implementation"]: row["losses"] for row in rows(entries)}
    held = {row["implementation"]: list(row["memory"]["stages"].values())[-1]["live"] for row in rows(entries)}
    falls = [name for name, values in losses.items() if values[-1] < values[0]]
    stays = [name for name in losses if name not in falls]
    if not stays or not falls:
        return f"{'all' if falls else 'none'} of {len(losses)} train"
    more = max(held[name] for name in stays) / max(held[name] for name in falls)
    return f"made {' and '.join(stays)} nothing trains, {times(more)} held; {len(falls)} others train"


def efficiencies(entries: Sequence[Entry]) -> str:
    """The best efficiency of strong and of weak scaling."""
    best: dict[str, tuple[float, str]] = {}
    for row in rows(entries):
        kind = row["case"]["kind"]
        best[kind] = max(best.get(kind, (0.0, "")), (row["work"]["efficiency"], row["implementation"]))
    return ", ".join(f"{kind} {value:.0%} with {name}" for kind, (value, name) in best.items())


def largest_kinds(entries: Sequence[Entry]) -> str:
    """The two largest kinds of bytes at the peak."""
    case = largest_case(entries)
    kinds = case[0]["extra_info"]["memory"]["kinds"]["peak"]
    first, second = sorted(kinds, key=lambda kind: kinds[kind], reverse=True)[:2]
    total = sum(kinds.values())
    return f"{at(entries, case)}{first} {kinds[first] / total:.0%}, {second} {kinds[second] / total:.0%} of the peak"


def largest_parts(entries: Sequence[Entry]) -> str:
    """The two longest phases of the step, and the share of matrix products."""
    case = largest_case(entries)
    row = case[0]["extra_info"]
    parts, phases = row["time"]["parts"], row["kernels"]["phases"].values()
    first, second = sorted(parts, key=lambda part: parts[part], reverse=True)[:2]
    total = sum(parts.values())
    products = sum(phase["categories"][MATRIX_PRODUCT] for phase in phases) / sum(phase["seconds"] for phase in phases)
    shares = f"{first} {parts[first] / total:.0%}, {second} {parts[second] / total:.0%}"
    return f"{at(entries, case)}{shares}; matrix products {products:.0%}"


def warmed_up(entries: Sequence[Entry]) -> str:
    """The rounds without warm-ups beside those after the most warm-ups: their mean, and their spread."""
    case = largest_case(entries)
    after = case[0]["extra_info"]["time"]["after_warmups"]
    cold, warm = (after[count] for count in (min(after, key=int), max(after, key=int)))
    spread = f", {cold['stddev'] / warm['stddev']:.2g}x the spread" if warm["stddev"] else ""
    return f"{at(entries, case)}rounds without {times(cold['mean'] / warm['mean'])} as long{spread}"


def rows(entries: Iterable[Entry]) -> list[Row]:
    """The entries' rows."""
    return [entry["extra_info"] for entry in entries]
