"""A question's columns: those that it names, in a table that fits a screen; and what is wrong with them."""

from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import pytest

from shardmark.meter.plan import Identity
from shardmark.report.questions import KNOWN, Questions
from shardmark.report.tables import WIDTH, render
from shardmark.rows import observers
from shardmark.rows.columns import DEFAULT, Column
from shardmark.rows.fill import new_row
from shardmark.rows.observers import WITH_COLUMNS, Observer
from tests.support.project import make_project

pytest_plugins = ["pytester"]

QUESTION = "What does a nap cost?"


@dataclass(frozen=True)
class Case:
    name: str

    def __str__(self) -> str:
        return self.name


def _entry(case: str = "short", ranks: int = 1) -> dict[str, Any]:
    row = new_row(Identity("naps", "plain", Case(case), "cpu", ranks), "smoke", None)
    row["time"] = {"ratio": 0.5, "interval": [0.25, 0.75], "peer": "the_slow_one"}
    row["memory"] = {"tensors": 2**20, "peak": 2**20, "budget": 2**21}
    row["verdict"] = "pass"
    return {"group": QUESTION, "stats": {"median": 0.25, "q1": 0.24, "q3": 0.2625}, "extra_info": row}


def _table(*entries: dict[str, Any], columns: Any = None, every_column: bool = False) -> list[str]:
    questions = Questions()
    questions.state(pytest.mark.question(QUESTION, columns=columns).mark)
    [(title, lines)] = render(list(entries), questions, every_column)
    assert title == QUESTION
    return lines


def _names(lines: list[str]) -> list[str]:
    return [name.strip() for name in lines[0].split("  ") if name]


def test_a_question_that_names_none_has_seven_columns() -> None:
    lines = _table(_entry())
    assert _names(lines) == list(DEFAULT) and len(DEFAULT) == 7
    assert lines[2].split() == [
        *(
            "short",
            "plain",
            "250.0",
            "[240.0,",
            "262.5]",
            "0.5",
            "[0.25,",
            "0.75]",
            "the_slow_one",
            "1.00",
            "2.00",
            "pass",
        )
    ]


def test_a_question_shows_the_columns_that_it_names_and_that_a_row_fills() -> None:
    lines = _table(_entry(), columns=["implementation", "peak MiB", "MFU", "verdict"])
    assert [line.split() for line in (lines[0], lines[2])] == [
        ["implementation", "peak", "MiB", "verdict"],
        ["plain", "1.00", "pass"],
    ]


def test_a_question_of_which_no_row_fills_a_column_shows_its_cases() -> None:
    assert _table(_entry(), columns=["MFU"]) == ["case", "-----", "short"]


def test_verbose_shows_all_columns_and_a_questions_own_where_it_stands() -> None:
    own = Column("length", lambda entry, row: str(len(row["case"]["id"])))
    lines = _table(_entry(), columns=["case", own, "verdict"], every_column=True)
    assert _names(lines) == ["case", "length", *DEFAULT[1:5], "peak MiB", *DEFAULT[5:]]
    assert lines[2].split()[:2] == ["short", "5"]


def test_an_observers_columns_stand_among_the_others() -> None:
    names = list(KNOWN)
    for group in (
        ["optimizer", "compute alone", "comm. alone", "hidden", "gathers in time", "waits ms", "rank min / max"],
        ["MFU", "compile s", "losses", "ratio to peer"],
        ["before backward MiB", "after init MiB", "before first step MiB", "first peak MiB", "second peak MiB"],
    ):
        assert names[names.index(group[0]) :][: len(group)] == group
    assert names[-1] == "verdict"


def test_a_question_may_name_each_observers_columns() -> None:
    known = [value for value in vars(observers).values() if isinstance(value, type) and issubclass(value, Observer)]
    assert {observer for observer in known if observer.columns} == set(WITH_COLUMNS)


@pytest.mark.parametrize("fills", ["kinds", "peaks", None])
def test_bytes_after_init_are_shown_where_more_than_a_steady_state_step_is_observed(fills: str | None) -> None:
    entry = _entry()
    entry["extra_info"]["memory"] |= {"phases": {"after_init": 2**20}, **({fills: {"first": 2**21}} if fills else {})}
    lines = _table(entry, columns=["case", "after init MiB", "first peak MiB"])
    columns = {"kinds": ["after init MiB"], "peaks": ["after init MiB", "first peak MiB"], None: []}
    assert _names(lines) == ["case", *columns[fills]]


class Naps(Observer):
    """A question's own observer: one column says where it stands, the other does not."""

    columns = (Column("dreams", lambda entry, row: "2"), Column("naps", lambda entry, row: "1", after="case"))


def test_verbose_shows_the_columns_of_a_questions_own_observers_too() -> None:
    questions = Questions()
    questions.observe(QUESTION, [Naps()])
    [(_, lines)] = render([_entry()], questions, every_column=True)
    names = _names(lines)
    assert names[:3] == ["case", "naps", "implementation"] and names[-2:] == ["verdict", "dreams"]


@pytest.mark.parametrize(
    ("length", "shown"),
    [
        (7, "250.0 [240.0, 262.5]  0.5 [0.25, 0.75] the_slow_one"),
        (20, "250.0  0.5 [0.25, 0.75] the_slow_one"),
        (33, "250.0  0.5 the_slow_one"),
    ],
)
def test_cells_are_brief_where_a_table_would_be_too_wide(length: int, shown: str) -> None:
    lines = _table(_entry("x" * length))
    assert len(lines[1]) <= WIDTH
    assert shown.split() == lines[2].split()[2:-3]


def test_the_last_columns_but_the_verdict_go_where_that_does_not_do() -> None:
    lines = _table(_entry("x" * 58))
    assert len(lines[1]) <= WIDTH
    assert _names(lines) == ["case", "implementation", "time ms", "ratio to peer", "verdict"]
    assert len(_table(_entry("x" * 58), every_column=True)[1]) > WIDTH
    longest = _table(_entry("x" * 200))
    assert _names(longest) == ["case", "implementation", "verdict"]


def test_rows_of_several_world_sizes_are_told_apart_without_an_eighth_column() -> None:
    lines = _table(_entry(ranks=2), _entry(ranks=4))
    assert _names(lines) == ["case", "implementation", "ranks", "time ms", "ratio to peer", "tensors MiB", "verdict"]
    assert "ranks" not in _table(_entry(ranks=2), _entry(ranks=2))[0]


TESTS = """
import pytest

@pytest.mark.question("How long?", {first})
def test_one(measure): ...

@pytest.mark.question("How long?", {second})
def test_two(measure): ...
"""


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ('columns=["case", "tme ms"]', "", "has no column 'tme ms'; the columns are case, implementation, *"),
        (f"columns={list(KNOWN)[:8]}", "", "has 8 columns, and a table shows 7 at most; -v shows all"),
        (
            'columns=["case"]',
            'columns=["case", "MFU"]',
            "has two lists of columns, where its tests share one: case and case, MFU",
        ),
        ('short="a"', 'short="b"', "has two short forms, where its tests share one: a and b"),
        ('anwser="a"', "", "takes columns, short, answer, derivation, plots, not anwser"),
    ],
    ids=["unknown_column", "too_many", "two_lists", "two_short_forms", "unknown"],
)
def test_what_a_question_cannot_say_is_one_line_and_status_4(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, first: str, second: str, message: str
) -> None:
    tests = TESTS.format(first=first, second=second)
    project = make_project(pytester, monkeypatch, 'pytest_plugins = ["shardmark.plugin"]', test_bad=tests)
    result = project.runpytest_inprocess("--device=cpu")
    assert result.ret == pytest.ExitCode.USAGE_ERROR == 4
    (error,) = [line for line in result.errlines if line]
    assert fnmatchcase(error, f"ERROR: question 'How long?' {message}")
