"""A change of one figure of a row, beside the same figure of another run or of another commit."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from shardmark.verdict.accept import KINDS as KINDS
from shardmark.verdict.betting import FAIL, PASS, UNDECIDED, Interval

WORSE, BETTER, ACCEPTED = "slower or larger", "faster or smaller", "accepted"


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
    """In time: the largest slowdown, as a share, that the pairs leave possible; None where one is shown."""
    grown: tuple[str, ...] = ()
    """The parts that make the difference, a line each: "3 more: aten::mul, mine.py:12"."""
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
    return text + "".join(f", {count} {reason}" for reason, count in reasons.most_common())


def number_of_rows(count: int) -> str:
    """As in "1 row" and "2 rows"."""
    return f"{count} row{'s' * (count != 1)}"


def larger_is_worse(what: str, now: float, before: float, baseline_name: str, slack: float = 1.0) -> Change:
    """The change of an exact figure, which may grow by the factor `slack`."""
    text = f"{now:,} {what}, {before:,} in {baseline_name}"
    verdict = FAIL if now > before * slack else PASS
    return Change(verdict, text, better=now * slack < before, figure=what, before=before, now=now)
