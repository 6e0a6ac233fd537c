"""The page of published training steps beside predictions that knew nothing of their authors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from studies.published.rules import Row
from studies.published.step_intervals import Judged, holds, in_order, interval, of_others
from studies.published.step_rows import numbered, why_unknown
from studies.published.steps_fit import every_judged, fitted, other_chips

PAGE = Path("docs/published-steps.md")

HEAD = """# Predicted training steps beside published ones

Written by `python -m studies.published.steps_page`, from `perf/published/training_steps.csv`. Each row whose program
can be written (`studies/published/step_rows.py`) is simulated, without a GPU: a Llama or MPT decoder under FSDP1,
FSDP2, HSDP or DDP, or on one GPU, run operator by operator. `python -m studies.published.steps_fit` fits {numbers}
numbers: how much of the data sheet products, attention and links reach by chip, the network, and the pace of kernels
beside a collective. **Each figure here is by numbers that were fitted without any row of its authors**, whose sources
are held out together.

Keep in mind:

- What a source leaves open is filled from its own repository: `SOURCES` in `step_rows.py` lists it. These readings, and
  the choice of the numbers, were made with all rows in view; a row's own authors never move its numbers.
- Six layers, and two micro-batches, are simulated; each more adds the same (`tests/predict/test_published_steps.py`).
- The interval of a row is by other authors' rows on the same chip. The one that predictions show is by all of them.
- Missed: small micro-batches on 40 GB (torch2.md), models of 20 and 77 million parameters and the H200, and one blog
  whose steps take 1.6 times as long as predicted. Only one row is bound by its host, so the host's time for a
  collective is not fitted. A row on an H200 is judged by H100s; predictions for one have the interval of a chip
  without a source.
- Most rows are by one group of authors (MosaicML). Rows near the memory's limit are slower than any simulation says:
  an allocator that runs out frees and waits.

{summary}

## By source, device and regime

"within": rows whose published time lies in their interval.

{tables}

## Every figure

Seconds of a step on each rank.

{rows}

## Not predicted

{unknown}
"""


def page() -> str:
    """The page's text."""
    judged = every_judged()
    tables = [
        _table("source", judged, lambda each: each.row.source),
        _table("authors, held out together", judged, lambda each: each.row.authors),
        _table("device", judged, lambda each: each.row.on.name),
        _table("regime", judged, lambda each: each.step.regime),
    ]
    return HEAD.format(
        numbers=len(fitted()["every"]),
        summary=_summary(judged),
        tables="\n\n".join(tables),
        rows="\n".join([ROWS, *(line_of(each, judged) for each in judged)]),
        unknown=_unknown(),
    )


def _summary(judged: Sequence[Judged]) -> str:
    pairs, right = in_order(judged)
    alike, right_alike = in_order(judged, alike=True)
    held = sum(holds(each, of_others(each, judged)) for each in judged)
    chips = [
        f"{chip.upper()} {low:.2f} to {high:.2f}"
        for chip in dict.fromkeys(each.row.chip for each in judged)
        for low, high in [interval([each for each in judged if each.row.chip == chip])]
    ]
    low, high = interval(other_chips())
    middle, share = median(abs(each.error) for each in judged), held / len(judged)
    return (
        f"{len(judged)} steps of {len({each.row.source for each in judged})} sources: median error "
        f"{100 * middle:.1f}%. "
        f"Intervals by other authors hold {held} of them ({100 * share:.0f}%; they say 90%). Of {pairs} pairs of one "
        f"source that differ by more than 10% in tokens per second, {right} ({100 * right / pairs:.0f}%) are predicted "
        f"in their order; of the {alike} pairs of one model on one device, {right_alike} "
        f"({100 * right_alike / alike:.0f}%). Nine of ten published times lie between these multiples of the "
        f"predicted one: "
        f"{', '.join(chips)}. On a chip without a source: {low:.2f} to {high:.2f}, which is how far A100s lie by the "
        f"numbers of H100s, and H100s by those of A100s."
    )


def _table(what: str, judged: Sequence[Judged], key: Callable[[Judged], str]) -> str:
    lines = [
        f"| {what} | rows | median error | published / predicted, least to most | within |",
        "|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(map(key, judged)):
        own = [each for each in judged if key(each) == name]
        ratios = [each.ratio for each in own]
        held = sum(holds(each, of_others(each, judged)) for each in own)
        middle = 100 * median(abs(each.error) for each in own)
        lines.append(f"| {name} | {len(own)} | {middle:.1f}% | {min(ratios):.2f} to {max(ratios):.2f} | {held} |")
    return "\n".join(lines)


ROWS = """| line | source | GPU | program | published | predicted | error | interval | regime |
|---|---|---|---|---|---|---|---|---|"""


def line_of(each: Judged, judged: Sequence[Judged]) -> str:
    """A row of the page."""
    row, of = each.row, each.row.training
    low, high = (bound * each.step.seconds for bound in of_others(each, judged))
    checkpoints = {0: "", 1: ", checkpoints", 2: ", every second block checkpointed"}[of.checkpoint_every]
    program = (
        f"{of.size.family} {of.size.layers} x {of.size.width}, {of.batch} x {of.length}"
        f"{f' x {of.micro_batches}' if of.micro_batches > 1 else ''}, {of.strategy}"
        f"{f' on {of.ranks}' if of.ranks > 1 else ''}{checkpoints}{' but operators' if of.saves_operators else ''}"
    )
    return (
        f"| {row.line} | {row.source.split(' ')[0]} | {row.on.name} | {program} | {row.seconds:.3f} | "
        f"{each.step.seconds:.3f} | {100 * each.error:+.1f}% | {low:.3f} to {high:.3f}"
        f"{'' if holds(each, of_others(each, judged)) else ' (missed)'} | {each.step.regime} |"
    )


def _unknown() -> str:
    rows: list[tuple[int, Row, str]] = [(line, row, why) for line, row in numbered() if (why := why_unknown(row))]
    counted: dict[tuple[str, str], list[int]] = {}
    for line, row, why in rows:
        counted.setdefault((row["source"], why), []).append(line)
    lines = [f"| {source} | {', '.join(map(str, of))} | {why} |" for (source, why), of in counted.items()]
    return "\n".join(["| source | lines | why |", "|---|---|---|", *lines])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
