"""The study of verdicts (studies/verdicts): its step, its neighbours and its page."""

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from shardmark.verdict.betting import FAIL, PASS, UNDECIDED
from studies.verdicts import report
from studies.verdicts.neighbours import NEIGHBOURS, neighbours
from studies.verdicts.planted import changes
from studies.verdicts.project import Step, change, make
from studies.verdicts.runs import STALL, changed, pytest_run

BEFORE = Step(repeated=20, peer=20)


@pytest.mark.parametrize(("slower", "passes"), [(0, 20), (5, 21), (10, 22)])
def test_a_slower_step_does_a_known_share_more(slower: int, passes: int) -> None:
    assert changed(BEFORE, slower) == replace(BEFORE, repeated=passes)


def test_stalls_leave_the_median_as_it_was() -> None:
    assert changed(BEFORE, STALL) == replace(BEFORE, stall_every=20)


def test_each_planted_change_is_another() -> None:
    assert len({step for _, step, _ in changes(BEFORE)}) == len(list(changes(BEFORE))) == 9


@pytest.mark.sweep
def test_the_project_finds_one_more_collective_and_one_more_copy(tmp_path: Path) -> None:
    make(tmp_path, BEFORE)
    change(tmp_path, replace(BEFORE, collectives=5, copies=2))
    status, said, _ = pytest_run(tmp_path, "--against-ref=before", "-k", "mine and 2ranks")
    assert status == 1 and "5 collectives, 4 in before" in said and "1 more: aten::clone" in said, said


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_end_with_their_block(name: str) -> None:
    before = set(multiprocessing.active_children())  # other tests' pools
    with neighbours(name, seed=0):
        assert len(set(multiprocessing.active_children()) - before) == NEIGHBOURS[name][1]
    assert not set(multiprocessing.active_children()) - before


def test_the_page_counts_what_was_judged(tmp_path: Path) -> None:
    folder = tmp_path / "verdicts"
    folder.mkdir()
    ran = {"step": 5, "ranks": 1, "neighbour": "none", "real_time": False, "seconds": 20.0}
    ran |= {"processes": [1.0, 1.01, 1], "means": [1.0, 1.01, 1], "ratio": 1.0, "interval": [0.98, 1.02]}
    lines = [
        ran | {"slower": 0, "verdict": PASS},
        ran | {"slower": 0, "verdict": UNDECIDED, "seconds": 60.0},
        ran | {"slower": 5, "verdict": FAIL, "neighbour": "busy"},
        ran | {"slower": STALL, "verdict": UNDECIDED, "ranks": 2, "real_time": True},
    ]
    (folder / "runs.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    report.write(folder)
    page = (tmp_path / "verdicts.md").read_text()
    assert "0 of 2 runs of equal versions failed." in page
    assert "| 0% | none | 5 | 2 | 0 | 1 | 1 | 40 | 60 |" in page
    assert "| 5% | one or two | 5 | 1 | 1 | 0 | 0 | 20 | 20 |" in page
    assert f"2 ranks, --real-time:\n\n{page.partition('--real-time:')[2].strip().splitlines()[0]}" in page
    assert "| 5 | 1 | none | 2 | 6 | 0.57% to 0.57% |" in page
