"""Tensor parallelism predicted in a node and across nodes."""

from math import inf

import pytest

from shardmark.meter.hardware import hardware
from studies.across_nodes import PAGE, in_words, of_sizes, page, pays_until, predicted, steps_of


@pytest.mark.parametrize(
    ("parallel", "until"),
    [([1, 2, 4], 0.0), ([2, 3, 5], 0.0), ([0.5, 1, 2], inf), ([0.5, 4, 16], 20.0), ([0.5, 1, 8], 80.0)],
)
def test_it_pays_until_the_layouts_are_as_fast(parallel: list[float], until: float) -> None:
    """Between two numbers of tokens the ratio of the times is a power of it: 1/2 at 10 and 2 at 40 is 1 at 20."""
    tokens = [10, 40, 160]
    alone = list(zip(tokens, [1.0, 2.0, 4.0], strict=True))
    assert pays_until(alone, list(zip(tokens, parallel, strict=True))) == pytest.approx(until)


def test_words_name_the_numbers_that_were_predicted() -> None:
    assert [in_words(each, 128, 4096) for each in (0.0, 1234.5, inf)] == ["not at 128", "1,234", "above 4,096"]


def test_a_network_makes_steps_longer() -> None:
    known = hardware("h100-80gb")
    steps = list(steps_of("tiny", known, 4, (4, 2, 1), (32, 64)))
    assert [(step.degree, step.tokens) for step in steps] == [(d, n) for d in (1, 2, 4) for n in (32, 64)]
    for step in steps:
        assert step.seconds[4] < step.seconds[2] <= step.seconds[1]
    text = page(steps, known, 4)
    assert "| `tp=4` |" in text
    assert "## 4 nodes of 1" in text


def test_the_page_has_what_is_predicted() -> None:
    (step,) = [predicted("large", 8, 8, 128, of_sizes(hardware("h100-80gb"), (8, 1)))]
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| 128 |")]
    last = [line.rstrip(" |").rpartition("| ")[2].strip("*") for line in lines]
    assert [last[0], last[3], last[4]] == [
        f"{1e3 * step.seconds[8]:,.0f}",
        f"{1e3 * step.seconds[1]:,.0f}",
        f"{step.peak / 2**30:.1f}",
    ]
