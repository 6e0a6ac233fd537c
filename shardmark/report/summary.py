"""Summary of a run: where it ran, how many rows, what failed, goals, and the answer to each question.

It is made from a run that is ending or from its file; the terminal, the page and the Markdown show it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from shardmark.meter.disturbances import NOTED, THROTTLED, WAITED, in_words
from shardmark.report.outcomes import Outcomes
from shardmark.report.questions import Questions
from shardmark.report.words import called_peer, share
from shardmark.rows.columns import Entry, goal_outcomes
from shardmark.rows.reader import entries_of
from shardmark.text import number_of
from shardmark.verdict.betting import FAIL, MISSED, REACHED, UNDECIDED

BUSY = 1 / 3
"""The machine was busy if more than this share of the rows waited for a core."""


@dataclass(frozen=True)
class Summary:
    """A run's rows, questions, outcomes and `machine_info`; `date` is known of a saved run."""

    entries: list[Entry]
    questions: Questions
    outcomes: Outcomes
    machine: dict[str, Any]
    date: str = ""
    has_outcomes: bool = True
    """Whether it is known how each test ended; otherwise only of the rows."""
    lacks_rows: bool = False
    """Whether rows are not in the file that was asked for."""

    @classmethod
    def of(cls, output: Entry) -> Summary:
        """From a run's file (`shardmark.rows.reader`). A run that was killed has rows, but no outcomes."""
        entries = entries_of(output)
        if "outcomes" in output:
            outcomes = Outcomes.of(output["outcomes"])
        else:
            rows = {entry["fullname"]: entry["extra_info"] for entry in entries}
            failed = {test: row.get("why") or FAIL for test, row in rows.items() if row["verdict"] == FAIL}
            left_open = {test: row.get("why") or UNDECIDED for test, row in rows.items() if row["verdict"] == UNDECIDED}
            passed = {entry["fullname"] for entry in entries if entry["stats"]} - failed.keys() - left_open.keys()
            outcomes = Outcomes(passed, failed, left_open)
        questions, date = Questions.of(output.get("questions", ())), str(output.get("datetime") or "")[:10]
        return cls(entries, questions, outcomes, output["machine_info"], date, "outcomes" in output)

    def where(self) -> str:
        """The machine in one line."""
        info = self.machine
        parts = [
            *([", ".join(info["gpus"])] if info.get("gpus") else []),
            str((info.get("cpu") or {}).get("brand_raw") or info.get("machine") or "a processor without a name"),
            *(number_of(info[f"{each}s"], each) for each in ("core", "thread") if info.get(f"{each}s")),
            *([info["scheduling"]] if info.get("scheduling") else []),
            f"torch {info.get('torch')}",
        ]
        return ", ".join(parts)

    def what(self) -> str:
        """Number of rows, scale, ranks and link, and how the tests ended, in one line."""
        rows = [entry["extra_info"] for entry in self.entries]
        scales = " and ".join(dict.fromkeys(row["scale"] for row in rows))
        ranks = sorted({row["world_size"] for row in rows})
        links = {row["link"] for row in rows} - {None}
        text = f"{number_of(len(rows), 'row')} at {scales} scale on {_in_words(ranks)}"
        text += f", hosts joined at {', '.join(sorted(links))}" if links else ""
        hardware = {row.get("hardware") for row in rows} - {None}
        text += f", predicted for {' and '.join(sorted(hardware))}" if hardware else ""
        return f"{text}: {counted}" if (counted := self.outcomes.counted()) else text

    def busy(self) -> str | None:
        """A line if many rows waited for a core: their times are longer and their intervals wider. None otherwise."""
        machines = [entry["extra_info"]["time"].get("machine", {}) for entry in self.entries if entry["stats"]]
        waited = sum(machine.get(WAITED, 0.0) >= NOTED for machine in machines)
        if waited <= BUSY * len(machines):
            return None
        return f"the machine was busy: {waited} of {len(machines)} rows waited for a core"

    def throttled(self) -> str | None:
        """The rows whose GPU's clocks were lowered by power or heat, each with its words; None without any."""
        found = [
            f"{self.name(entry['fullname'])}: {in_words(lowered)}"
            for entry in self.entries
            if (lowered := _lowered(entry["extra_info"]["time"].get("machine", {})))
        ]
        if not found:
            return None
        others = f"; and {number_of(len(found) - 1, 'other row')}" if len(found) > 1 else ""
        return f"GPUs were throttled: {found[0]}{others}"

    def name(self, test: str) -> str:
        """A test's implementation and case; for a test without a row, its own name."""
        for entry in self.entries:
            if entry["fullname"] == test:
                row = entry["extra_info"]
                return f"{row['implementation']} {row['case']['id']}"
        return test.rpartition("/")[2]

    def goals(self) -> str | None:
        """As in "goals: 3 reached, 1 missed"; None without goals."""
        counts = Counter(outcome for entry in self.entries for _, outcome in goal_outcomes(entry["extra_info"]))
        shown = ", ".join(f"{counts[outcome]} {outcome}" for outcome in (REACHED, MISSED, UNDECIDED) if counts[outcome])
        return f"goals: {shown}" if shown else None

    def missed(self) -> Iterator[tuple[str, str]]:
        """Each row that misses a goal: its name, and the figure beside the goal."""
        for entry in self.entries:
            time, limit = entry["extra_info"]["time"], entry["extra_info"]["limit"]
            if time.get("outcome") == MISSED:
                yield (
                    self.name(entry["fullname"]),
                    f"{share(time['ratio'], 'time')} of {called_peer(entry)}, goal {time['goal']:.3g}",
                )
            for figure, goal in limit.get("goals", {}).items():
                if goal["outcome"] == MISSED:
                    yield self.name(entry["fullname"]), f"{figure} {limit[figure]:.0%}, goal {goal['goal']:.0%}"


def _lowered(machine: dict[str, float]) -> dict[str, float]:
    return {name: machine[name] for name in THROTTLED if name in machine}


def _in_words(ranks: list[int]) -> str:
    *others, last = ranks
    words = f"{', '.join(map(str, others))} and {last}" if others else f"{last}"
    return f"{words} rank{'s' * (last > 1)}"
