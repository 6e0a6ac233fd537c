"""The verifier of a leaderboard's entries: `python -m perf.verify`."""

import json
import os
from pathlib import Path

import pytest
import torch

from correctness.support.paths import ROOT
from impl.mesh import Decoder, DecoderSize, token_losses
from perf import timed_entry, verify
from perf.timed_entry import Training, light_losses
from shardmark.rows.seal import KEY

ENTRIES = Path(__file__).with_name("entries.py")
SEED = ("--seed", "5")  # the references are then those of every test

REFUSED = {
    "SkipsALayerAtTheTimedSize": "losses: step 0 gives",
    "SkipsALayerAfterTheFirstSteps": "losses: step 6 gives",
    "SkipsOneUpdate": "losses: step 6 gives",
    "SkipsRows": "losses: step 0 gives",
    "RemembersBatches": "losses: step 2 gives",  # which has the batch of step 0
    "RemembersShapes": "losses: step 1 gives",
    "ComputesBefore": "before the first step layers.0.attention.wk.weight is not what model_fn gives",
    "LeavesItToAThread": "step 0 has returned and left a thread at work, which no clock would see",
    "LeavesItToTheNextCall": "changes in the warm-up steps of",
    "LeavesItsBackwardToTheNextCall": "norms: step 0 gives",
    "StopsTheClocks": "it replaces time.",
    "StopsTheJudge": "it replaces Rank.step",
    "HalvesTheLearningRate": "losses: step 1 gives",
    "HalvesItsGradients": "gradients of the last step of",
    "LosesSomeGradients": "gradients of the last step of",
    "Exits": "a rank failed, as said above",
    "Raises": "a rank failed, as said above",
}


@pytest.fixture(autouse=True)
def references_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "train", _train)


_train_anew, _references = verify.train, {}


def _train(training: Training, *rest: object) -> verify.Timed:
    if training.entry is not None:
        return _train_anew(training, *rest)
    if training not in _references:
        _references[training] = _train_anew(training, *rest)
    return _references[training]


def verified(name: str, out: Path, *options: str) -> int:
    arguments = f"{ENTRIES}:{name}", "--no-correctness", "--device=cpu", "--mesh=shard=1", f"--out={out}"
    return verify.main([*arguments, *SEED, *options])


@pytest.mark.parametrize("name", REFUSED)
def test_an_entry_that_does_less_than_a_step_is_refused(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verified(name, tmp_path / "row.json") == verify.REFUSED
    said = " ".join(capsys.readouterr().out.split())
    assert f"{ENTRIES}:{name} is refused: {REFUSED[name]}" in said
    assert not (tmp_path / "row.json").exists(), "a refused entry has no row"


@pytest.mark.parametrize("size", ["tiny", "tiny-bfloat16"])
def test_an_honest_entry_is_accepted_and_sealed(
    size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "row.json"
    monkeypatch.setenv(KEY, "secret")
    assert verified("Honest", out, "--size", size, "--mesh", "shard=2", "--hardware", "b200") == verify.ACCEPTED
    assert KEY not in os.environ, "ranks do not inherit it"
    said, written = " ".join(capsys.readouterr().out.split()), json.loads(out.read_text())
    row = written["row"]
    assert f"ms a step of {size} on shard=2" in said and f"Sealed in {out}." in said
    assert len(row["steps"]) == 5 and len(row["warmup_steps"]) == 3 and len(row["losses"]) == 8
    assert row["seconds"] == pytest.approx((sum(row["steps"]) + row["left_to_reading"]) / 5)
    assert row["tokens_per_second"] == pytest.approx(4 * 64 / row["seconds"])
    assert 0 < row["mfu"] < 1e-3 and row["reference_seconds"] > 0 and min(row["peak_bytes"]) > 0
    assert len(written["files"]["entry"]) == 1 and len(written["files"]["suite"]) > 100
    assert bool(row["not_held"]) == (size == "tiny-bfloat16")
    assert verify.main(["--check", str(out)]) == verify.REFUSED
    monkeypatch.setenv(KEY, "secret")
    assert verify.main(["--check", str(out)]) == verify.ACCEPTED

    row["seconds"] /= 2
    out.write_text(json.dumps(written))
    assert verify.main(["--check", str(out)]) == verify.REFUSED


@pytest.mark.sweep
@pytest.mark.usefixtures("compiler")
def test_a_compiled_entry_is_accepted(tmp_path: Path) -> None:
    out = tmp_path / "row.json"
    assert verified("Compiled", out) == verify.ACCEPTED
    assert len(json.loads(out.read_text())["files"]["entry"]) == 1, "what the compiler writes is no file of the entry's"


def test_tokens_do_not_follow_from_the_seeds_that_ranks_are_told() -> None:
    case = verify.CASES["tiny"]
    one, other = (verify.Steps.drawn(case, 2, 2, seed) for seed in (5, 5 + 2**32))
    assert not torch.equal(one.batches[0], other.batches[0]) and one.weights != other.weights


def test_work_that_is_left_is_in_the_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    read = tmp_path / "read.json"
    assert verified("LeavesItToTheReading", read) == verify.ACCEPTED
    row = json.loads(read.read_text())["row"]
    assert row["left_to_reading"] > 0.3 and 5 * row["seconds"] > sum(row["steps"]) + 0.3
    assert "ms were left to the reading of its parameters, and are counted" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere.py:make"], "nowhere.py:make: an entry is FILE.py:ATTRIBUTE, and there is no such file"),
        ([], "it takes an entry, FILE.py:ATTRIBUTE, or --check ROW.json"),
        ([f"{ENTRIES}:Honest", "--mesh", "shard=0"], "shard is a number of ranks from 1 on, not '0'"),
        ([f"{ENTRIES}:Honest", "--warmups", "1"], "--warmups and --steps are at least 2"),
        ([f"{ENTRIES}:Nobody", "--no-correctness", *SEED], "Nobody"),
        ([f"{ENTRIES}:Honest", "--out", str(ENTRIES)], "there is such a file, or no such folder"),
        (["--check", "no-row.json"], "--check no-row.json: "),
    ],
)
def test_a_users_error_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert verify.main([*arguments]) == verify.USAGE
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("python -m perf.verify: ") and said in line


def test_the_light_reference_is_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed_entry, "CHUNK", 16)
    torch.manual_seed(3)
    model = Decoder(DecoderSize()).double()
    tokens, targets = torch.randint(48, (2, 2, 50)).unbind()
    targets[0, ::3] = -100
    batch = tokens, torch.arange(50).expand(2, -1), targets
    gradients = []
    for losses in (light_losses, token_losses):
        model.zero_grad()
        losses(model, batch).backward()
        gradients.append([p.grad.clone() for p in model.parameters()])
    for light, eager in zip(*gradients, strict=True):
        torch.testing.assert_close(light, eager, rtol=1e-10, atol=1e-12)


@pytest.mark.sweep
def test_what_is_wrong_at_a_small_size_is_not_timed(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    arguments = ["--device", "cpu", "--out", str(tmp_path / "row.json")]
    assert verify.main([f"{ENTRIES}:HalvesTheLearningRate", *arguments]) == 1
    assert "at a small size it is not judged right" in " ".join(capfd.readouterr().out.split())
    assert verify.main([f"{ROOT / 'examples/leaderboard.py'}:make", *arguments]) == verify.ACCEPTED
    assert json.loads((tmp_path / "row.json").read_text())["row"]["correctness"] == "right"
