"""Published figures: beside a row of the same sizes on the same GPU, otherwise beside what is predicted for theirs."""

from typing import Any

import pytest

from shardmark.meter.hardware import hardware
from shardmark.report.page.figure import Absent, Figure
from shardmark.report.page.published import points
from shardmark.report.plots import Points, Published, restored, saved
from tests.support.page_rows import entry

A100 = {"gpus": ["NVIDIA A100-SXM4-80GB"] * 2, "device_bytes": 1.002 * hardware("a100-80gb").memory_bytes}
FIGURE = Published(
    "a paper", "two A100s", "theirs", "step", 0.5, "a100-80gb", 0.4, "naive xl-b[24]-step 2", "stats.median"
)
PLOT = Points("Beside", {}, {"step": "s"}, (FIGURE,), "a note")
COLUMNS = ("row", "metric", "unit", "published", "on", "this run", "predicted", "our row", "ratio to published")


def ours(name: str = "naive", case: str = "xl-b2-step", ranks: int = 2, **row: Any) -> dict[str, Any]:
    return entry(name, {"id": case}, 0.6, world_size=ranks, **row)


def line(entries: list[dict[str, Any]], machine: dict[str, Any]) -> dict[str, Any]:
    """The table's line, by its columns."""
    drawn = points(PLOT, entries, machine)
    assert isinstance(drawn, Figure) and tuple(drawn.columns) == COLUMNS and len(drawn.rows) == 1
    return dict(zip(drawn.columns, drawn.rows[0], strict=True))


def test_what_was_measured_on_the_same_gpu_in_the_same_sizes_is_beside_it() -> None:
    found = line([ours("flat"), ours()], A100)
    assert (found["published"], found["this run"], found["predicted"]) == (500, 600, 400)
    assert found["our row"] == "naive · xl-b2-step" and found["ratio to published"] == 1.2


SMALLER = A100 | {"device_bytes": hardware("a100-40gb").memory_bytes}
PCIE = A100 | {"gpus": ["NVIDIA A100 80GB PCIe"]}
OTHER = A100 | {"gpus": ["NVIDIA GA1000"]}


@pytest.mark.parametrize(
    ("row", "machine"),
    [
        (ours(), SMALLER),
        (ours(), PCIE),
        (ours(), OTHER),
        (ours(), {"gpus": [], "device_bytes": 2**34}),
        (ours(case="xl-b8-step"), A100),
        (ours("flat"), A100),
        (ours(ranks=4), A100),
        (ours(simulated=True, hardware="h100-80gb"), A100),
    ],
    ids=[
        "smaller",
        "pcie",
        "other_chip",
        "cpu",
        "other_sizes",
        "other_technique",
        "other_ranks",
        "predicted_for_another",
    ],
)
def test_otherwise_what_is_predicted_is(row: dict[str, Any], machine: dict[str, Any]) -> None:
    found = line([row], machine)
    assert found["this run"] is None and found["our row"] == ""
    assert found["ratio to published"] == 0.8


def test_a_row_predicted_for_that_hardware_is_ours() -> None:
    assert line([ours(simulated=True, hardware="a100-80gb")], {"gpus": []})["this run"] == 600


def test_what_is_predicted_is_drawn_where_nothing_was_measured() -> None:
    for machine, kinds, notes in ((A100, ["published", "run"], 2), (PCIE, ["published", "predicted"], 3)):
        drawn = points(PLOT, [ours()], machine)
        assert isinstance(drawn, Figure) and len(drawn.notes) == notes and drawn.notes[-1] == "a note"
        [(_, panel)] = drawn.panels
        [marks] = panel.to_dict(validate=False)["datasets"].values()
        assert [each["kind"] for each in marks] == kinds


def test_a_plot_of_all_rows_needs_one() -> None:
    assert isinstance(points(Points("All", {"step": "nowhere"}, {"step": "s"}, (FIGURE,)), [ours()], A100), Absent)


def test_it_is_saved_and_restored() -> None:
    assert restored(saved(PLOT)) == PLOT
