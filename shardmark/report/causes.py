"""Failures of one target grouped by cause, each with the user's line and the smallest call that shows it."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from keyword import iskeyword
from pathlib import Path
from typing import Any

import torch

from shardmark.api.place import defined_at, shown
from shardmark.api.refusals import Call
from shardmark.api.registry import Implementation, family
from shardmark.report.judgement import PASSED, Check, Verdict
from shardmark.report.outcomes import first_line
from shardmark.text import number_of

HUNG = "shardmark.ranks.deadline.Hung: "
FEW_PASS = 0.1
"""Most checks that pass with a dtype, as a share of those that fail, where the dtype is the cause."""


@dataclass
class Cause:
    """Checks that fail for one reason, in order."""

    checks: list[Check]
    refusable: str | None = None
    """The values of a refusable kind that all of them have and that no passed check has."""
    kind: str = ""

    @property
    def reason(self) -> str:
        return first_line(self.smallest.reason).removeprefix("AssertionError: ").removeprefix(HUNG)

    @property
    def smallest(self) -> Check:
        """The check whose failing call has the fewest elements, among those with a call."""
        with_call = [check for check in self.checks if check.notes.call is not None] or self.checks
        return min(with_call, key=lambda check: check.notes.call.elements if check.notes.call else 0)


def causes(verdict: Verdict) -> list[Cause]:
    """The causes: what may be refused, that of the first failed check, then by the number of checks."""
    failures = verdict.failures
    found = [cause for cause in [_refusable(verdict, failures)] if cause is not None]
    explained = {check.test for cause in found for check in cause.checks}
    groups: dict[str, list[Check]] = defaultdict(list)
    for check in failures:
        if check.test not in explained:
            groups[_key(check)].append(check)
    found += [Cause(checks) for checks in groups.values()]
    first = min((cause.checks[0].place for cause in found), default=0)
    return sorted(found, key=lambda c: (c.refusable is None, c.checks[0].place != first, -len(c.checks)))


def _key(check: Check) -> str:
    """Equal for failures of one cause: the user's line and the error's type, or the reason without its numbers."""
    reason = first_line(check.reason)
    for known in ("expected ValueError", "raised Unsupported"):
        if known in reason:
            return known
    if check.notes.hung:
        return "hung"
    if check.notes.where:
        return f"{check.notes.where} {re.sub(r'[0-9]+', '#', reason.partition(':')[0])}"
    return re.sub(r"[-+.\d]+(e[-+]\d+)?|\(.*?\)|\[.*?\]|'.*?'", "#", reason)


def _refusable(verdict: Verdict, failures: list[Check]) -> Cause | None:
    """The values, such as dtypes, with which nearly nothing passes, while most passes without them, and whose failures
    are seen with them alone."""
    elsewhere = {each.kind for each in verdict.may_refuse if each.elsewhere}
    passed = Counter(f for check in verdict.judged if check.outcome == PASSED for f in check.notes.taken)
    failed = Counter(f for check in failures for f in check.notes.last if f.kind in elsewhere)
    bad = {f for f, count in failed.items() if count > 1 and passed[f] <= FEW_PASS * count}
    kinds = {f.kind for f in bad}
    if not bad or not any(f.kind in kinds for f in passed if f not in bad):
        return None
    others = [check for check in failures if not bad.intersection(check.notes.last)]
    if len(others) > sum(check.outcome == PASSED for check in verdict.judged):  # it is wrong with other values too
        return None
    elsewhere_too = {_key(check) for check in others}
    checks = [c for c in failures if bad.intersection(c.notes.last) and _key(c) not in elsewhere_too]
    if not checks:
        return None
    counts = Counter(f for check in checks for f in check.notes.last if f in bad)
    words = ", ".join(f"{feature.value} ({count})" for feature, count in counts.most_common())
    return Cause(checks, words, next(iter(kinds)))


def lines(implementation: Implementation, verdict: Verdict, most: int | None, options: str = "") -> list[str]:
    """The reasons, each first on a line of its own, with the user's line; the first with a call to paste. All causes,
    or `most` of them."""
    found = causes(verdict)
    failed = f"of {len(verdict.failures)} failed checks"
    printed: list[str] = []
    for i, cause in enumerate(found[:most]):
        printed.append(cause.reason)
        if i == 0 or most is None:
            printed += [f"  {line}" for line in cause.smallest.notes.events]
        count = f"{len(cause.checks)} {failed}"
        if cause.refusable:
            count += f": none passes in {cause.kind} {cause.refusable}"
            count += f". Raise shardmark.api.Unsupported for {cause.kind} that you do not take"
        elif i == 0 or most is None:
            count += f", such as {cause.smallest.name}"
        if i == 0 or cause.smallest.notes.where:
            printed.append(f"  {_place(implementation, cause.smallest)}")
        printed.append(f"  {count}")
        if i == 0:
            printed += [f"  {line}" for line in _again(implementation, cause.smallest, options)]
    if most is not None and (others := found[most:]):
        rest = sum(len(cause.checks) for cause in others)
        printed.append(f"{rest} {failed} have {number_of(len(others), 'other reason')}: -v shows all")
    return printed


def _place(implementation: Implementation, check: Check) -> str:
    """The user's line of the failure, else where the target is defined."""
    if check.notes.where:
        return f"at {check.notes.where}"
    at = defined_at(implementation.target)
    return f"of {shown(*at)}" if at else f"of {implementation.spec}"


def _again(implementation: Implementation, check: Check, options: str) -> list[str]:
    """A snippet that makes the call beside the reference's, or the command that runs the check alone."""
    call = check.notes.call
    if call is not None and any(isinstance(value, tuple) for _, value in call.arguments):
        return ["its call, to paste:", *(f"    {line}" for line in snippet(implementation, call))]
    target = f"{implementation.family}={implementation.spec}"
    return ["to run it alone:", f"    pytest '{check.test}' --impl '{target}'{options}"]


def snippet(implementation: Implementation, call: Call) -> list[str]:
    """Python that makes the call on random inputs, with the target and with its family's reference."""
    owner = family(implementation.family)
    reference = owner.implementations[owner.reference].target
    tensors = [(name, *value) for name, value in call.arguments if isinstance(value, tuple)]
    others = [(name, value) for name, value in call.arguments if not isinstance(value, tuple)]
    source, _, attribute = implementation.spec.rpartition(":")
    lines = ["import torch"]
    if source.endswith(".py"):
        lines = [f"import sys, torch; sys.path.insert(0, {str(Path(source).parent)!r})"]
    module = Path(source).stem if source.endswith(".py") else source
    if source and all(part.isidentifier() and not iskeyword(part) for part in module.split(".")):
        lines.append(f"from {module} import {attribute} as mine")
    elif source:
        lines += ["import importlib", f"mine = importlib.import_module({module!r}).{attribute}"]
    else:
        lines = ["import impl, torch", "from shardmark.api import resolve"]
        lines.append(f"mine = resolve({owner.name!r}, {implementation.spec!r}).adapted")
    lines.append(f"from {reference.__module__} import {reference.__qualname__} as reference")
    by_kind: dict[tuple[object, str], list[str]] = defaultdict(list)
    for name, shape, dtype in tensors:
        by_kind[shape, dtype].append(name)
    for (shape, dtype), names in by_kind.items():
        typed = "" if dtype == "float32" else f", dtype=torch.{dtype}"
        made = f"torch.randint(2, {shape})" if "int" in dtype else f"torch.randn({shape}{typed})"
        several = f"({made} for _ in range({len(names)}))" if len(names) > 1 else made
        lines.append(f"{', '.join(names)} = {several}")
    named = (("mine", implementation.target), ("reference", reference))
    given = ", ".join([*(name for name, *_ in tensors), *(f"{name}={value}" for name, value in others)])
    own, right = (f"{name}{_method_of(target, call.method)}({given})" for name, target in named)
    if isinstance(implementation.target, type) and issubclass(implementation.target, torch.autograd.Function):
        own = f"mine.apply({', '.join([*(name for name, *_ in tensors), *(str(value) for _, value in others)])})"
    return [*lines, f"print({own})", f"print({right})"]


def _method_of(target: Any, method: str) -> str:
    """As in "().rms_norm", of a class of which one is made; empty where the target itself is called."""
    return f"{'()' * isinstance(target, type)}.{method}" if method else ""
