"""The file of wanted changes: which tests may grow, by which factor, and why."""

import math
from pathlib import Path

import pytest

from shardmark.verdict.accept import Acceptance, AcceptFileError, read_accepted

FILE = """
["*step[micro*]"]
time = 1.10
memory = 1.5
why = "the mask has a row of bytes"

["*wide*"]
memory = 2
counters = inf
why = '''a wider
  table'''
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "accepted.toml"
    path.write_text(FILE)
    return path


def test_a_file_is_read(file: Path) -> None:
    assert read_accepted(file).acceptances == [
        Acceptance("*step[micro*]", "the mask has a row of bytes", (("time", 1.1), ("memory", 1.5))),
        Acceptance("*wide*", "a wider table", (("memory", 2), ("counters", math.inf))),
    ]


def test_the_largest_factor_of_the_patterns_that_match_counts(file: Path) -> None:
    accepted = read_accepted(file)
    assert accepted.find("test_step[micro-4]", "memory") == (1.5, "the mask has a row of bytes")
    assert accepted.find("test_step[micro-wide]", "memory") == (2, "a wider table")
    assert accepted.find("test_step[micro-4]", "counters") is None  # brackets are literal
    assert accepted.find("test_stepm", "time") is None
    assert list(accepted.remarks()) == []


def test_a_pattern_that_matches_nothing_is_named(file: Path) -> None:
    accepted = read_accepted(file)
    accepted.find("test_step[micro-4]", "counters")
    assert list(accepted.remarks()) == ['--accept: no compared test matches "*wide*"']


def test_what_the_version_before_accepted_is_not_accepted_again(file: Path, tmp_path: Path) -> None:
    before = tmp_path / "before.toml"
    before.write_text(FILE.replace("1.5", "1.2"))
    since = read_accepted(file).since(before)
    assert since.find("test_wide", "memory") is None
    assert since.find("test_step[micro-4]", "memory") == (1.5, "the mask has a row of bytes")
    assert list(since.remarks()) == [
        '--accept: "*wide*" was accepted in an earlier change, and accepts nothing now: remove it'
    ]


@pytest.mark.parametrize("text", [None, "", "["], ids=["missing", "empty", "wrong"])
def test_a_version_before_without_tables_accepted_nothing(file: Path, tmp_path: Path, text: str | None) -> None:
    before = tmp_path / "before.toml"
    if text is not None:
        before.write_text(text)
    accepted = read_accepted(file)
    assert accepted.since(before).acceptances == accepted.acceptances


def test_a_file_of_comments_accepts_nothing(tmp_path: Path) -> None:
    file = tmp_path / "accepted.toml"
    file.write_text("# none yet\n")
    assert read_accepted(file).find("test", "time") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('["*"]\nbytes = 2\nwhy = "a"', "takes `time`, `memory` or `counters`, and `why`, and nothing else"),
        ('["*"]\nwhy = "a"', "takes `time`, `memory` or `counters`, and `why`"),
        ('["*"]', "takes `time`, `memory` or `counters`"),
        ("time = 2", "takes `time`, `memory` or `counters`"),
        ('["*"]\ntime = 2', "needs `why`, a text"),
        ('["*"]\ntime = 2\nwhy = " "', "needs `why`, a text"),
        ('["*"]\ntime = 2\nwhy = 3', "needs `why`, a text"),
        ('["*"]\ntime = 1\nwhy = "a"', "time = 1 is not a factor above 1, such as 1.10"),
        ('["*"]\ntime = nan\nwhy = "a"', "time = nan is not a factor above 1"),
        ('["*"]\ntime = true\nwhy = "a"', "time = True is not a factor above 1"),
        ('["*"]\nmemory = "4 MB"\nwhy = "a"', "memory = '4 MB' is not a factor above 1"),
        ("[", "is not TOML"),
    ],
)
def test_a_wrong_file_is_one_line(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "accepted.toml"
    file.write_text(text)
    with pytest.raises(AcceptFileError) as caught:
        read_accepted(file)
    assert message in str(caught.value) and str(file) in str(caught.value) and "\n" not in str(caught.value)
