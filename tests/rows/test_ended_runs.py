"""A signal at any moment of a run: the rows that were measured are in the file, and unless it killed, in the table."""

import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.runs import CONFTEST, forked, numbers, project
from tests.support.steps import SignalAt, SignalIn

INT, TERM, HUP, KILL = signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL
FIRST_STEP_OF_THE_SECOND_ROW = 7

TEARDOWN = """
import os, signal
import pytest

@pytest.fixture(scope="session", autouse=True)
def torn_down():
    yield
    os.kill(os.getpid(), signal.SIGTERM)
"""


@dataclass(frozen=True)
class Moment:
    """When a signal comes, how many rows are measured by then, and how the run ends."""

    name: str
    fault: Callable[[tuple[signal.Signals, ...]], Callable[[], object]]
    rows: int
    status: int = 2
    table: bool = True


MOMENTS = [
    Moment("options are checked", lambda n: SignalIn("plugin.session:read_budgets", n), 0, status=4, table=False),
    Moment("collecting", lambda n: SignalIn("plugin.session:Session.count_judgements", n), 0, table=False),
    Moment("before the first row", lambda n: SignalIn("plugin.measure:Measure.record", n), 0, table=False),
    Moment("first row half written", lambda n: SignalAt(n[0], 2), 1),
    Moment("between rows", lambda n: SignalIn("plugin.measure:Measure.record", n, call=2), 1),
    Moment("as the second row is judged", lambda n: SignalIn("verdict.budget:verdicts", n, call=2), 2),
    Moment("second row half written", lambda n: SignalAt(n[0], FIRST_STEP_OF_THE_SECOND_ROW + 1), 2),
    Moment("last rewrite", lambda n: SignalIn("rows.writer:RowFile._write_whole", n), 3),
    Moment("after the last rewrite", lambda n: SignalIn("rows.writer:RowFile._write_whole", n, after=True), 3),
    Moment("summary", lambda n: SignalIn("plugin:write_summary", n), 3, status=0),
    Moment("ranks end", lambda n: SignalIn("ranks.worlds:Worlds.close", n), 3, status=0),
]
EVERY_TIME = ("options are checked", "as the second row is judged", "first row half written", "ranks end")


def moments(every_time: tuple[str, ...] = EVERY_TIME) -> Any:
    """All moments; those that are not in `every_time` only in the sweep."""
    return pytest.mark.parametrize(
        "moment", [pytest.param(m, id=m.name, marks=[] if m.name in every_time else pytest.mark.sweep) for m in MOMENTS]
    )


OPTIONS = ("--benchmark-json=out.json", "--budgets=budgets.toml", "-k", "test_row")


def leftovers(folder: Path) -> set[str]:
    return {each.name for each in folder.iterdir() if each.name.startswith((".out", "shardmark-", "out"))}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "budgets.toml").write_text("")
    return project(tmp_path)


@pytest.mark.parametrize(
    "number", [TERM, *(pytest.param(n, marks=pytest.mark.sweep) for n in (INT, HUP))], ids=lambda number: number.name
)
@moments()
def test_a_signal_ends_the_run_with_its_rows_and_tables(moment: Moment, number: signal.Signals, folder: Path) -> None:
    ended = forked(folder, *OPTIONS, fault=moment.fault((number,)))
    assert (ended.status, ended.has_screen) == (moment.status, moment.table), ended.output
    assert ended.rows() == list(range(moment.rows))
    assert leftovers(folder) == ({"out.json"} if moment.rows else set())
    assert "Traceback" not in ended.output


@moments(every_time=("second row half written",))
def test_a_killed_run_has_the_rows_before_and_the_next_one_takes_over(moment: Moment, folder: Path) -> None:
    ended = forked(folder, *OPTIONS, fault=moment.fault((KILL,)))
    assert ended.status == -KILL
    half = "half written" in moment.name
    unsaved = half or "judged" in moment.name
    assert len(ended.rows()) in ((moment.rows - 1, moment.rows) if unsaved else (moment.rows,))
    assert leftovers(folder) <= {"out.json", ".out.json.partial", ".out.json.aside"}
    if half:
        again = forked(folder, *OPTIONS)
        assert (again.status, again.rows(), leftovers(folder)) == (0, [0, 1, 2], {"out.json"})


@pytest.mark.parametrize(
    "numbers",
    [
        pytest.param((TERM, HUP), id="TERM_HUP", marks=pytest.mark.sweep),
        pytest.param((INT, INT, INT), id="INT_INT_INT", marks=pytest.mark.sweep),
    ],
)
def test_signals_that_come_together_are_one(numbers: tuple[signal.Signals, ...], folder: Path) -> None:
    """A scheduler sends SIGTERM and SIGHUP at once; a user presses Ctrl-C three times."""
    ended = forked(folder, *OPTIONS, fault=SignalIn("rows.writer:RowFile.add", numbers, after=True, call=2))
    assert ended.rows() == [0, 1] and ended.has_screen and ended.status == 2, ended.output
    ended = forked(folder, *OPTIONS, fault=SignalIn("rows.writer:RowFile._write_whole", numbers))
    assert ended.rows() == [0, 1, 2] and ended.has_screen and ended.status == 2, ended.output


NO_LINES = """
import signal

def interrupt():
    signal.raise_signal(signal.SIGINT)

interrupt.__code__ = interrupt.__code__.replace(co_linetable=b"")

def test_row_interrupted():
    interrupt()
"""


def test_ctrl_c_at_an_instruction_without_a_line_costs_no_table(folder: Path) -> None:
    """The compiler writes some, and there pytest 9 cannot show the frame."""
    project(folder, test_zz=NO_LINES)
    ended = forked(folder, *OPTIONS)
    assert ended.status == 2 and ended.rows() == [0, 1, 2] and ended.has_screen, ended.output


DROPS = """
import os, signal, time

from shardmark.ranks import signals
from shardmark.ranks.deadline import within

signals.AGAIN = 0.1

class Callback:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)  # Python drops what is raised here

def test_row_dropped():
    with within(100):  # it has a timer of its own
        Callback()
    time.sleep(60)
    os._exit(1)
"""


def test_a_signal_that_other_code_drops_comes_again(folder: Path) -> None:
    ended = forked(project(folder, test_zz=DROPS), *OPTIONS)
    assert ended.status == 2 and ended.rows() == [0, 1, 2] and ended.has_screen, ended.output


def hang_up_below_nohup() -> None:
    signal.signal(HUP, signal.SIG_IGN)
    SignalIn("plugin.measure:Measure.record", (HUP,), call=2)()


def test_a_signal_that_is_ignored_ends_nothing(folder: Path) -> None:
    ended = forked(folder, *OPTIONS, fault=hang_up_below_nohup)
    assert (ended.status, ended.rows()) == (0, [0, 1, 2]) and ended.has_screen, ended.output


def test_a_signal_as_fixtures_are_torn_down_costs_no_table(folder: Path) -> None:
    project(folder, test_atorn=TEARDOWN, conftest=CONFTEST + TEARDOWN)
    ended = forked(folder, *OPTIONS)
    assert ended.rows() == [0, 1, 2] and ended.has_screen, ended.output


def test_killed_while_rows_are_rescued_it_still_has_them(folder: Path) -> None:
    temporary = folder / "tmp"
    temporary.mkdir()
    vanishing = "import shutil\n\ndef test_vanish():\n    shutil.rmtree('results')\n"
    for fault, rows in (
        (SignalIn("rows.writer:RowFile._say_where_they_are", (KILL,)), [0, 1, 2]),
        (SignalIn("rows.writer:RowFile._say_where_they_are", (TERM,)), [0, 1, 2]),
        (SignalIn("rows.writer:RowFile._rescue", (TERM,)), [0]),
    ):
        (folder / "results").mkdir(exist_ok=True)
        project(folder, test_avanish=vanishing)
        options = ("--benchmark-json=results/out.json", "-k", "test_row or test_vanish")
        ended = forked(folder, *options, fault=fault, environment={"TMPDIR": str(temporary)})
        (rescued,) = temporary.glob("shardmark-rows-*.json")
        assert numbers(rescued) == rows
        assert KILL in fault.numbers or (ended.has_screen and len(ended.lines(f"all rows are in {rescued}")) == 2)
        for left in temporary.iterdir():
            left.unlink()
