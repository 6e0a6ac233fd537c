"""A question that is answered without measuring: its answer, the steps to it, and a table."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from shardmark.report.tables import WIDTH
from shardmark.text import layout


@dataclass(frozen=True)
class Part:
    """A question, its answer in a sentence, the steps to it, and a table: its head, and rows."""

    question: str
    short: str
    answer: str
    steps: tuple[str, ...]
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def lines(self) -> tuple[str, ...]:
        """Lines of the steps and the table, as the report shows them."""
        steps = (line for step in self.steps for line in textwrap.wrap(step, WIDTH, subsequent_indent="  "))
        return *steps, "", *layout([dict(zip(self.head, row, strict=True)) for row in self.rows], [self.head[0]])

    def markdown(self) -> Iterator[str]:
        """The part of the document."""
        yield from (f"## {self.question}", "", f"**{self.answer}**", "", *(f"- {step}" for step in self.steps), "")
        yield f"| {' | '.join(self.head)} |"
        yield f"|{'---|' * len(self.head)}"
        yield from (f"| {' | '.join(row)} |" for row in self.rows)


def asks(part: Part) -> pytest.MarkDecorator:
    """The mark of the tests that check this part."""
    return pytest.mark.question(part.question, short=part.short, answer=part.answer, derivation=part.lines())
