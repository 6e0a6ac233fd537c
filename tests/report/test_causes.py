"""Failures grouped by cause: a dtype is blamed for what fails in it alone."""

import pytest

from shardmark.api.refusals import Feature, Refusable
from shardmark.report.causes import causes
from shardmark.report.judgement import FAILED, PASSED, Check, Notes, Verdict

HALF, FULL = Feature("dtypes", "float16"), Feature("dtypes", "float32")


def _verdict(*checks: tuple[Feature, str]) -> Verdict:
    """A run of checks, each of a dtype, with the reason for which it fails, if any."""
    verdict = Verdict((Refusable("dtypes", lambda x: None, elsewhere=True),))
    for place, (dtype, reason) in enumerate(checks):
        notes = Notes(taken=(dtype,), last=(dtype,))
        verdict.add(Check(f"test_{place}", place, FAILED if reason else PASSED, reason, notes))
    return verdict


@pytest.mark.parametrize(
    ("reasons", "blamed"),
    [
        (["no such kernel", "no such kernel", ""], "float16 (2)"),
        (["wrong shape", "wrong shape", "", "wrong shape"], None),
        (["no such kernel", "no such kernel", "", "wrong shape"], "float16 (2)"),
    ],
    ids=["in it alone", "in others too", "beside another"],
)
def test_a_dtype_is_blamed_for_failures_that_are_seen_in_it_alone(reasons: list[str], blamed: str | None) -> None:
    found = causes(_verdict(*zip([HALF, HALF, FULL, FULL], reasons, strict=False)))
    assert [cause.refusable for cause in found if cause.refusable] == [blamed] * (blamed is not None)
    assert sum(len(cause.checks) for cause in found) == sum(map(bool, reasons))
