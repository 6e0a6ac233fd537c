"""The times at which each rank does what: as they were, from the first beginning on, and as they are expected."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from shardmark.api.registry import Implementation
from shardmark.meter.memory import Memory
from shardmark.meter.plan import Measured, Plan
from shardmark.report.page.spans import spans
from shardmark.rows.observers import Spans
from tests.support.page_rows import entry

SECONDS = 0.01


class Naps:
    """A step of two naps."""

    names = ("nap", "doze")

    def __init__(self, implementation: Implementation, case: object, device: str) -> None: ...

    def prepare(self) -> None: ...

    def step(self, mark: Callable[[str], None]) -> None: ...

    def watched(self, look: Callable[[str, str, Callable[[], None]], None]) -> None:
        for number, name in enumerate(self.names):
            look(name, str(number), lambda: time.sleep(SECONDS))

    def expected(self) -> list[list[tuple[str, str, float, float]]]:
        return [[(name, str(n), n * SECONDS, (n + 1) * SECONDS) for n, name in enumerate(self.names)]]


class Unseen(Naps):
    names = ()


def row_of(workload: type[Naps], ranks: int = 1) -> Any:
    plan: Any = Plan(workload, None, None, "a case", "cpu", 1)  # type: ignore[arg-type]
    measured = []
    for rank in range(ranks):
        measured.append(Measured("none", Memory(), {}))
        own, expected = Spans.on_rank(plan, measured[-1])
        later = [{**span, "begin": span["begin"] + rank, "end": span["end"] + rank} for span in own]
        measured[-1].observed[Spans] = later, expected
    row: Any = {}
    Spans().fill(row, measured)
    return row


def test_spans_are_in_the_order_of_the_step_and_begin_with_the_first_of_all_ranks() -> None:
    first, second = row_of(Naps, ranks=2)["spans"]["measured"]
    assert [(each["kind"], each["label"]) for each in first] == [("nap", "0"), ("doze", "1")]
    assert first[0]["begin"] == 0 and second[0]["begin"] == pytest.approx(1, abs=0.5)
    assert all(each["end"] - each["begin"] >= SECONDS for each in first)
    assert first[1]["begin"] >= first[0]["end"]


def test_expected_spans_are_the_workloads_own() -> None:
    ((nap, doze),) = row_of(Naps)["spans"]["expected"]
    assert (nap["end"], doze["begin"]) == (SECONDS, SECONDS)


def test_a_step_of_which_nothing_is_to_be_seen_has_none() -> None:
    assert row_of(Unseen) == {}


def test_the_page_has_a_panel_for_what_was_and_one_for_the_plan() -> None:
    halves = [[{"kind": "nap", "label": "0", "begin": 0.0, "end": 1.0}], [{"kind": "doze", "label": "1"}]]
    halves[1][0] |= {"begin": 1.0, "end": 2.0}
    whole = [[{"kind": "nap", "label": "0", "begin": 0.0, "end": 2.0}]] * 2
    figure = spans(
        [entry("mine", {"id": "c"}, spans={"measured": halves, "expected": whole}), entry("other", {"id": "c"})]
    )
    assert figure is not None
    waits = [heading.partition(": ")[2] for heading, _ in figure.panels]
    assert waits == ["50.0% of the ranks' time is waiting", "0.0% of the ranks' time is waiting"]
    assert [tuple(row[1:]) for row in figure.rows[:2]] == [
        (0, "nap", "0", 0.0, 1000.0),
        (1, "doze", "1", 1000.0, 2000.0),
    ]
    assert [kind for _, kind in figure.kinds] == ["nap", "doze"]
    assert spans([entry("other", {"id": "c"})]) is None
