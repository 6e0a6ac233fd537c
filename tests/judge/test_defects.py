"""Each planted defect fails the test that must see it, and no right implementation fails any."""

from collections.abc import Callable
from pathlib import Path

import pytest

from correctness.support.paths import ROOT
from correctness.support.planting import family_of, planted_in
from tests.judge.judging import judge


def _modules(name: str) -> dict[str, str]:
    """The modules of planted implementations whose file's name begins so, by family and file."""
    files = sorted((ROOT / "correctness").glob(f"*/{name}*.py"))
    return {f"{file.parent.name}-{file.stem}": f"correctness.{file.parent.name}.{file.stem}" for file in files}


SEEN = ("failed", "noted")

DEFECTS, RIGHT = _modules("wrong"), _modules("right")

pytestmark = pytest.mark.sweep  # a run of pytest for each family


@pytest.mark.parametrize("file", DEFECTS)
def test_each_defect_fails_the_test_that_must_see_it(
    file: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    family, planted = family_of(DEFECTS[file]), planted_in(DEFECTS[file])
    found = judge(family, planted, DEFECTS[file], tmp_path)
    escaped = []
    for each in planted:
        failed = [o for o in found[each.name] if o.outcome in SEEN and each.caught_by in o.test]
        if failed:
            seen = {"family": family, "cause": each.cause, "defect": each.name}
            record_property("defect", seen | {"test": failed[0].test, "says": failed[0].line})
        else:
            ran = "; ".join(f"{o.test} {o.outcome} {o.line}" for o in found[each.name]) or "no such test"
            escaped.append(f"{each.name} ({each.cause}) passes {each.caught_by}: {ran}")
    record_property("judged", {"family": family, "defects": len(planted), "seen": len(planted) - len(escaped)})
    assert not escaped, "\n".join([f"{len(escaped)} of {len(planted)} defects of {family} escaped:", *escaped])


@pytest.mark.parametrize("file", RIGHT)
def test_no_right_implementation_is_rejected(
    file: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    family, planted = family_of(RIGHT[file]), planted_in(RIGHT[file])
    found = judge(family, planted, RIGHT[file], tmp_path)
    failures = {name: [o for o in outcomes if o.outcome == "failed"] for name, outcomes in found.items()}
    rejected = [f"{name} fails {o.test}: {o.line}" for name, failed in failures.items() for o in failed]
    untried = [name for name, outcomes in found.items() if not any(o.outcome == "passed" for o in outcomes)]
    count = sum(map(bool, failures.values()))
    record_property("judged", {"family": family, "right ones": len(planted), "rejected": count})
    assert not rejected and not untried, "\n".join([*rejected, *(f"{name}: no test ran" for name in untried)])
