"""What a run of contract checks says of one `--impl` target: right, wrong, or not judged.

    attention=mine is right: 323 of 327 contract checks passed, 4 not run
    attention=mine is WRONG: 212 of 230 contract checks passed, 15 failed, 3 not run
    attention=mine is not judged: 21 of 25 contract checks were run, 21 passed

It is right if everything that its contract asks was asked and passed. It may refuse what the contract lists, and each
kind as a whole; a claim that was asked in a refused dtype alone was not asked.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from shardmark.api.refusals import Call, Feature, Ledger, Refusable

RIGHT, WRONG, NOT_JUDGED = "right", "WRONG", "not judged"
PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass(frozen=True)
class Notes:
    """What a check's calls were, as its report carries it; from another process too."""

    taken: tuple[Feature, ...] = ()
    refused: tuple[tuple[tuple[Feature, ...], str], ...] = ()
    """What each refused call had of the refusable kinds, and its arguments in words."""
    last: tuple[Feature, ...] = ()
    call: Call | None = None
    """The last call."""
    unasked: tuple[str, ...] = ()
    where: str | None = None
    """The user's line from which the failure came."""
    hung: bool = False

    @classmethod
    def of(cls, ledger: Ledger, where: str | None, hung: bool) -> Notes:
        refused = tuple((tuple(features), words) for features, words in ledger.refused.items())
        last, call = (tuple(ledger.last[0]), ledger.last[1]) if ledger.last else ((), None)
        return cls(tuple(ledger.taken), refused, last, call, tuple(ledger.unasked), where, hung)

    def saved(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Notes:
        found = json.loads(text)
        found["taken"], found["last"] = _features(found["taken"]), _features(found["last"])
        found["refused"] = tuple((_features(features), words) for features, words in found["refused"])
        if found["call"] is not None:
            given = found["call"]["arguments"]
            found["call"] = Call(tuple((n, (tuple(v[0]), v[1]) if isinstance(v, list) else v) for n, v in given))
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
                also = ", ".join(sorted(map(str, features)))
                why = f"raised Unsupported for {words}: not for a whole kind, as it takes {also} in other calls"
                return Check(check.test, check.place, FAILED, f"{why}. {self.what_may_be()}", check.notes)
        return check

    def what_may_be(self) -> str:
        """The kinds that may be refused, in words."""
        kinds = "; ".join(each.kind for each in self.may_refuse)
        return f"What may be refused, each as a whole: {kinds or 'nothing'}."

    @property
    def failures(self) -> list[Check]:
        return [check for check in self.judged if check.outcome == FAILED]

    @property
    def passed(self) -> int:
        return sum(check.outcome == PASSED for check in self.judged)

    @property
    def total(self) -> int:
        return max(self.collected, len(self.checks))

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
        parts = list(self.left_out)
        if missing := self.total - len(self.checks):
            parts.append(f"{missing} checks: the run ended before them")
        whole = Counter(why for check in self.judged if check.outcome == SKIPPED for why in check.notes.unasked)
        parts += [f"{count} checks: {why}" for why, count in whole.items()]
        some = Counter(why for check in self.judged if check.outcome == PASSED for why in check.notes.unasked)
        parts += [f"a part of {count} checks: {why}" for why, count in some.items()]
        return [*parts, *self._claims_in_refused_values_alone()]

    def _claims_in_refused_values_alone(self) -> Iterator[str]:
        """Claims that only checks in refused dtypes ask, where another dtype would do."""
        elsewhere = {each.kind for each in self.may_refuse if each.elsewhere}
        by_claim: dict[str, list[Check]] = defaultdict(list)
        for check in self.judged:
            by_claim[check.claim].append(check)
        alone: dict[str, list[str]] = defaultdict(list)
        for claim, checks in by_claim.items():
            refusing = [check for check in checks if check.outcome == SKIPPED and check.notes.refused]
            if refusing and not any(check.outcome == PASSED for check in checks):
                kinds = {feature for check in refusing for features, _ in check.notes.refused for feature in features}
                if all(feature.kind in elsewhere for feature in kinds - self._taken()):
                    alone[", ".join(sorted(map(str, kinds - self._taken())))].append(claim.rpartition("::")[2])
        for refused, claims in alone.items():
            yield f"{len(claims)} claims, which are asked in what it refuses alone ({refused}): {', '.join(claims)}"

    def _taken(self) -> set[Feature]:
        return {feature for check in self.checks.values() for feature in check.notes.taken}

    def not_run(self) -> list[str]:
        """Checks that the contract does not ask of this target: how many, and why."""
        reasons: Counter[str] = Counter()
        for check in self.judged:
            if check.outcome == SKIPPED and not check.notes.unasked:
                refused = {f for features, _ in check.notes.refused for f in features} - self._taken()
                reasons[f"it refuses {', '.join(sorted(map(str, refused)))}" if refused else check.reason] += 1
        return [f"not run: {count} because {why}" for why, count in reasons.most_common()]


def from_report(test: str, outcome: str, reason: str, properties: dict[str, Any], place: str, notes: str) -> Check:
    """A check from the properties of its test's report."""
    saved = properties.get(notes)
    return Check(test, properties[place], outcome, reason, Notes.read(saved) if saved else Notes())
