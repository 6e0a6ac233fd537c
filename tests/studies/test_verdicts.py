"""The study of verdicts (studies/verdicts): its steps, its neighbours, and its judgements of recordings."""

import json
import multiprocessing
import random
from pathlib import Path

import pytest

from shardmark.verdict.betting import FAIL, PASS
from studies.verdicts import summary
from studies.verdicts.neighbours import NEIGHBOURS, neighbours
from studies.verdicts.steps import PEER, REPETITIONS, SLOWER, Repeated, Steps


@pytest.mark.parametrize("slower", REPETITIONS)
def test_one_step_does_a_known_share_more(slower: int) -> None:
    mine, peers = (Repeated(each, Steps(slower, width=8), "cpu").repetitions for each in (SLOWER, PEER))
    assert 100 * (mine / peers - 1) == pytest.approx(slower, abs=0.04)


@pytest.mark.parametrize(("slower", "verdict"), [(0.0, PASS), (0.05, FAIL)])
def test_a_recording_is_judged_by_the_share_that_is_added(slower: float, verdict: str) -> None:
    generator = random.Random(0)
    series = [0.02 * generator.uniform(0.97, 1.03) for _ in range(2000)]
    judged, seconds = summary.replayed(series, slower, generator)
    assert judged == verdict and 0 < seconds < 30


def test_a_recording_that_ends_is_undecided() -> None:
    assert summary.replayed([0.02] * 20, 0.05, random.Random(0))[0] == "undecided"


@pytest.mark.parametrize("name", NEIGHBOURS)
def test_neighbours_end_with_their_block(name: str) -> None:
    before = set(multiprocessing.active_children())  # other tests' pools
    with neighbours(name, seed=0):
        assert len(set(multiprocessing.active_children()) - before) == NEIGHBOURS[name][1]
    assert not set(multiprocessing.active_children()) - before


def test_the_page_counts_what_was_judged(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="requirements-docs.txt")
    folder = tmp_path / "verdicts"
    folder.mkdir()
    judged = {"neighbour": "busy", "ranks": 1, "scheduling": "", "slower": 0, "verdict": FAIL, "seconds": 1.0}
    lines = [judged, judged | {"verdict": PASS}, judged | {"slower": 3, "scheduling": "SCHED_RR"}]
    (folder / "judgements.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    summary.write(folder)
    page = (tmp_path / "verdicts.md").read_text()
    assert "1 of 2 judgements of equal steps failed." in page
    in_turns, _, in_real_time = page.partition("One rank in real time:")
    assert "One rank:" in in_turns and "2 ranks" not in page
    assert "| busy | 0% | 2 | 50.0% | 0.0% | 50.0% | 1 | 1 |" in in_turns
    assert "| busy | 3% | 1 | 100.0% | 0.0% | 0.0% | 1 | 1 |" in in_real_time
    assert (tmp_path / "verdicts.svg").exists()
