"""The page of predicted step times beside what others have published."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from statistics import fmean, median

from perf.published import UNITS
from shardmark.meter.hardware import hardware
from shardmark.predict.simulation.rates import WITHIN
from studies.published.rules import Row, why_unknown
from studies.published.time_rows import FILES, UNKNOWN, Compared, compared, repeated, rows

PAGE = Path("docs/published-times.md")

HEAD = """# Predicted step times beside published ones

Written by `python -m studies.published`. Each program was rebuilt from its write-up (`studies/published/steps.py`) and
simulated, without a GPU. `python -m studies.published.fit` fitted two things to one half of the configurations: the
fractions of their data sheets that the devices reach, and the seconds that each write-up's host takes to launch an
operator. All rows of a configuration are in the same half. The other half is held out and judges: its rows have no
"fitted" beside them.

Keep in mind:

- Numbers were fitted to one half alone. But the model's form (two rules for narrow products, sums that batches do not
  share, the search's upper limits, a host for each table), and the parts of programs that a write-up leaves open, were
  chosen with all rows in view.
- Each write-up has its own host: a step that is bound by its host takes another time on yours.
- For several ranks only all-reduces were fitted. The rate of bfloat16 products and the pace of kernels beside a
  collective are from whole training steps ([published-steps.md](published-steps.md)).
- V100 all-reduces over NCCL are not compared with a prediction: 1 MB takes 0.36 s on 2 ranks and 1000 MB 0.42 s. So
  999 MB more take 0.06 s, and most of the 0.36 s is not the all-reduce.

{summary}

{table}

"at least" is the lower bound: the time of the products alone, one after another, at the data sheet's FLOP/s. It is
empty if a time is the host's alone, or a part of a step on several ranks.
"""


def page() -> str:
    """The page's text: each source's rows, and the rows without a prediction, with the reason."""
    by_file = {file: found for file in FILES if (found := compared(file))}
    every = [each for found in by_file.values() for each in found]
    parts = [HEAD.format(summary=_summary(every), table=_by_table(every))]
    for file, found in by_file.items():
        parts.append(f"## {found[0].row['source']}\n")
        stds = {(row["experiment"], row["case"], row["metric"]): row["value"] for row in rows(file)}
        for experiment, of_it in groupby(found, key=lambda each: each.row["experiment"]):
            parts.append(f"### {experiment}\n\n{_table(of_it, stds)}\n")
    parts.append("## Not held to a prediction\n")
    lines = [
        f"| {file} | {row['experiment']} | {row['case']} | {row['metric']} | {row['value']} {row['unit']} | {why} |"
        for file in FILES
        for row, why in _unpredicted(file)
    ]
    parts.append("\n".join(["| file | table | case | what | published | why |", "|---|---|---|---|---|---|", *lines]))
    return "\n".join(parts) + "\n"


def _unpredicted(file: str) -> Iterable[tuple[Row, str]]:
    """Rows that are not in the tables, and why. Standard deviations are in them, beside their means."""
    again = repeated(file)
    for index, row in enumerate(rows(file)):
        why = why_unknown(row, UNKNOWN) or ("the same figure as in a table above" if index in again else "")
        if why and not row["metric"].endswith(" std"):
            yield row, why


def _summary(every: list[Compared]) -> str:
    held, fitted = ([100 * abs(each.error) for each in every if each.fitted == half] for half in (False, True))
    low, high = WITHIN
    return (
        f"Held out, {len(held)} rows: median error {median(held):.1f}%, mean {fmean(held):.1f}%. The fitted half, "
        f"{len(fitted)} rows: median {median(fitted):.1f}%, mean {fmean(fitted):.1f}%. Nine of ten held-out times "
        f"lie between {low:.2f} and {high:.2f} times the predicted one."
    )


def _by_table(every: list[Compared]) -> str:
    lines = [
        "| program and host | GPU | held out | median | mean | fitted | median | mean |",
        "|---|---|---|---|---|---|---|---|",
    ]
    hosts = dict.fromkeys((each.reading.host, each.reading.on) for each in every)
    for host, on in hosts:
        cells = []
        for half in (False, True):
            errors = [
                100 * abs(each.error)
                for each in every
                if (each.reading.host, each.reading.on, each.fitted) == (host, on, half)
            ]
            cells += [f"{len(errors)}", f"{median(errors):.1f}%", f"{fmean(errors):.1f}%"] if errors else ["0", "", ""]
        lines.append(f"| {host} | {hardware(on).name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _table(found: Iterable[Compared], stds: dict[tuple[str, str, str], str]) -> str:
    lines = ["| case | GPU | what | published | predicted | error | at least | |", "|---|---|---|---|---|---|---|---|"]
    for each in found:
        row, unit = each.row, UNITS[each.row["unit"]]
        places = len(row["value"].partition(".")[2])
        std = stds.get((row["experiment"], row["case"], row["metric"].replace(" mean", " std")))
        spread = f" ± {std}" if std is not None and " mean" in row["metric"] else ""
        least = f"{each.at_least / unit:.3g} {row['unit']}" if each.at_least else ""
        lines.append(
            f"| {row['case']} | {hardware(each.reading.on).name} | {row['metric']} | {row['value']}{spread} "
            f"{row['unit']} | {each.predicted / unit:.{places}f} {row['unit']} | {100 * each.error:+.1f}% | {least} | "
            f"{'fitted' if each.fitted else ''} |"
        )
    return "\n".join(lines)
