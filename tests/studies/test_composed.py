"""PyTorch's parallelisms pair by pair: the study tells right, wrong and refused apart."""

import pytest

from impl.pipeline.library import own_stages
from studies.composed.__main__ import page
from studies.composed.features import AXES, SCHEDULES, Composition, compositions
from studies.composed.judging import Cell, judged

pytestmark = pytest.mark.sweep  # each composition has ranks of its own


@pytest.mark.parametrize(
    ("features", "outcome", "says"),
    [
        (("fully_shard",), "right", ""),
        (("ddp", "Interleaved1F1B"), "right", ""),
        (("ddp", "ZBVZeroBubble"), "wrong", "the gradient of layers."),
        (("ddp", "our zero bubble V"), "right", ""),
        (("tensor", "clip_grad_norm_"), "refused", "got mixed torch.Tensor and DTensor"),
    ],
    ids=lambda value: "_x_".join(value) if isinstance(value, tuple) else None,
)
def test_a_composition_is_right_wrong_or_refused(features: tuple[str, ...], outcome: str, says: str) -> None:
    cell = judged(Composition(features))
    assert cell.outcome == outcome and says in cell.says, cell


def test_each_pair_is_asked_once_and_alternatives_never() -> None:
    found = [each.features for each in compositions()]
    assert len(found) == len(set(map(frozenset, found)))
    assert {each for features in found for each in features} == set(AXES)
    assert ("ddp", "HSDP") not in found and ("ddp", "GPipe") in found


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_ranks_of_a_pipeline_have_each_stage_once(schedule: str) -> None:
    stages = [index for rank in range(2) for index in own_stages(schedule, rank, 2)]
    assert sorted(stages) == list(range(2 * SCHEDULES[schedule]))


def test_the_page_has_a_line_for_each_cell_that_is_not_right() -> None:
    cells = [Cell(each, "right") for each in compositions() if "tied" not in each]
    cells += [Cell(Composition(("tied",)), "wrong", "output.weight has no gradient")]
    text = page(cells)
    assert "- tied: output.weight has no gradient\n" in text and text.count("**wrong**") == 1
    assert "| GPipe (yes) | yes |" in text
