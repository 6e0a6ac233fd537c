"""The ledger's entries and what explains a budget: named, largest first, and in sum the formula; against the meter
where the peak lies between the moments that one would think of."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from typing import Any

import pytest

from correctness.support.metering import assert_metered, metered, peak_of_a_step
from impl.accounting.ledger import Bytes, Ledger, explain
from impl.attention.cases import AttentionCase
from impl.collectives.cases import CollectiveCase
from impl.data_parallel.cases import ReductionCase
from impl.data_parallel.workload import DataParallelStep
from impl.fsdp.cases import FSDPCase
from impl.layers.cases import LayersCase
from impl.loss.cases import LossCase
from impl.model import SIZES, TransformerSize
from impl.model.mlp import MLP_SIZES
from impl.optim.cases import OptimizerCase
from impl.sharded_optimizer.cases import ShardedStepCase
from impl.sharded_optimizer.workload import ShardedStep
from impl.training_step.accounting import eager_peak
from impl.training_step.cases import TrainingStepCase
from impl.training_step.workload import LanguageModelStep
from shardmark.api import MB
from shardmark.api.registry import FAMILIES, Implementation, family
from shardmark.meter.hardware import hardware
from shardmark.meter.plan import Plan
from shardmark.predict.simulation.predict import predict

STEP = TrainingStepCase("mini", 2, 32)


def test_the_peak_has_what_was_live_then_largest_first() -> None:
    ledger = Ledger()
    ledger.take("logits", 30)
    ledger.take("q, k, v", 10)
    ledger.mark("after_forward")
    ledger.take("gradient of the logits", 40)
    ledger.free("logits")
    ledger.free("q, k, v", 4)
    ledger.take("gradients", 30)
    assert (ledger.total, ledger.peak) == (76, 80)
    assert list(ledger.peak.entries.items()) == [("gradient of the logits", 40), ("logits", 30), ("q, k, v", 10)]
    assert ledger.live.entries == {"gradient of the logits": 40, "gradients": 30, "q, k, v": 6}
    assert (ledger.marks["after_forward"], ledger.peaks["after_forward"]) == (40, 40)


@pytest.mark.parametrize(("name", "nbytes"), [("logits", 31), ("logit", None)], ids=["too_many", "misspelt"])
def test_what_is_not_live_cannot_be_freed(name: str, nbytes: int | None) -> None:
    ledger = Ledger()
    ledger.take("logits", 30)
    with pytest.raises(AssertionError, match=rf"^{name}\b"):
        ledger.free(name, nbytes)


def test_bytes_are_an_int_that_keeps_its_entries() -> None:
    small, large = Bytes({"q": 1, "mask": 0}), Bytes({"scores": 3, "q": 1})
    assert max(small, large).entries == {"scores": 3, "q": 1} and small.entries == {"q": 1}
    assert large.without("q").add({"scores": 2, "v": 7}).entries == {"v": 7, "scores": 5}
    assert pickle.loads(pickle.dumps(large)).entries == large.entries
    assert json.dumps({"formula": large}) == '{"formula": 4}' and large + 1 == 5


CASES = {
    "attention": AttentionCase(batch=2, seq=300, head_dim=32),
    "layers": LayersCase("add_rms_norm", tokens=64, dim=32, dtype="float16"),
    "loss": LossCase(tokens=64, dim=32, vocab=500),
    "optimizer": OptimizerCase("tiny", clipping="in_step"),
    "collectives": CollectiveCase("reduce_scatter", MB),
    "data_parallel": ReductionCase("deep", 1, 4),
    "sharded_optimizer": ShardedStepCase("mini", 2, 32),
    "fsdp": FSDPCase("mini", 2, 32),
    "checkpointing": STEP,
    "training_step": replace(STEP, dtype="float16"),
}


@pytest.mark.parametrize("name", CASES)
def test_every_formula_is_explained_by_terms_that_sum_to_it(name: str) -> None:
    case, implementations = CASES[name], FAMILIES[name].implementations.values()
    for implementation in implementations:
        if implementation.memory is None:
            continue
        entries = explain(implementation, case).entries
        assert len(entries) > 1 and sum(entries.values()) == implementation.memory(case), implementation
        assert list(entries.values()) == sorted(entries.values(), reverse=True) and min(entries.values()) > 0


def test_an_explanation_reads_as_a_table_in_mib() -> None:
    explanation = explain(family("fsdp").implementations["sharded"], FSDPCase("mini", 2, 32))
    first, *lines = str(explanation).splitlines()
    assert first == "fsdp/sharded at the peak of mini-b2-s32-float32-step:"
    (table,) = (line for line in lines if line.strip().startswith("full parameters of output"))
    assert float(table.split()[-2]) == pytest.approx(10_000 * 256 * 4 / 2**20, abs=1e-3)
    *rows, total = (float(line.split()[-2]) for line in lines)
    assert sum(rows) == pytest.approx(total, abs=1e-3 * len(rows)) and "smaller" in lines[-2]


def test_a_formula_without_terms_says_so() -> None:
    implementation = replace(family("loss").implementations["eager"], memory=lambda case: 5 * 2**20)
    assert explain(implementation, CASES["loss"]).entries == {"one number, without named terms": 5 * 2**20}
    with pytest.raises(ValueError, match=r"^loss/eager has no memory formula$"):
        explain(replace(implementation, memory=None), CASES["loss"])


@pytest.mark.parametrize(
    ("size", "case", "moment"),
    [
        (
            TransformerSize(64, 640, 2, 2, vocab=200),
            TrainingStepCase("ledger", 2, 7, "bfloat16"),
            "backward of blocks.*.feed_forward.w1",
        ),
        (
            TransformerSize(32, 32, 1, 2, vocab=50),
            TrainingStepCase("ledger", 2, 200, attention="eager"),
            "backward of blocks.*.attention",
        ),
    ],
    ids=["casting_a_weights_gradient", "softmax_of_several_sequences"],
)
def test_the_peak_between_a_layers_operators_is_the_meters(
    size: TransformerSize, case: TrainingStepCase, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, "ledger", size)
    peak = eager_peak(case)
    found = peak_of_a_step(LanguageModelStep, family("training_step").implementations["eager"], case)
    assert moment in peak.entries and found == peak


def test_a_loss_whose_dtypes_autocast_chooses_needs_what_it_says() -> None:
    """On CUDA 2 bytes a logit less: log-probabilities and their gradient stay in half precision."""
    eager = family("training_step").implementations["eager"]
    case = TrainingStepCase("mlp-tiny", 4, 200, "bfloat16", autocast_loss=True)
    in_float32 = replace(case, autocast_loss=False)
    assert peak_of_a_step(LanguageModelStep, eager, case) == eager_peak(case) == eager_peak(in_float32)
    predicted = predict(Plan(LanguageModelStep, eager, None, case, "cpu", 1), on=hardware("a100-80gb"))
    assert predicted.memory.tensors == eager_peak(case, "cuda")
    fewer = eager_peak(in_float32, "cuda") - eager_peak(case, "cuda")
    assert fewer == pytest.approx(2 * case.tokens * MLP_SIZES[case.model].vocab, abs=8)  # two scalars in float32


def peak_on_rank(workload: type, implementation: Implementation, case: Any) -> dict[str, int]:
    return {"peak": metered(workload, implementation, case).tensors}


@pytest.mark.parametrize(
    ("family_name", "name", "workload", "case"),
    [
        ("data_parallel", "bucketed", DataParallelStep, TrainingStepCase("wide", 8, 32)),
        pytest.param(
            "data_parallel", "bucketed", DataParallelStep, ReductionCase("wide", 8, 32), marks=pytest.mark.sweep
        ),
        ("sharded_optimizer", "sharded", ShardedStep, ShardedStepCase("wide", 8, 32)),
    ],
    ids=["bucketed", "bucketed_in_bfloat16", "sharded_optimizer"],
)
def test_the_peak_within_the_last_block_is_the_meters_on_every_rank(
    family_name: str, name: str, workload: type, case: TrainingStepCase, worlds: Any
) -> None:
    """A gradient is in its bucket before the next operator of backward runs."""
    implementation = family(family_name).implementations[name]
    assert implementation.memory is not None
    expected = [{"peak": implementation.memory(case)}] * 2
    assert_metered(worlds(2), expected, peak_on_rank, workload, implementation, case, below=1e-6)
