"""`python -m shardmark.predict`: what of a user's own model fits, what would make it fit, and bad input in one line."""

import ast
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from correctness.support.paths import ROOT
from shardmark.api.own_model import OwnModelCase, resized, size_of
from shardmark.api.registry import FAMILIES, Unsupported, resolve
from shardmark.meter.hardware import CONTEXT, hardware
from shardmark.predict.simulation.caching_allocator import MIB
from shardmark.predict.simulation.communicator import communicator_bytes, room
from shardmark.predict.simulation.rates import RATIO_WITHIN, WITHIN
from shardmark.predict.what_fits.advice import largest, place
from shardmark.predict.what_fits.best_batch import MOST_PROBES, MOST_SIZE, best_batch
from shardmark.predict.what_fits.command import _implementations, _strategies, main
from shardmark.predict.what_fits.outcome import Outcome
from shardmark.predict.what_fits.prediction import (
    ModelFacts,
    Prediction,
    Refused,
    StepTime,
    Strategy,
    followed,
    predicted,
)
from shardmark.predict.what_fits.table import is_undecided, lines
from tests.support import own_models
from tests.support.own_models import WIDTH

SPEC = str(Path(own_models.__file__))
H100 = hardware("h100-80gb")
CASE = OwnModelCase(f"{SPEC}:make", "own.make", "float32", 0, 0, ranks=4)
MODEL = ModelFacts(replace(CASE, flops=10**15), (32, WIDTH))
FSDP2 = Strategy(resolve("fsdp", "fsdp2"))


def outcome(found: Prediction | Refused, ranks: int = 1, batch: int | None = 32) -> Outcome:
    return Outcome(FSDP2, ranks, H100, MODEL, found, batch)


def prediction(reserved: int, seconds: float = 1.0, at_most: int = 0, before: int = 0) -> Prediction:
    step = StepTime(seconds, 0.0, (0.75 * seconds, 1.52 * seconds), 1e15)
    return Prediction(reserved, reserved, max(reserved, at_most), before, 0, {"h100-80gb": step})


def device(path: Path, nbytes: int) -> str:
    """An H100 that has so many bytes beside the context's, as a file."""
    path.write_text(
        f"device = 'cuda'\ncapability = [9, 0]\nmemory_bytes = {CONTEXT + nbytes}\nblas_workspace_bytes = 33_554_432\n"
        "flops = { float32 = 1.0 }\nbandwidth = 1.0\nsm_count = 132\nlink = 1.0\nlatency = 1.0\ndevices_per_node = 1\n"
        "network = 1.0\nnetwork_latency = 1.0\n"
    )
    return str(path)


@pytest.mark.parametrize("limit", [1, 2, 7, 32, 1000, MOST_SIZE])
@pytest.mark.parametrize("start", [1, 32, 4096])
def test_the_largest_number_that_fits_is_found(limit: int, start: int) -> None:
    asked: list[int] = []

    def excess(rows: int) -> int:
        asked.append(rows)
        return rows**2 // 1000 + 5 * rows - (limit**2 // 1000 + 5 * limit)

    assert largest(excess, start) == limit and len(asked) == len(set(asked)) <= 40


def test_no_number_may_fit() -> None:
    assert largest(lambda rows: rows, 32) == 0


def test_a_batch_takes_another_length_and_keeps_the_rest() -> None:
    batch = ({"x": torch.arange(6.0).reshape(3, 2)}, torch.arange(3), torch.tensor(7), "word")
    [x, y, scalar, word] = resized(batch, 0, 5)
    assert x["x"].shape == (5, 2) and y.tolist() == [0, 1, 2, 0, 1] and scalar == 7 and word == "word"
    assert y.untyped_storage().nbytes() == y.nbytes and size_of(resized(batch, 0, 2), 0) == 2
    [x, y, *_] = resized(batch, 1, 3)
    assert x["x"].tolist() == [[0, 1, 0], [2, 3, 2], [4, 5, 4]] and y.tolist() == [0, 1, 2]
    with pytest.raises(Unsupported, match=r"its batch has no one length: .* first .* \[2, 3\]"):
        size_of((torch.ones(2), torch.ones(3)), 0)


def test_a_prediction_reads_no_more_of_the_hardware_than_its_rules() -> None:
    """Devices that agree in those share it: all else may be anything. Times are each one's own."""
    rates = dict.fromkeys(("bandwidth", "link", "latency", "network"), 1.0)
    other = replace(H100, name="slow", memory_bytes=1, flops={"float32": 1.0}, **rates)
    assert other.rules == H100.rules != hardware("a100-80gb").rules
    alone, both = predicted(FSDP2, CASE, other), predicted(FSDP2, CASE, H100, [other])
    assert isinstance(alone, Prediction) and isinstance(both, Prediction)
    assert both == replace(alone, steps=both.steps)
    assert both.steps["slow"].seconds == pytest.approx(alone.steps["slow"].seconds)
    assert both.steps["slow"].seconds > 1e9 * both.steps["h100-80gb"].seconds > 0


def test_the_fastest_that_fits_comes_first() -> None:
    fast, slow, large = prediction(1), prediction(1, 3.0), prediction(2**50, 0.5)
    found = [outcome(each, ranks) for ranks, each in ((2, slow), (1, large), (1, fast), (8, slow))]
    placed = sorted(found, key=place)
    assert [(each.ranks, each.found) for each in placed] == [(8, slow), (1, fast), (2, slow), (1, large)]
    table = "\n".join(lines(MODEL, placed))
    assert "3,000" in table and "85.3" in table  # 8 ranks of 32 rows in 3 s
    assert "2,250-4,560" in table  # the interval
    assert "100.0%" in table and "33.3%" in table  # MFU of 1e15 FLOPs at 1e15 FLOP/s
    widest = replace(placed[0], strategy=Strategy(resolve("sharded_optimizer", "zero_redundancy"), checkpointed=True))
    assert max(map(len, lines(MODEL, [widest], 80))) <= 80


def test_what_ratios_cannot_tell_apart_is_undecided() -> None:
    first, near, far = (outcome(prediction(1, seconds)) for seconds in (1.0, RATIO_WITHIN - 0.01, RATIO_WITHIN + 0.01))
    assert is_undecided(near, first) and not is_undecided(far, first) and not is_undecided(first, first)
    assert WITHIN[1] / WITHIN[0] > RATIO_WITHIN  # on one device, ratios are known better than seconds
    table = "\n".join(lines(MODEL, [first, near, far]))
    assert table.count("?\x20") == 2 and "? Undecided: within a factor of 1.45" in table


def test_small_steps_have_digits() -> None:
    tiny = outcome(prediction(9 * 2**20, 0.00042))
    table = "\n".join(lines(MODEL, [tiny]))
    assert re.search(r" 0\.4 +0\.3-0\.6 +0\.009 ", table), table


@pytest.mark.parametrize("limit", [0, 1, 3, 32, 47, 1000])
@pytest.mark.parametrize("own", [1, 4, 32])
def test_the_best_batch_is_the_largest_where_more_rows_take_less_time_each(limit: int, own: int) -> None:
    """Up to 64 rows, and to 3% from there on. Reserved memory has a jump that no line has. The result is a prediction
    that fits."""
    asked: list[int] = []
    row, fixed = 2**20, room(H100) // 2

    def predict(rows: int) -> Outcome:
        asked.append(rows)
        spare = room(H100) - fixed - limit * row - row // 2
        return outcome(prediction(fixed + rows * row + spare + 3 * (rows > 16), 0.1 + rows, before=fixed), 1, rows)

    best = best_batch(predict, own)
    assert len(asked) == len(set(asked)) <= MOST_PROBES + 1
    assert best.fits == (limit > 0) and best.batch in asked and best.larger is None
    assert best.batch is not None and limit - limit // 32 * (limit > 64) <= best.batch <= max(limit, 1)
    assert best.largest_batch == (best.batch if limit else None)


def test_the_search_goes_on_where_memory_grows_faster_from_some_batch_on() -> None:
    """As where the peak moves from the optimizer's step to the forward pass: the line below the kink is too flat."""

    def predict(rows: int) -> Outcome:
        flat, steep = room(H100) // 3 + rows * 2**20, rows * (room(H100) // 50)
        return outcome(prediction(max(flat, steep), 0.1 + rows, before=room(H100) // 4), 1, rows)

    best = best_batch(predict, 4)
    assert best.batch is not None and 45 <= best.batch <= 50


def test_a_batch_too_large_for_this_machine_is_not_the_end_of_the_search() -> None:
    """The line says where no larger batch was predicted; it does not where a smaller one is known not to fit."""
    most = 200

    def predict(rows: int) -> Outcome:
        found = prediction(room(H100) // 500 * rows, 0.1 + rows) if rows <= most else Refused("one tensor of it")
        return outcome(found, 1, rows)

    best = best_batch(predict, 2)
    assert best.batch is not None and 0.75 * most <= best.batch <= most
    assert best.larger == Refused("one tensor of it")
    table = "\n".join(lines(MODEL, [best]))
    assert f"{best.batch}+" in table and "+ A larger batch may fit, and is not known: one tensor of it." in table
    most = 1000
    fits = best_batch(predict, 2)
    assert fits.batch is not None and 480 <= fits.batch <= 500 and fits.larger is None


def test_a_smaller_batch_may_be_faster() -> None:
    """As where one more row begins another wave of tiles."""

    def predict(rows: int) -> Outcome:
        return outcome(prediction(rows * (room(H100) // 6), 1.0 if rows <= 4 else 2.0), 1, rows)

    best = best_batch(predict, 2)
    assert (best.batch, best.largest_batch) == (4, 6)


def test_what_fits_only_if_blocks_are_reused_early_is_tight() -> None:
    tight = outcome(prediction(1, at_most=room(H100) + 1))
    assert tight.fits and tight.is_tight and "  tight" in "\n".join(lines(MODEL, [tight]))
    assert not outcome(prediction(1, at_most=room(H100))).is_tight


def test_rows_and_checkpointing_change_the_prediction() -> None:
    found = predicted(FSDP2, CASE, H100)
    larger = predicted(FSDP2, replace(CASE, batch=3200), H100)
    checkpointed = predicted(Strategy(FSDP2.implementation, checkpointed=True), replace(CASE, batch=3200), H100)
    halves = predicted(Strategy(FSDP2.implementation, bfloat16=True), replace(CASE, batch=3200), H100)
    assert isinstance(halves, Prediction) and isinstance(larger, Prediction)
    assert 0.4 * larger.tensors < halves.tensors < 0.9 * larger.tensors  # of half the bytes, but for norms
    assert isinstance(found, Prediction) and isinstance(larger, Prediction) and isinstance(checkpointed, Prediction)
    assert checkpointed.tensors < larger.tensors and checkpointed.before_step == larger.before_step
    assert larger.tensors - found.tensors > 100 * 3168 * WIDTH
    assert max(found.tensors, found.before_step) <= found.reserved <= found.at_most  # workspaces are no tensors


def test_a_strategy_that_does_not_take_the_model_is_a_line_with_its_reason() -> None:
    vector = predicted(FSDP2, replace(CASE, model=f"{SPEC}:vector"), H100)
    assert isinstance(vector, Refused) and vector.reason.startswith("RuntimeError: grad can be implicitly created")
    found = predicted(FSDP2, replace(CASE, model=f"{SPEC}:masking"), H100)
    assert isinstance(found, Refused) and "depends on values" in found.reason
    unknown = outcome(found, 4)
    table = "\n".join(lines(MODEL, [unknown, unknown]))
    assert unknown.fits is None and table.count("not known [1]") == 2 and table.count("\n[1] aten::") == 1
    assert outcome(Refused("one tensor", room(H100) + 1), 4).fits is False


def test_the_context_and_nccls_communicator_are_part_of_the_device() -> None:
    exactly = prediction(room(H100))
    assert outcome(exactly).fits and room(H100) == H100.memory_bytes - CONTEXT
    assert not outcome(replace(exactly, reserved=room(H100) + 1)).fits
    assert outcome(exactly, 8).free == -communicator_bytes(H100, 8) < 0


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["--hardware", "h1000"], "no hardware is known as 'h1000'; known is cpu, v100-16gb, *"),
        (["--hardware", "cpu"], "--hardware cpu: how much memory it has is not known; *"),
        (["--hardware", "h200", "--ranks", "0"], "--ranks takes numbers from 1 to 100,000 such as 8,64, not '0'"),
        (["--hardware", "h200", "--ranks", "8,many"], "--ranks takes numbers * not '8,many'"),
        (["--hardware", "h200", "--ranks", "100001"], "--ranks takes numbers * not '100001'"),
        (["--hardware", "h200", "--impl", "fsdp"], "--impl takes FAMILY=TARGET, not 'fsdp'"),
        (["--hardware", "h200", "--impl", "loss=eager"], "--impl loss=eager: training_step, * not loss"),
        (["--hardware", "h200", "--json", "/nowhere/out.json"], "*No such file or directory: '/nowhere/out.json'"),
    ],
)
def test_a_bad_value_is_one_line(arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["none.py:make", *arguments]) == 4  # values are looked at before the model is
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert Path(said.err.strip().replace("/", "|")).match(f"python -m shardmark.predict: {line}".replace("/", "|"))


@pytest.mark.parametrize(
    ("model", "line"),
    [
        ("none.py:make", "none.py:make: cannot import *"),
        (f"{SPEC}:nothing_of_this_name", "*has no 'nothing_of_this_name'"),
        (f"{SPEC}:vector", "*vector: its loss is of shape *"),
    ],
)
@pytest.mark.sweep
def test_a_model_that_no_strategy_could_train_is_one_line(
    model: str, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([model, "--hardware", "h200"]) == 4
    said = capsys.readouterr().err.strip().replace("/", "|").replace("[", "(")
    assert "\n" not in said and Path(said).match(f"python -m shardmark.predict: {line}")


def test_strategies_of_one_device_come_first_and_then_by_how_much_is_sharded() -> None:
    implementations = _implementations(["checkpointing=full"])
    in_bfloat16 = replace(MODEL, case=replace(CASE, dtype="bfloat16"))
    assert [str(each) for each in _strategies(implementations, in_bfloat16)] == [
        "training_step=eager",
        "training_step=eager + checkpointing",
        "data_parallel=ddp",
        "data_parallel=ddp + checkpointing",
        "sharded_optimizer=zero_redundancy",
        "sharded_optimizer=zero_redundancy + checkpointing",
        "fsdp=fsdp1",
        "fsdp=fsdp1 + checkpointing",
        "fsdp=fsdp2",
        "fsdp=fsdp2 + checkpointing",
        "fsdp=fsdp2_kept",
        "fsdp=fsdp2_kept + checkpointing",
        "checkpointing=full",
    ]
    labels = [each.label for each in _strategies(implementations, replace(MODEL, has_blocks=False))]
    assert labels[:4] == ["eager", "eager + bfloat16", "ddp", "ddp + bfloat16"]


def test_the_package_names_no_family_that_trains_a_model() -> None:
    """The one exception is "checkpointing", the label of a strategy whose blocks are checkpointed as well."""
    families = {name for name, family in FAMILIES.items() if family.workload is not None}
    named = {
        (path.name, node.value)
        for path in (ROOT / "shardmark" / "predict").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in families
    }
    assert named == {("prediction.py", "checkpointing")}


@pytest.mark.sweep
def test_what_fits_what_would_and_the_largest_batches_are_told_and_saved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a device that has a few MiB more than cuBLAS's two workspaces, and on a real one, all that is said holds."""
    of_nccl = 24 * MIB  # two channels, one connection
    small, out = device(tmp_path / "small.toml", 70 * MIB + of_nccl), tmp_path / "out.json"
    assert main([f"{SPEC}:make", f"--hardware={small},h100-80gb", "--ranks=2", f"--json={out}"]) == 0
    said, output = capsys.readouterr().out, json.loads(out.read_text())
    assert output["model"]["batch"] == 32
    assert len(output["outcomes"]) == 2 * len(_strategies(_implementations([]), MODEL))
    assert "small: 0.6, of which CUDA's context takes 0.5" in said
    for each in output["outcomes"]:
        on = hardware(small if each["hardware"] == "small" else "h100-80gb")
        there = room(on, each["ranks"])
        assert each["fits"] == (each["reserved"] <= there) == (each["free"] >= 0)
        assert each["communicator"] == (each["ranks"] == 2) * (of_nccl if each["hardware"] == "small" else 12 * of_nccl)
        family, _, name = each["strategy"].partition(" + ")[0].partition("=")
        strategy = Strategy(resolve(family, name), "checkpointing" in each["strategy"], "bfloat16" in each["strategy"])
        if each["hardware"] == "small" and each["fits"]:
            again = predicted(strategy, replace(CASE, ranks=each["ranks"], batch=each["batch"]), on)
            assert isinstance(again, Prediction) and again.reserved == each["reserved"]


@pytest.mark.sweep
def test_the_longest_context_that_fits_is_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In tokens. A model whose second dimension is the width takes no other context, and the line says why."""
    small, out = device(tmp_path / "small.toml", 80 * MIB), tmp_path / "out.json"
    asked = ["--hardware", str(small), "--ranks=1", "--own-batch", "--context", f"--json={out}"]
    assert main([f"{SPEC}:tied", *asked]) == 0
    eager = next(each for each in json.loads(out.read_text())["outcomes"] if each["strategy"] == "training_step=eager")
    longest = eager["longest_context"]
    case, strategy = followed(f"{SPEC}:tied").case, Strategy(resolve("training_step", "eager"))
    on = hardware(str(small))
    fits = [predicted(strategy, replace(case, context=longest + more), on).reserved <= room(on) for more in (0, 1)]  # type: ignore[union-attr]
    assert fits == [True, False] and f"the largest context is {longest:,}" in capsys.readouterr().out
    assert main([f"{SPEC}:make", *asked]) == 0
    assert "yes; no other context: RuntimeError: " in capsys.readouterr().out
