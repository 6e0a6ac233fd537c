"""Models by others, as their authors wrote them: a table in full, or one line that says why not.

tox -e models
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from correctness.support.paths import ROOT
from tests.support.runs import environment_of_a_run

OTHERS = Path("tests") / "models" / "others.py"
NEEDS = {
    "gpt2": "transformers",
    "llama": "transformers",
    "qwen3": "transformers",
    "mixtral": "transformers",
    "resnet50": "torchvision",
    "torchvision_vit": "torchvision",
    "timm_vit": "timm",
    "transformer_encoder": "torch",
    "lstm": "torch",
    "unet": "torch",
}
"""The package that each model is from."""
WITHOUT_BLOCKS = {"lstm", "unet"}
"""Models that cannot be checkpointed by block."""
STRATEGIES = {
    "training_step=eager",
    "data_parallel=ddp",
    "sharded_optimizer=zero_redundancy",
    "fsdp=fsdp1",
    "fsdp=fsdp2",
    "fsdp=fsdp2_kept",
}


def _predicted(model: str, package: str, out: Path, *more: str) -> list[dict[str, object]]:
    """The outcomes that `python -m shardmark.predict` writes, if that package is there."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: tox -e models installs it")
    command = ["-m", "shardmark.predict", f"{OTHERS}:{model}", "--hardware", "h100-80gb", "--own-batch", "--json", out]
    done = subprocess.run(
        [sys.executable, *command, *more], cwd=ROOT, env=environment_of_a_run(), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    outcomes: list[dict[str, object]] = json.loads(out.read_text())["outcomes"]
    return outcomes


@pytest.mark.sweep
@pytest.mark.parametrize("model", NEEDS)
def test_a_model_by_others_gets_its_table(model: str, tmp_path: Path) -> None:
    outcomes = _predicted(model, NEEDS[model], tmp_path / "out.json", "--ranks", "2")
    more = ("", " + checkpointing") if model not in WITHOUT_BLOCKS else ("",)
    expected = {name + each + dtype for name in STRATEGIES for each in more for dtype in ("", " + bfloat16")}
    assert {each["strategy"] for each in outcomes} == expected and len(outcomes) == len(expected)
    assert all(each["tensors"] and each["steps"] for each in outcomes), [each.get("reason") for each in outcomes]


@pytest.mark.sweep
@pytest.mark.parametrize("optimizer", ["torchao.optim.AdamW8bit", "bitsandbytes.optim.AdamW8bit"])
def test_a_state_of_8_bits_takes_a_quarter(optimizer: str, tmp_path: Path) -> None:
    """Two bytes for each parameter in place of eight, and two scales for each block of 256."""
    package, states = optimizer.partition(".")[0], []
    for each in ("adamw", optimizer):
        outcomes = _predicted("feed_forward", package, tmp_path / "out.json", "--ranks", "2", "--optimizer", each)
        (eager,) = (outcome for outcome in outcomes if outcome["strategy"] == "training_step=eager")
        assert eager["steps"]
        states.append(eager["before_step"])
    parameters = json.loads((tmp_path / "out.json").read_text())["model"]["parameters"]
    assert (states[0] - states[1]) / parameters == pytest.approx(8 - 2 - 2 * 4 / 256, abs=0.02)


@pytest.mark.sweep
def test_llama_8b_fits_on_eight_h100s_by_fsdp(tmp_path: Path) -> None:
    outcomes = _predicted("llama_8b", "transformers", tmp_path / "out.json", "--ranks", "8")
    fits = {each["strategy"]: each["fits"] for each in outcomes}
    assert fits["fsdp=fsdp2 + checkpointing"] and not fits["data_parallel=ddp"]
