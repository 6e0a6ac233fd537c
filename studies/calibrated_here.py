"""Training steps on this machine beside what its calibration predicts: docs/calibrate.md's table, made again.

    PYTEST_XDIST_WORKER_COUNT=2 python -m shardmark.calibrate mine.toml
    python -m studies.calibrated_here mine.toml [-k training_step]

The first prediction knows one product, one copy and the defaults of `Reached`; the second all of the file. The median
step counts, without the time that other processes had its core. One thread computes in both commands.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from shardmark.meter.hardware import Hardware, Reached, hardware
from shardmark.meter.plan import Plan
from shardmark.predict.simulation.on_ranks import step_seconds
from shardmark.predict.simulation.predict import predict
from shardmark.ranks.worlds import Worlds
from studies.predicted_here import plans

STEPS = 10


@dataclass(frozen=True)
class Row:
    """One case, in seconds."""

    family: str
    implementation: str
    case: str
    before: float
    after: float
    measured: float

    def __str__(self) -> str:
        seconds = f"{1e3 * self.measured:.1f} | {1e3 * self.before:.1f} | {1e3 * self.after:.1f}"
        errors = f"{self.before / self.measured - 1:+.0%} | {self.after / self.measured - 1:+.0%}"
        return f"| {self.family} | {self.implementation} | {self.case} | {seconds} | {errors} |"


HEAD = (
    "| family | implementation | case | measured ms | before ms | after ms | before | after |\n"
    "|---|---|---|---|---|---|---|---|"
)


def row(worlds: Worlds, plan: Plan, on: Hardware) -> Row:
    """Measure a case's step, and predict it by its device's largest rates and by all that was measured."""
    before = replace(on, name="before", measured={}, reached=Reached())
    steps = predict(plan, on=on, alike=[before]).steps
    [measured] = worlds.get(1).run(step_seconds, plan, STEPS)
    return Row(
        plan.implementation.family,
        plan.implementation.name,
        str(plan.case),
        steps["before"].seconds,
        steps[on.name].seconds,
        median(seconds - waited for seconds, waited in measured),
    )


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m studies.calibrated_here", description=HEAD.partition("\n")[0])
    parser.add_argument("hardware", help="the file that python -m shardmark.calibrate wrote here")
    parser.add_argument("-k", default="", help="only rows with this in their names")
    given = parser.parse_args(arguments)
    os.environ.setdefault("PYTEST_XDIST_WORKER_COUNT", "2")  # one thread
    worlds, on, rows = Worlds("cpu"), hardware(given.hardware), []
    print(HEAD)
    try:
        for plan in plans(1):
            if given.k in f"{plan.implementation.family} {plan.implementation} {plan.case}":
                rows.append(row(worlds, plan, on))
                print(rows[-1], flush=True)
    finally:
        worlds.close()
    print("\n".join(summary(rows)))
    return 0


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """The median error before and after calibration."""
    if rows:
        before, after = (
            median(abs(getattr(row, name) / row.measured - 1) for row in rows) for name in ("before", "after")
        )
        yield f"all: median error {before:.0%} before and {after:.0%} after, of {len(rows)} rows"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
