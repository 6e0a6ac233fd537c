"""Inputs that a loss refuses: ValueError for any implementation; ours in one line that says what is wrong."""

from functools import partial
from typing import Any

import pytest
import torch

from correctness.loss.accuracy import random_inputs
from correctness.support.contracts import Note, assert_near, assert_refused, is_ours
from impl.loss import check_inputs, eager_loss
from shardmark.api import Implementation

pytestmark = [pytest.mark.family("loss"), pytest.mark.compiled_every_time]

MISMATCHED = {  # shapes of hidden, weight and targets, and the pattern of our message
    "dim": ((4, 8), (5, 16), (4,), r"hidden \(4, 8\), weight \(5, 16\)"),
    "fewer_targets": ((4, 8), (5, 8), (3,), r"targets \(3,\)"),
    "more_targets": ((4, 8), (5, 8), (6,), r"targets \(6,\)"),
    "a_column_of_targets": ((4, 8), (5, 8), (4, 1), r"targets \(4, 1\)"),
    "batched": ((2, 4, 8), (5, 8), (2, 4), r"hidden \(2, 4, 8\)"),
}


@pytest.mark.should("shapes that do not go together are a ValueError")
@pytest.mark.parametrize("how", MISMATCHED)
def test_shapes_that_do_not_go_together_are_refused(
    implementation: Implementation, how: str, device: str, record_property: Note
) -> None:
    *shapes, targets_shape, wording = MISMATCHED[how]
    hidden, weight = (torch.randn(shape, device=device) for shape in shapes)
    targets = torch.zeros(targets_shape, dtype=torch.int64, device=device)
    what = f"hidden {shapes[0]}, weight {shapes[1]}, targets {targets_shape}"
    call = partial(implementation.watched, hidden, weight, targets)
    assert_refused(implementation, what, call, wording, record_property)


@pytest.mark.should("an empty vocabulary is a ValueError")
def test_an_empty_vocabulary_is_refused(implementation: Implementation, device: str) -> None:
    if not is_ours(implementation):
        pytest.skip("the contract says nothing of a vocabulary without words")
    hidden, targets = torch.randn(4, 8, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    with pytest.raises(ValueError, match=r"^loss over nothing: weight \(0, 8\)[^\n]*$"):
        implementation.watched(hidden, hidden[:0], targets)


@pytest.mark.should("dtypes and devices that do not go together are a ValueError")
def test_dtypes_and_devices_that_do_not_go_together_are_refused(
    implementation: Implementation, device: str, record_property: Note
) -> None:
    x = random_inputs(4, 8, 5, device)
    mixed = partial(implementation.watched, x.hidden, x.weight.double(), x.targets)
    wording = "one floating dtype .*got torch.float32, torch.float64"
    assert_refused(implementation, "hidden of float32, weight of float64", mixed, wording, record_property)
    whole = partial(implementation.watched, x.hidden.int(), x.weight.int(), x.targets)
    wording = "one floating dtype .*got torch.int32, torch.int32"
    assert_refused(implementation, "hidden and weight of int32", whole, wording, record_property)
    elsewhere = partial(implementation.watched, x.hidden, x.weight.to("meta"), x.targets)
    assert_refused(implementation, "weight on another device", elsewhere, "on one device, got .*meta", record_property)


def test_targets_of_other_integers_are_refused_or_right(
    implementation: Implementation, device: str, record_property: Note
) -> None:
    x = random_inputs(9, 8, 5, device)
    call = partial(implementation.watched, x.hidden, x.weight, x.targets.int())
    if is_ours(implementation):
        wording = "targets of torch.int64, got torch.int32"
        assert_refused(implementation, "targets of int32", call, wording, record_property)
        return
    try:
        found = call()
    except ValueError:
        return
    wanted = eager_loss(x.hidden.double(), x.weight.double(), x.targets)
    assert_near({"loss": found}, {"loss": wanted}, "with targets of int32")
    record_property("note", "takes targets of int32, which the contract need not have")


@pytest.mark.should("targets that are not integers are a ValueError")
def test_targets_that_are_not_integers_are_refused(
    implementation: Implementation, device: str, record_property: Note
) -> None:
    x = random_inputs(4, 8, 5, device, ignored=None)
    call = partial(implementation.watched, x.hidden, x.weight, x.targets + 0.5)
    wording = "targets of torch.int64, got torch.float32"
    assert_refused(implementation, "targets of float32", call, wording, record_property)


OUT_OF_RANGE: list[tuple[str, dict[str, float], str]] = [
    ("label_smoothing=1.5", {"label_smoothing": 1.5}, "label_smoothing is from 0 to 1, got 1.5"),
    ("label_smoothing=-0.1", {"label_smoothing": -0.1}, "label_smoothing is from 0 to 1, got -0.1"),
    ("z_loss=-1", {"z_loss": -1.0}, "z_loss is 0 or more and finite, got -1"),
]


@pytest.mark.should("options out of range are a ValueError")
@pytest.mark.parametrize(("what", "options", "wording"), OUT_OF_RANGE, ids=lambda x: x if "=" in str(x) else "")
def test_options_out_of_range_are_refused(
    implementation: Implementation, what: str, options: dict[str, Any], wording: str, device: str, record_property: Note
) -> None:
    x = random_inputs(4, 8, 5, device)
    call = partial(implementation.watched, x.hidden, x.weight, x.targets, **options)
    assert_refused(implementation, what, call, wording, record_property)


@pytest.mark.should("a z_loss that is not finite is a ValueError")
@pytest.mark.parametrize("z_loss", [float("inf"), float("nan")], ids=str)
def test_a_z_loss_that_is_not_finite_is_refused(implementation: Implementation, z_loss: float, device: str) -> None:
    if not is_ours(implementation):
        pytest.skip("the contract says nothing of a z_loss that is not finite")
    x = random_inputs(4, 8, 5, device)
    with pytest.raises(ValueError, match=rf"^z_loss is 0 or more and finite, got {z_loss}[^\n]*$"):
        implementation.watched(x.hidden, x.weight, x.targets, z_loss=z_loss)


@pytest.mark.should("a target out of range is a ValueError on CPU")
@pytest.mark.parametrize(
    ("target", "ignored"), [(-1, -100), (5, -100), (10**12, -100), (-101, -100), (-100, -1), (-100, 3)]
)
def test_a_target_out_of_range_is_refused(
    implementation: Implementation, target: int, ignored: int, device: str, record_property: Note
) -> None:
    """torch's default index is refused too, if another index is to be ignored."""
    if device == "cuda":
        pytest.skip("there it is a device-side assertion, after which the process has no use of its GPU")
    x = random_inputs(4, 8, 5, device, ignored=ignored)
    x.targets[2] = target
    call = partial(implementation.watched, x.hidden, x.weight, x.targets, ignore_index=ignored)
    wording = rf"in \[0, 5\)[^\n]*targets\[2\] is {target}"
    what = f"target {target} of 5 words with ignore_index={ignored}"
    assert_refused(implementation, what, call, wording, record_property)


def test_off_the_cpu_the_range_is_checked_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs on the meta device, where reading a value is an error; on CUDA it would be a wait."""
    asked: list[str] = []
    monkeypatch.setattr(torch, "_assert_async", lambda condition, message: asked.append(message))
    hidden, weight, targets = (torch.empty(n, 8, device="meta") for n in (4, 5, 4))
    check_inputs(hidden, weight, targets[:, 0].long(), -100, 0.0, 0.0)
    assert asked == ["loss: a target is out of range: neither in [0, 5) nor -100"]
