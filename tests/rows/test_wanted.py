"""`--accept FILE.toml`: wanted changes pass with their reason; what grows beyond them fails all the same."""

import math
from pathlib import Path

import pytest

from shardmark.rows.change import ACCEPTED, WORSE, Change
from shardmark.rows.wanted import accept
from shardmark.verdict.betting import FAIL, PASS, UNDECIDED, Interval
from tests.support.planted_rows import figures, run
from tests.support.planted_rows import planted as planted
from tests.support.project import run_project
from tests.support.repository import commit

pytest_plugins = ["pytester", "tests.support.project"]

GATE = ("--against=old.json", "--accept=accepted.toml")
TABLE = '["*row[a]"]\nmemory = 1.10\nwhy = "a mask"\n'


@pytest.fixture
def gated(planted: pytest.Pytester) -> pytest.Pytester:
    """A project with the file of an earlier run, and one of what is accepted."""
    run(planted, "--benchmark-json=old.json", a=figures(), b=figures())
    (planted.path / "accepted.toml").write_text(TABLE)
    return planted


def test_a_wanted_increase_passes_and_is_listed_with_its_reason(gated: pytest.Pytester) -> None:
    result = run(gated, *GATE, "--report=out.md", a=figures(tensors=4400), b=figures())
    result.assert_outcomes(passed=2)
    assert result.ret == 0
    grown = "4,400 bytes of tensors at the peak, 4,000 in old.json (*); accepted: a mask"
    result.stdout.fnmatch_lines(
        ["slower or larger: 0", "accepted: 1", f"  test_planted.py::test_row[[]a[]]: {grown}", "faster or smaller: 0"]
    )
    text = Path("out.md").read_text()
    assert "**Nothing slower or larger than old.json: 2 rows compared in time, memory and counters; 1 fig" in text
    assert "| bytes of tensors at the peak | 4,000 | 4,400 | +10% |  | a mask |" in text


def test_more_than_is_wanted_or_another_row_fails(gated: pytest.Pytester) -> None:
    result = run(gated, *GATE, a=figures(tensors=4401), b=figures(tensors=4001, counters={"operators": 11}))
    result.assert_outcomes(failed=2)
    more = "4,401 bytes of tensors at the peak, 4,000 in old.json (*); more than the accepted 1.1x"
    result.stdout.fnmatch_lines(["slower or larger: 3", f"*: {more}", "*: 4,001 bytes *", "*: 11 op*", "accepted: 0"])


def test_without_the_option_nothing_is_accepted(gated: pytest.Pytester) -> None:
    result = run(gated, GATE[0], a=figures(tensors=4001), b=figures())
    result.assert_outcomes(failed=1, passed=1)
    assert not [line for line in result.outlines if line.startswith(("accepted:", "--accept"))]


def test_a_pattern_that_matches_no_compared_test_is_named(gated: pytest.Pytester) -> None:
    (gated.path / "accepted.toml").write_text(TABLE + '["*gone*"]\ntime = 1.1\nwhy = "a mask"\n')
    result = run(gated, *GATE, a=figures(), b=figures())
    assert result.ret == 0
    result.stdout.fnmatch_lines(["accepted: 0", '--accept: no compared test matches "[*]gone[*]"'])
    result.stdout.no_fnmatch_line('*matches "*row*')


def exact(now: float, before: float = 1000, verdict: str = FAIL) -> Change:
    return Change(verdict, "bytes", before=before, now=now)


def timed(low: float, high: float, verdict: str = FAIL, not_excluded: float | None = None) -> Change:
    middle = Interval(math.sqrt(low * high), low, high, 0.99)
    return Change(verdict, "time", before=1.0, now=middle.center, interval=middle, not_excluded=not_excluded)


@pytest.mark.parametrize(
    ("change", "factor", "verdict"),
    [
        pytest.param(exact(1100), 1.1, PASS, id="exactly_as_much"),
        pytest.param(exact(1101), 1.1, FAIL, id="one_more"),
        pytest.param(exact(1, before=0), 100.0, FAIL, id="from_none"),
        pytest.param(exact(1, before=0), math.inf, PASS, id="from_none_any"),
        pytest.param(Change(FAIL, "other collectives"), 1.1, PASS, id="without_figures"),
        pytest.param(timed(1.05, 1.09), 1.1, PASS, id="all_within"),
        pytest.param(timed(1.05, 1.15), 1.1, UNDECIDED, id="on_both_sides"),
        pytest.param(timed(1.11, 1.15), 1.1, FAIL, id="all_beyond"),
        pytest.param(timed(1.0, 1.09, UNDECIDED), 1.1, PASS, id="undecided_within"),
        pytest.param(timed(1.0, 1.2, UNDECIDED), 1.1, UNDECIDED, id="undecided_beyond"),
        pytest.param(timed(1.0, 1.09, UNDECIDED, 0.3), 1.1, UNDECIDED, id="a_mean_that_may_be_larger"),
        pytest.param(timed(0.9, 1.0, PASS), 1.1, PASS, id="no_worse"),
    ],
)
def test_only_all_of_a_change_within_the_factor_is_accepted(change: Change, factor: float, verdict: str) -> None:
    found = accept(change, factor, "a mask")
    assert found.verdict == verdict
    worse = change.verdict != PASS
    assert found.outcome == {PASS: ACCEPTED if worse else PASS, FAIL: WORSE, UNDECIDED: UNDECIDED}[verdict]
    assert found.text.startswith(change.text) and ("accepted" in found.text) == worse


CHOSEN = ("--scale=smoke", "-k", "nap and greedy", "--against-ref=before", "--accept=accepted.toml")
LARGER = '["*greedy*"]\nmemory = 1.001\nwhy = "a spare number"\n'


@pytest.fixture
def grown(project: pytest.Pytester) -> Path:
    """The accept file of a project that holds four bytes more than its version "before", whose file is empty."""
    sleeps = project.path / "test_sleeps.py"
    sleeps.write_text(sleeps.read_text().replace("formula(case) // 2", "formula(case) * 3"))
    accepted = project.path / "accepted.toml"
    accepted.write_text("# none\n")
    commit(project.path, tag="before")
    sleeps.write_text(sleeps.read_text().replace("torch.empty(1000)", "torch.empty(1001)"))
    return accepted


@pytest.mark.sweep
def test_beside_another_version_too(project: pytest.Pytester, grown: Path) -> None:
    refused, _ = run_project(project, *CHOSEN)
    refused.assert_outcomes(failed=1)
    grown.write_text(LARGER)
    result, output = run_project(project, *CHOSEN, "--report=out.md")
    assert result.ret == 0 and output["benchmarks"][0]["extra_info"]["verdict"] != "fail"
    result.stdout.fnmatch_lines(["accepted: 1", "*4,004 bytes *, 4,000 in before (*); accepted: a spare number"])
    text = Path("out.md").read_text().splitlines()
    commit_of = output["benchmarks"][0]["extra_info"]["ref"]["commit"][:10]
    assert text[2].startswith(f"**Nothing slower or larger than before ({commit_of}): 1 row compared in time, memory")
    assert any(line.endswith("| 4,000 | 4,004 | +0.1% |  | a spare number |") for line in text)


def test_an_increase_is_accepted_once(project: pytest.Pytester, grown: Path) -> None:
    """A table that the other version has as well accepted an earlier change."""
    grown.write_text(LARGER)
    commit(project.path, tag="merged")
    sleeps = project.path / "test_sleeps.py"
    sleeps.write_text(sleeps.read_text().replace("torch.empty(1001)", "torch.empty(1002)"))
    again = tuple(each.replace("before", "merged") for each in CHOSEN)
    result, _ = run_project(project, *again)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["slower or larger: 1", "accepted: 0", "--accept: *earlier change*: remove it"])
