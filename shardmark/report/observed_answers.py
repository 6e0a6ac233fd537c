"""Answers read from what observers and cases add to the rows: hidden communication, stages, losses, kernels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import isclose

from shardmark.api import MB
from shardmark.meter.kernels import MATRIX_PRODUCT
from shardmark.report.answers import Answer
from shardmark.report.ranking import fastest_of, implementation, is_simulated, largest_case, time_over
from shardmark.report.words import called, figure, first_place, is_fastest, sentence, share, time_of, where
from shardmark.rows.columns import Entry, Row
from shardmark.text import mib, number_of
from shardmark.verdict.betting import UNDECIDED


def hides(other: str) -> Answer:
    """The fastest implementation, its time beside `other`'s, and the share of communication that it hides.

    The share is the row's `hidden`, which is measured beside computation and communication alone. An implementation
    that is faster because it sends fewer messages hides nothing, and none is said to.
    """

    def answer(entries: Sequence[Entry]) -> str:
        case = largest_case(entries)
        fastest = fastest_of(case)
        place, hidden = where(fastest.entry, entries), fastest.entry["extra_info"]["time"]["hidden"]
        theirs = next((entry for entry in case if implementation(entry) == other), None)
        if not hidden or theirs is None:
            return sentence(place, is_fastest(fastest, case))
        time = time_of(called(theirs), time_over(case, fastest.entry, theirs))
        return sentence(place, f"{called(fastest.entry)} hides {hidden:.0%} of communication and takes {time}")

    return answer


def fastest_by(field: str) -> Answer:
    """The fastest implementation by that field of the cases, such as "collective": of each of its values at the largest
    case that several implementations have."""

    def answer(entries: Sequence[Entry]) -> str:
        kinds: dict[str, list[Entry]] = {}
        for entry in entries:
            kinds.setdefault(entry["extra_info"]["case"][field], []).append(entry)
        winners: dict[str, list[str]] = {}
        for kind, own in kinds.items():
            case = largest_case(own)
            winners.setdefault(first_place(fastest_of(case), case), []).append(kind.replace("_", "-"))
        return sentence("", "; ".join(f"for {' and '.join(kinds)}, {said}" for said, kinds in winners.items()))

    return answer


def best_bucket(entries: Sequence[Entry]) -> str | None:
    """The bucket size of each wrapper's shortest step, and the size that the model of overhead predicts.

    Steps of two sizes were not timed in turns, and the machine's speed changes between two tests: the shortest step is
    no proof of the best size, except in a simulation.
    """
    is_predicted = is_simulated(entries)
    sizes: dict[str, dict[int, Entry]] = {}
    for entry in entries:
        if (size := entry["extra_info"]["case"].get("bucket_mb")) is not None:
            sizes.setdefault(called(entry), {})[size] = entry
    said = [f"for {wrapper} {_shortest(of, is_predicted)}" for wrapper, of in sizes.items()]
    if said and not is_predicted:
        said.append(f"sizes were not timed in turns, so which is best is {UNDECIDED}")
    models = [row["time"]["model"] for row in rows(entries) if "model" in row["time"]]
    if models:
        said.append(f"by the time of single all-reduces {models[0]['best_bytes'] / MB:.2g} MB should be best")
    return sentence("", "; ".join(said)) if said else None


def _shortest(of: dict[int, Entry], is_predicted: bool) -> str:
    best = min(of, key=lambda size: of[size]["stats"]["median"])
    return f"{best} MB {'is predicted to be best' if is_predicted else 'had the shortest step'}"


def held_while_made(entries: Sequence[Entry]) -> str | None:
    """The peak of a rank while the model is made, on the meta device beside all of it on each rank."""
    peaks = {row["case"]["meta"]: max(s["peak"] for s in row["memory"]["stages"].values()) for row in rows(entries)}
    if len(peaks) < 2:
        return None
    less = share(peaks[True] / peaks[False], "memory")
    return (
        f"With the model made on the meta device a rank holds at most {mib(peaks[True])} MiB, "
        f"{less} of the whole model made on each rank."
    )


def who_trains(entries: Sequence[Entry]) -> str:
    """Which variants train (their loss falls), how far apart the losses are of those that begin alike, and how many
    bytes the others hold beside them."""
    losses = {called(entry): entry["extra_info"]["losses"] for entry in entries}
    held = {called(entry): [*entry["extra_info"]["memory"]["stages"].values()][-1]["live"] for entry in entries}
    falls = [name for name, values in losses.items() if values[-1] < values[0]]
    stays = [name for name in losses if name not in falls]
    if not stays or not falls:
        if len(losses) == 1:
            return f"The loss {'falls' if falls else 'stays'} with {called(entries[0])}."
        return f"The loss falls in {'all' if falls else 'none of the'} {len(losses)} variants."
    more = share(max(held[name] for name in stays) / max(held[name] for name in falls), "memory")
    alike = [losses[name] for name in falls if isclose(losses[name][0], losses[falls[0]][0], rel_tol=1e-4)]
    apart = max(max(step) - min(step) for step in zip(*alike, strict=True))
    said = "the same losses" if apart == 0 else f"losses at most {apart:.1g} apart"
    same = f" ({said} from the same start)" if len(alike) > 1 else ""
    return sentence(
        "",
        f"the loss falls with {', '.join(falls)}{same}; it stays with {', '.join(stays)}, and a rank holds {more} then",
    )


def efficiencies(entries: Sequence[Entry]) -> str:
    """The best efficiency of strong and of weak scaling."""
    best: dict[str, Entry] = {}
    for entry in entries:
        kind = entry["extra_info"]["case"]["kind"]
        best[kind] = max(best.get(kind, entry), entry, key=lambda each: each["extra_info"]["work"]["efficiency"])
    said = []
    for kind, entry in best.items():
        ranks, best_share = entry["extra_info"]["world_size"], entry["extra_info"]["work"]["efficiency"]
        said.append(
            f"{kind} scaling to {number_of(ranks, 'rank')} is at most {best_share:.0%} efficient, with {called(entry)}"
        )
    return sentence("", "; ".join(said))


def largest_kinds(entries: Sequence[Entry]) -> str:
    """The two largest kinds of bytes at the peak."""
    case = largest_case(entries)
    kinds = case[0]["extra_info"]["memory"]["kinds"]["peak"]
    first, second = sorted(kinds, key=lambda kind: kinds[kind], reverse=True)[:2]
    total = sum(kinds.values())
    shares = f"{first} are {kinds[first] / total:.0%} and {second} {kinds[second] / total:.0%} of the peak's memory"
    return sentence(where(case[0], entries), shares)


def largest_parts(entries: Sequence[Entry]) -> str:
    """The two longest phases of the step, and the share of matrix products."""
    case = largest_case(entries)
    row = case[0]["extra_info"]
    parts, phases = row["time"]["parts"], row["kernels"]["phases"].values()
    first, second = sorted(parts, key=lambda part: parts[part], reverse=True)[:2]
    total = sum(parts.values())
    products = sum(phase["categories"][MATRIX_PRODUCT] for phase in phases) / sum(phase["seconds"] for phase in phases)
    shares = f"{first} takes {parts[first] / total:.0%} and {second} {parts[second] / total:.0%} of the step"
    return sentence(where(case[0], entries), f"{shares}; matrix products take {products:.0%} of its kernels' time")


def warmed_up(entries: Sequence[Entry]) -> str:
    """The rounds without warm-ups beside those after the most warm-ups: their mean, and their spread."""
    case = largest_case(entries)
    after = case[0]["extra_info"]["time"]["after_warmups"]
    least, most = min(after, key=int), max(after, key=int)
    cold, warm = after[least], after[most]
    spread = f", and vary {figure(cold['stddev'] / warm['stddev'])} times as much" if warm["stddev"] else ""
    longer = f"rounds after {least} warm-ups take {figure(cold['mean'] / warm['mean'])} times as long as after {most}"
    return sentence(where(case[0], entries), f"{longer}{spread}")


def rows(entries: Iterable[Entry]) -> list[Row]:
    """The entries' rows."""
    return [entry["extra_info"] for entry in entries]
