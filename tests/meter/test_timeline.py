"""The kind and the owner of each byte of a step; a training step's closed forms equal them to the byte."""

from dataclasses import replace

import pytest
import torch

from correctness.support.metering import plan_of
from impl.accounting.beside import beside
from impl.accounting.ledger import Bytes
from impl.accounting.plain import PlainLanguageModel
from impl.model import SIZES
from impl.training_step.accounting import eager_peak
from impl.training_step.cases import STEP_MODES, TrainingStepCase
from impl.training_step.workload import LanguageModelStep
from shardmark.api import followed
from shardmark.meter.measure_case import measure
from shardmark.meter.plan import Measured, Rounds
from shardmark.meter.timeline import KINDS, by_layer_and_operator, timeline
from shardmark.predict import kept_for_backward
from shardmark.rows.observers import Observer, Timeline
from shardmark.rows.observers.where_memory_goes import timeline_entry

AT_THE_END_OF_BACKWARD, AT_THE_LOSS, ODD = (TrainingStepCase("tiny", *size) for size in [(1, 4), (2, 32), (3, 61)])
"""Named by the moment of the peak; the sizes of the last are odd."""
HALVES = ("bfloat16", "float16")
OFTEN = [
    *(replace(case, mode=mode) for case in (AT_THE_END_OF_BACKWARD, AT_THE_LOSS) for mode in STEP_MODES),
    *(replace(ODD, dtype=dtype, mode="step") for dtype in HALVES),
    replace(ODD, dtype="bfloat16", mode="forward"),
    replace(AT_THE_LOSS, attention="eager"),
    TrainingStepCase("tiny", 1, 1152, attention="eager"),  # the peak is in softmax
]
ALL = [
    replace(case, dtype=dtype, mode=mode)
    for case in (AT_THE_END_OF_BACKWARD, AT_THE_LOSS, ODD)
    for dtype in ("float32", *HALVES)
    for mode in STEP_MODES
]


def _measured(case: TrainingStepCase, *observers: type[Observer]) -> Measured:
    rounds = Rounds(minimum=1, maximum=1, warmups=1)
    return measure(plan_of(LanguageModelStep, case=case, rounds=rounds, observers=observers))


@pytest.mark.parametrize(
    "case",
    [*OFTEN, *(pytest.param(case, marks=pytest.mark.sweep) for case in ALL if case not in OFTEN)],
    ids=str,
)
def test_peak_of_a_step_is_the_formulas_to_the_byte(case: TrainingStepCase) -> None:
    assert _measured(case).memory.tensors == eager_peak(case)


@pytest.mark.parametrize("dtype", ["float32", *(pytest.param(dtype, marks=pytest.mark.sweep) for dtype in HALVES)])
def test_what_forward_keeps_is_the_formulas_operator_by_operator(dtype: str) -> None:
    case = replace(ODD, dtype=dtype)
    found = _measured(case, Timeline).observed[Timeline]
    expected = kept_for_backward(plan_of(LanguageModelStep, case=case))
    assert by_layer_and_operator(found.activations) == expected
    row = timeline_entry(found, expected | {("nowhere", "aten::nothing"): 7})
    kept = {(entry["module"], entry["operator"]): (entry["bytes"], entry["formula"]) for entry in row["activations"]}
    assert kept == {where: (n, n) for where, n in expected.items()} | {("nowhere", "aten::nothing"): (0, 7)}


def test_the_peak_where_the_feed_forward_is_widest_is_the_formulas(monkeypatch: pytest.MonkeyPatch) -> None:
    """With few tokens of a small vocabulary the peak is at the last layer's gate, and not at the loss."""
    monkeypatch.setitem(SIZES, "wide", replace(SIZES["tiny"], d_ff=640, vocab=200))
    case = TrainingStepCase("wide", 4, 100)
    peak = eager_peak(case)
    assert isinstance(peak, Bytes) and "backward of blocks.*.feed_forward" in peak.entries
    assert _measured(case).memory.tensors == peak


def test_kinds_are_those_of_the_formulas_at_every_phase_and_sum_to_the_meters() -> None:
    case = AT_THE_LOSS
    measured = _measured(case, Timeline)
    expected = beside(followed(PlainLanguageModel.of(case), "cpu")).marks
    parameters = expected["before_step"].entries["parameters"]
    state = expected["before_step"] - expected["after_init"]
    found = measured.observed[Timeline]
    phases = found.phases
    assert list(phases) == ["before_step", "after_forward", "after_backward", "after_optimizer", "peak"]
    for phase, kinds in phases.items():
        assert set(kinds) <= set(KINDS)
        assert sum(kinds.values()) == (measured.memory.peak if phase == "peak" else measured.memory.phases[phase])
        assert kinds["parameters"] == parameters
        assert kinds["optimizer state"] == state
        assert kinds["inputs and buffers"] == expected["after_init"] - parameters
        assert kinds.get("gradients", 0) == (parameters if phase in ("after_backward", "after_optimizer") else 0)
    assert phases["after_forward"]["activations"] == expected["after_forward"] - expected["before_step"]
    assert phases["after_forward"]["temporaries"] == 0
    # The number of targets, which forward left, is freed by then.
    assert phases["peak"]["temporaries"] == eager_peak(case) - expected["after_forward"] + 4
    assert max(sum(moment.values()) for moment in found.curve) == measured.memory.peak
    assert len(found.curve) <= 200


def test_the_largest_blocks_say_where_they_come_from() -> None:
    found = _measured(AT_THE_LOSS, Timeline).observed[Timeline]
    logits = 4 * 64 * 1000
    largest = [(block.nbytes, block.kind, block.operator) for block in found.largest[:3]]
    assert sorted(largest) == [
        (logits, "activations", "aten::cross_entropy_loss"),
        (logits, "temporaries", "LogSoftmaxBackward0"),
        (logits, "temporaries", "NllLossBackward0"),
    ]
    nbytes = [block.nbytes for block in found.largest]
    assert len(nbytes) == 10 and nbytes == sorted(nbytes, reverse=True)
    assert (found.largest[3].module, found.largest[3].operator) == ("blocks.0.feed_forward.w1", "aten::linear")


def test_a_block_has_the_module_whose_backward_made_it_and_its_kind_from_its_first_moment() -> None:
    x = torch.randn(7, 5)
    model = torch.nn.Linear(5, 3)
    with timeline("cpu") as recording:
        recording.mark("before_step")
        with torch.profiler.record_function("the_layer"):
            loss = model(x).square().sum()
        recording.mark("after_forward")
        loss.backward()
        recording.mark("after_backward", {"gradients": [p.grad for p in model.parameters() if p.grad is not None]})
        scratch = torch.empty(1000)
        del scratch
        recording.mark("after_all")
    found = recording.read()
    assert found.phases["after_backward"]["gradients"] == 4 * (5 * 3 + 3)
    assert found.phases["peak"]["temporaries"] == 4000
    assert {(block.module, block.operator) for block in found.activations} == {
        ("the_layer", "aten::linear"),
        ("the_layer", "aten::sum"),
    }
    assert found.largest[0].nbytes == 4000 and found.largest[0].module == ""
