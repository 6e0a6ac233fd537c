"""A change of one figure of a row, beside the same figure of another run or of another commit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardmark.verdict.accept import KINDS as KINDS
from shardmark.verdict.betting import FAIL, PASS, UNDECIDED, Interval

WORSE, BETTER, ACCEPTED = "slower or larger", "faster or smaller", "accepted"

OTHER_MACHINE = "on another machine"
"""The reason why a figure that depends on the machine is not compared."""

SMALLEST_PERCENT = 0.0001
"""Differences below this many percent are shown without their percentage."""


@dataclass(frozen=True)
class Change:
    """One figure beside its baseline; the verdict is FAIL where it is worse."""

    verdict: str
    text: str
    """The change in one line, as messages show it."""
    better: bool = False
    figure: str = ""
    """The figure's name: "bytes of tensors at the peak", "operators", "step time over eager's"."""
    before: float | None = None
    now: float | None = None
    interval: Interval | None = None
    """The interval of `now` over `before`; None for an exact figure."""
    not_excluded: float | None = None
    """In time: the largest slowdown, as a share, that the pairs leave possible."""
    grown: tuple[str, ...] = ()
    """The parts that make the difference, a line each: "3 more: aten::mul, mine.py:12"."""
    left_out: str = ""
    """The reason why the figure was not compared; empty where it was."""
    accepted: str = ""
    """The reason why it is wanted, for a worse figure that passes by `--accept`."""

    @property
    def outcome(self) -> str:
        """WORSE, ACCEPTED, BETTER, UNDECIDED, or PASS for a figure that is none of these."""
        if self.accepted:
            return ACCEPTED
        return BETTER if self.better else {FAIL: WORSE}.get(self.verdict, self.verdict)

    @property
    def ratio(self) -> float:
        """The figure now over the one before: infinity from 0; 1 where there are no figures."""
        if self.interval is not None:
            return self.interval.center
        if self.before is None or self.now is None:
            return 1.0
        return self.now / self.before if self.before else math.inf if self.now else 1.0


class Line(str):
    """The text of a change, which knows its change: a test that fails says below it what grew."""

    change: Change

    @classmethod
    def of(cls, change: Change) -> Line:
        line = cls(change.text)
        line.change = change
        return line


ChangesOrReason = list[Change] | str
"""Changes of a row's time, memory or counters; or why these were not compared."""

RowComparison = dict[str, ChangesOrReason]
"""Changes of one row, by kind: "time", "memory" and "counters"."""


def changes_in(found: ChangesOrReason) -> Sequence[Change]:
    """The changes; none where nothing was compared."""
    return () if isinstance(found, str) else found


def count_compared(found: Sequence[ChangesOrReason]) -> str:
    """Say how many rows were compared, how many of those are undecided, and why the others were not compared."""
    reasons = Counter(each for each in found if isinstance(each, str))
    undecided = sum(change.verdict == UNDECIDED for each in found for change in changes_in(each))
    text = f"{number_of_rows(len(found) - reasons.total())} compared"
    text += f", {undecided} undecided" if undecided else ""
    left_out: dict[str, dict[str, None]] = {}
    for change in (change for each in found for change in changes_in(each) if change.left_out):
        left_out.setdefault(change.left_out, {})[change.figure] = None
    text += "".join(f", without {_listed(list(figures))} ({why})" for why, figures in left_out.items())
    return text + "".join(f", {count} {reason}" for reason, count in reasons.most_common())


def number_of_rows(count: int) -> str:
    """As in "1 row" and "2 rows"."""
    return f"{count} row{'s' * (count != 1)}"


def larger_is_worse(what: str, now: float, before: float, baseline_name: str, slack: float = 1.0) -> Change:
    """The change of an exact figure, which may grow by the factor `slack`."""
    text = f"{now:,} {what}, {before:,} in {baseline_name}{difference(now, before)}"
    verdict = FAIL if now > before * slack else PASS
    return Change(verdict, text, better=now * slack < before, figure=what, before=before, now=now)


def not_compared(what: str, why: str) -> Change:
    """A figure that both rows have and that is not compared."""
    return Change(PASS, "", figure=what, left_out=why)


def difference(now: float, before: float) -> str:
    """As in " (+4,096, +0.9%)"; empty where there is none."""
    if now == before:
        return ""
    percent = abs(now / before - 1) * 100 if before else 0.0
    sign = "+" if now > before else "-"
    share = f"{percent:,.0f}" if percent >= 10 else f"{percent:.2g}"
    shown = f", {sign}{share}%" if percent >= SMALLEST_PERCENT else ""
    return f" ({now - before:+,}{shown})"


def _listed(names: Sequence[str]) -> str:
    """As in "operators, kernels and saved bytes"."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))
