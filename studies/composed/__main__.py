"""Judge PyTorch's parallelisms pair by pair, and write docs/composed.md: python -m studies.composed"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from studies.composed.features import AXES, OURS, SCHEDULES, compositions
from studies.composed.judging import Cell, judged

PAGE = Path(__file__).parents[2] / "docs" / "composed.md"
INTRODUCTION = """\
# PyTorch's parallelisms, pair by pair

`python -m studies.composed` trains a decoder of four layers on CPU ranks (torch {version}), two along each axis, as
PyTorch's documentation composes them. It compares gradients and norm with one process, in float64 to 1e-12. On the
diagonal, and beside the name of a pipeline's schedule, each is alone. `fully_shard root` wraps the model alone,
`fully_shard` its layers too. Schedules that are called `our` are carried out by this suite's runner, around PyTorch's
other parallelisms; norms and tied embeddings over all of its stages are `impl/mesh/pipelined.py`'s."""
MARKS = {"right": "yes", "wrong": "**wrong**", "refused": "refused"}


def main() -> None:
    """Print each cell as it is known; with `--only NAME` those of that feature, and no page."""
    parser = argparse.ArgumentParser("python -m studies.composed", description=__doc__)
    parser.add_argument(
        "--only", metavar="NAME", action="append", choices=list(AXES), help="compositions with one of these features"
    )
    only = parser.parse_args().only
    cells = []
    for composition in compositions():
        if only is None or any(each in composition for each in only):
            cells.append(judged(composition))
            print(f"{cells[-1].composition}: {cells[-1].outcome} {cells[-1].says}", flush=True)
    if only is None:
        PAGE.write_text(page(cells))


def page(cells: list[Cell]) -> str:
    """The page: the matrix, and a line for each cell that is not right."""
    known = {frozenset(cell.composition.features): cell for cell in cells}
    down, across = list(AXES), [each for each in AXES if each not in SCHEDULES and each not in OURS]
    lines = [
        *INTRODUCTION.format(version=torch.__version__.partition("+")[0]).splitlines(),
        "",
        "| | " + " | ".join(across) + " |",
        "|---" * (len(across) + 1) + "|",
    ]
    for row in down:
        marks = [MARKS[known[pair].outcome] if (pair := frozenset((row, each))) in known else "" for each in across]
        alone = known.get(frozenset((row,)))
        name = row if row in across or alone is None else f"{row} ({MARKS[alone.outcome]})"
        lines.append(f"| {name} | " + " | ".join(marks) + " |")
    for outcome, title in (("wrong", "Wrong, in silence"), ("refused", "Refused, with an error")):
        found = [cell for cell in cells if cell.outcome == outcome]
        lines += ["", f"## {title}", ""] + [f"- {cell.composition}: {cell.says}" for cell in found]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
