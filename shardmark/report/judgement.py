"""The verdict of a run of contract checks on one `--impl` target: right, wrong, or not judged.

    attention=mine is right: 323 of 327 contract checks passed, 4 not run
    attention=mine is WRONG: 212 of 230 contract checks passed, 15 failed, 3 not run
    attention=mine is not judged: 21 of 25 contract checks were run, 21 passed

It is right if everything that its contract asks was asked and passed. It may refuse what the contract lists, and each
kind as a whole; a claim that was asked in a refused dtype alone was not asked.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from shardmark.api.refusals import Call, Feature, Ledger, Refusable

RIGHT, WRONG, NOT_JUDGED = "right", "WRONG", "not judged"
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True)
class Notes:
    """The calls of a check, as its report carries them; from another process too."""

    taken: tuple[Feature, ...] = ()
    refused: tuple[tuple[tuple[Feature, ...], str], ...] = ()
    """For each refused call: its values of the refusable kinds, and its arguments in words."""
    last: tuple[Feature, ...] = ()
    call: Call | None = None
    """The last call."""
    unasked: tuple[str, ...] = ()
    where: str | None = None
    """The user's line from which the failure came."""
    hung: bool = False
    events: tuple[str, ...] = ()
    """Events before the failure, each in words."""

    @classmethod
    def of(cls, ledger: Ledger, where: str | None, hung: bool) -> Notes:
        refused = tuple((tuple(features), words) for features, words in ledger.refused.items())
        last, call = (tuple(ledger.last[0]), ledger.last[1]) if ledger.last else ((), None)
        return cls(tuple(ledger.taken), refused, last, call, tuple(ledger.unasked), where, hung, tuple(ledger.events))

    def saved(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Notes:
        found = json.loads(text)
        found["taken"], found["last"] = _features(found["taken"]), _features(found["last"])
        found["refused"] = tuple((_features(features), words) for features, words in found["refused"])
        if found["call"] is not None:
            given = ((n, (tuple(v[0]), v[1]) if isinstance(v, list) else v) for n, v in found["call"]["arguments"])
            found["call"] = Call(tuple(given), found["call"]["method"])
        found["events"] = tuple(found["events"])
        return cls(**found)


def _features(saved: list[dict[str, str]]) -> tuple[Feature, ...]:
    return tuple(Feature(**each) for each in saved)


@dataclass(frozen=True)
class Check:
    """The outcome of one contract check; `place` is its place in the run, in which the most telling come first."""

    test: str
    place: int
    outcome: str
    reason: str = ""
    notes: Notes = field(default_factory=Notes)

    @property
    def name(self) -> str:
        return self.test.rpartition("::")[2]

    @property
    def claim(self) -> str:
        """The test without its parameters."""
        return self.test.partition("[")[0]


@dataclass
class Verdict:
    """Outcomes of one target's contract checks."""

    may_refuse: tuple[Refusable, ...] = ()
    checks: dict[str, Check] = field(default_factory=dict)
    collected: int = 0
    """Checks that the run was to run; 0 where another process collects them."""
    deselected: int = 0
    """Checks that an option such as -k leaves out."""
    left_out: list[str] = field(default_factory=list)
    """Parts that the run was not to ask, and by which option."""
    remarks: dict[str, None] = field(default_factory=dict)

    def add(self, check: Check) -> None:
        """A check counts once; if several of its phases do not pass, the first one counts."""
        self.checks.setdefault(check.test, check)
        self.__dict__.pop("judged", None)

    @cached_property
    def judged(self) -> list[Check]:
        """The checks in order; one whose target refuses what it takes in another call fails."""
        taken = {feature for check in self.checks.values() for feature in check.notes.taken}
        return sorted((self._judged(check, taken) for check in self.checks.values()), key=lambda check: check.place)

    def _judged(self, check: Check, taken: set[Feature]) -> Check:
        if check.outcome == FAILED:
            return check
        for features, words in check.notes.refused:
            if taken.issuperset(features):
                why = f"raised Unsupported for {words}, and takes {in_words(features) or 'others'} elsewhere"
                return Check(check.test, check.place, FAILED, f"{why}. {self.what_may_be()}", check.notes)
        return check

    def what_may_be(self) -> str:
        """The kinds that may be refused, in words."""
        kinds = "; ".join(each.kind for each in self.may_refuse)
        return f"The contract lets it refuse, each as a whole: {kinds or 'nothing'}"

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.judged if check.outcome == FAILED]

    @property
    def passed(self) -> int:
        return sum(check.outcome == PASSED for check in self.judged)

    @property
    def total(self) -> int:
        return max(self.collected, len(self.checks)) + self.deselected

    @property
    def outcome(self) -> str:
        return WRONG if self.failures else RIGHT if self.passed and not self.unasked() else NOT_JUDGED

    def line(self) -> str:
        """The verdict in one line."""
        skipped = len(self.checks) - self.passed - len(self.failures)
        if self.outcome == NOT_JUDGED:
            ran = self.passed
            counts = f"{ran} of {self.total} contract checks were run" + (f", all {ran} passed" if ran else "")
        else:
            counts = f"{self.passed} of {self.total} contract checks passed"
            counts += f", {len(self.failures)} failed" if self.failures else ""
            counts += f", {skipped} not run" if skipped else ""
        return f"is {self.outcome}: {counts}"

    def unasked(self) -> list[str]:
        """Parts that the contract asks and this run did not, and why."""
        return [*self.unrun(), *self.untouched()]

    def unrun(self) -> list[str]:
        """Checks, and parts of checks, that were left out."""
        parts = list(self.left_out)
        if self.deselected:
            parts.append(f"{self.deselected} checks: deselected, as by -k or -m")
        if missing := self.total - self.deselected - len(self.checks):
            parts.append(f"{missing} checks: the run ended before them")
        whole = Counter(why for check in self.judged if check.outcome == SKIPPED for why in check.notes.unasked)
        parts += [f"{count} checks: {why}" for why, count in whole.items()]
        some = Counter(why for check in self.judged if check.outcome == PASSED for why in check.notes.unasked)
        parts += [f"a part of {count} checks: {why}" for why, count in some.items()]
        return parts

    def untouched(self) -> list[str]:
        """Claims that no check asked, as all of them are in refused dtypes or the like."""
        claims = self._claims_in_refused_values_alone()
        shown = ", ".join(claims[:3]) + (f" and {len(claims) - 3} more" if len(claims) > 3 else "")
        return [f"{len(claims)} claims, as all their checks are in what it refuses: {shown}"] if claims else []

    def _claims_in_refused_values_alone(self) -> list[str]:
        """Claims of which every check is in refused dtypes or the like, while other values would do. A claim about a
        value has it in its name, as `test_autocast_leaves_float64_as_it_is` has."""
        elsewhere = {each.kind for each in self.may_refuse if each.elsewhere}
        passed = {check.claim for check in self.judged if check.outcome == PASSED}
        refusing = {
            check.claim: all(f.kind in elsewhere and f.value not in check.claim for f in self._refused(check))
            for check in reversed(self.judged)
            if check.outcome == SKIPPED and self._refused(check) and check.claim not in passed
        }
        return [claim.rpartition("::")[2] for claim, another in reversed(refusing.items()) if another]

    def _refused(self, check: Check) -> set[Feature]:
        """The refused values for which the check was not run."""
        refused = {feature for features, _ in check.notes.refused for feature in features}
        return refused - {feature for each in self.checks.values() for feature in each.notes.taken}

    def not_run(self) -> list[str]:
        """Checks that the contract does not ask of this target: how many, and why."""
        skipped = [check for check in self.judged if check.outcome == SKIPPED and not check.notes.unasked]
        refusing = [check for check in skipped if self._refused(check)]
        refused = in_words({feature for check in refusing for feature in self._refused(check)})
        reasons = Counter(check.reason for check in skipped if not self._refused(check))
        lines = [f"{count} because {why}" for why, count in reasons.most_common()]
        return [
            f"not run: {line}" for line in [f"{len(refusing)} because it refuses {refused}"] * bool(refusing) + lines
        ]


def in_words(features: Iterable[Feature]) -> str:
    """As in "dtypes (float16, float64); fewer heads in k and v than in q"."""
    values: dict[str, list[str]] = defaultdict(list)
    for feature in sorted(features):
        values[feature.kind].append(feature.value)
    return "; ".join(kind if found == [kind] else f"{kind} ({', '.join(found)})" for kind, found in values.items())


def from_report(test: str, outcome: str, reason: str, properties: dict[str, Any], place: str, notes: str) -> Check:
    """A check from the properties of its test's report."""
    saved = properties.get(notes)
    return Check(test, properties[place], outcome, reason, Notes.read(saved) if saved else Notes())
