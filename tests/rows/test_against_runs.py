"""`--against` several runs: each is compared with, and small changes that add up are one finding."""

import json
from pathlib import Path

import pytest

from tests.support.planted_rows import figures, run
from tests.support.planted_rows import planted as planted

pytest_plugins = ["pytester"]


@pytest.fixture
def history(planted: pytest.Pytester) -> Path:
    """A folder of ten runs, each 0.9% larger than the one before."""
    folder = planted.path / "runs"
    folder.mkdir()
    for i in range(10):
        run(planted, f"--benchmark-json=runs/{i}.json", a=figures(workspace=int(1000 * 1.009**i)))
        output = json.loads((folder / f"{i}.json").read_text())
        (folder / f"{i}.json").write_text(json.dumps({**output, "datetime": f"2026-01-0{i}"}))
    return folder


NOW = figures(workspace=int(1000 * 1.009**10))


def test_the_last_run_alone_does_not_show_it(planted: pytest.Pytester, history: Path) -> None:
    run(planted, "--against=runs/9.json", a=NOW).assert_outcomes(passed=1)


@pytest.mark.parametrize("paths", [["runs"], ["runs/0.json", "runs/9.json"]], ids=["folder", "files"])
def test_ten_small_changes_are_one_finding_since_the_oldest(
    paths: list[str], planted: pytest.Pytester, history: Path
) -> None:
    result = run(planted, *(f"--against={path}" for path in paths), a=NOW)
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(
        [
            "*- against 0.json -*",
            "slower or larger: 1",
            "*1,093 bytes of workspace at the peak, 1,000 in 0.json (+93, +9.3%); by run: *now 1,093",
            "*- against 9.json -*",
            "slower or larger: 0",
        ]
    )


def test_a_slowdown_that_the_peer_shares_is_seen_beside_the_load(planted: pytest.Pytester) -> None:
    run(planted, "--benchmark-json=old.json", a=figures(load=1.0))
    same = run(planted, "--against=old.json", a=figures(load=1.0))
    same.assert_outcomes(passed=1)
    result = run(planted, "--against=old.json", a=figures(load=1 / 1.5))
    result.assert_outcomes(failed=1)
    result.stdout.fnmatch_lines(["*: 1.5*x the time in old.json, beside the calibration load, *"])


def test_a_busy_run_fails_nothing_in_time(planted: pytest.Pytester) -> None:
    run(planted, "--benchmark-json=old.json", a=figures(waited=0.2))
    result = run(planted, "--against=old.json", "--benchmark-json=new.json", a=figures(ratio=2.0))
    assert result.parseoutcomes() == {"undecided": 1}
    (entry,) = json.loads(Path("new.json").read_text())["benchmarks"]
    assert "not judged, as one of the runs waited for cores" in entry["extra_info"]["why"]


def test_rows_that_are_not_guarded_are_named_at_the_start(planted: pytest.Pytester) -> None:
    run(planted, "--benchmark-json=old.json", a=figures(peer=None), b=figures())
    result = run(planted, "--against=old.json", a=figures(peer=None), b=figures())
    result.stdout.fnmatch_lines(
        ["against: old.json, 2 rows of this machine; not guarded in time: 1, test_planted.py::test_row[[]a[]]"]
    )


def test_an_empty_folder_is_one_line(planted: pytest.Pytester) -> None:
    (planted.path / "none").mkdir()
    result = run(planted, "--against=none", a=figures())
    assert result.ret == 4
    result.stderr.fnmatch_lines(["ERROR: --against none: there are no .json files in it"])


def test_one_file_alone_is_updated(planted: pytest.Pytester) -> None:
    result = run(planted, "--against=a.json", "--against=b.json", "--update-baseline", a=figures())
    assert result.ret == 4
    result.stderr.fnmatch_lines(["ERROR: --update-baseline replaces one file: give --against once"])


@pytest.mark.parametrize(
    ("options", "failed"),
    [((), 0), (("--undecided=fail",), 1), (("--largest-slowdown=5%",), 1), (("--largest-slowdown=60%",), 0)],
)
def test_what_is_undecided_fails_where_it_is_to(
    options: tuple[str, ...], failed: int, planted: pytest.Pytester
) -> None:
    run(planted, "--benchmark-json=old.json", a=figures())
    result = run(planted, "--against=old.json", *options, a=figures(noise=[0.8, 1.3] * 60))
    assert result.parseoutcomes().get("failed", 0) == failed and result.ret == failed
    if failed:
        result.stdout.fnmatch_lines(["*slowdowns up to *% are not excluded*"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--largest-slowdown=0.1%", "--largest-slowdown is from 1% to 1000%, not '0.1%'"),
        ("--largest-slowdown=much", "--largest-slowdown is from 1% to 1000%, not 'much'"),
        ("--undecided=maybe", "--undecided is one of pass, fail, not 'maybe'"),
    ],
)
def test_a_bad_value_is_one_line(option: str, message: str, planted: pytest.Pytester) -> None:
    run(planted, "--benchmark-json=old.json", a=figures())
    result = run(planted, "--against=old.json", option, a=figures())
    assert result.ret == 4
    result.stderr.fnmatch_lines([f"ERROR: {message}"])


def test_a_largest_slowdown_needs_something_to_compare_with(planted: pytest.Pytester) -> None:
    result = run(planted, "--largest-slowdown=5%", a=figures())
    assert result.ret == 4
    result.stderr.fnmatch_lines(["ERROR: --largest-slowdown needs --against or --against-ref, *"])
