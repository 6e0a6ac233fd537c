"""Docstrings and comments are plain: no sentence begins with "What", "Who" or "Of" unless it is a question."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from correctness.support.paths import ROOT

ROOMS = ("shardmark", "impl", "correctness", "perf", "tests", "studies", "examples")

RIDDLE = re.compile(r"(What|Who|Whose|Of|Nor)\b")
SENTENCES = re.compile(r"(?<=[.!?])\s+(?=[^a-z])")
"""Between two sentences; a dot before a small letter ends none."""


def texts(source: str) -> Iterator[tuple[int, str]]:
    """Each paragraph of a docstring, and each block of comment lines, with its first line's number."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield from ((node.lineno, " ".join(paragraph.split())) for paragraph in text.split("\n\n"))
    block: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        line = token.start[0]
        if block and (line != last + 1 or not token.line.lstrip().startswith("#")):
            yield first, " ".join(block)
            block = []
        first = first if block else line
        block.append(token.string.lstrip("# "))
        last = line
    if block:
        yield first, " ".join(block)


def riddles(source: str) -> list[str]:
    """The sentences of a file that the rule forbids, each with its line."""
    return [
        f"{line}: {sentence}"
        for line, text in texts(source)
        for sentence in SENTENCES.split(text)
        if RIDDLE.match(sentence) and not sentence.rstrip(": ").endswith("?")
    ]


@pytest.mark.parametrize("room", ROOMS)
def test_no_sentence_is_a_riddle(room: str) -> None:
    found = [f"{path.relative_to(ROOT)}:{each}" for path in _files(room) for each in riddles(path.read_text())]
    assert found == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('"""What it takes."""', 1),
        ('"""Bytes of a step. Of its peers none."""', 1),
        ('"""What does it cost?"""', 0),
        ('"""What does it cost, e.g. in seconds?"""', 0),
        ('"""Bytes, of which nothing is freed."""', 0),
        ("x = 1  # What it takes", 1),
        ("# Why it is so:\n# what it takes", 0),
        ("# One line.\n# Of two.", 1),
        ("text = 'What it takes.'", 0),
    ],
)
def test_it_is_seen_where_it_stands(source: str, count: int) -> None:
    assert len(riddles(source)) == count


def _files(room: str) -> list[Path]:
    return sorted((ROOT / room).rglob("*.py"))
