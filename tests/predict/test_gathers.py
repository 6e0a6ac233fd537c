"""All-gathers of a predicted step: what the first stream waits for is exposed."""

from __future__ import annotations

import pytest
import torch

from shardmark.predict.simulation.costs import Cost
from shardmark.predict.simulation.gathers import gathers
from shardmark.predict.simulation.schedule import Span, Step


def computes(begin: float, end: float) -> Span:
    return Span("mm", "", begin, end, 0.0, Cost(torch.float32, 0.0, 0.0))


def all_gather(begin: float, end: float) -> Span:
    return Span("all_gather", "collectives 0", begin, end, 0.0, None, 8)


def test_an_all_gather_is_exposed_for_as_long_as_the_next_operator_waits_for_it() -> None:
    spans = [
        all_gather(0.0, 1.0),  # computation waits for all but the first tenth of it
        computes(0.0, 0.1),
        computes(1.0, 3.0),
        all_gather(1.0, 2.0),  # ends beside a product
        computes(3.5, 4.0),  # launched late: no all-gather ends there
        all_gather(3.0, 4.0),  # ends as the next operator begins, which need not wait
        computes(4.0, 5.0),
        Span("reduce_scatter", "collectives 0", 4.0, 6.0, 0.0, None, 8),
        computes(6.0, 7.0),
    ]
    found = gathers(Step(7.0, 1.0, {"forward": 3.0, "backward": 4.0}, spans))
    assert [(each["part"], each["in_time"], each["nbytes"]) for each in found] == [
        ("forward", 0.0, 8),
        ("forward", 1.0, 8),
        ("backward", 1.0, 8),
    ]
    assert [each["exposed"] for each in found] == pytest.approx([0.9, 0.0, 0.0])
    assert [each["ahead"] for each in found] == pytest.approx([0.1, 1.0, 1.0])
