"""How long measuring takes, before it starts and while it runs: on a terminal, and nowhere else."""

import json
import os
import pty
import re
import sys
from pathlib import Path

import pytest

from shardmark.plugin.progress import Estimate, in_words
from tests.support.project import make_project

pytest_plugins = ["pytester"]

CONFTEST = """
import pytest
pytest_plugins = ["shardmark.plugin"]

@pytest.fixture
def measure():
    '''Nothing is measured, and it takes no time.'''
"""
TESTS = """
import pytest

@pytest.mark.parametrize("size", range(30))
def test_size(size, measure): ...

@pytest.mark.skip(reason="not here")
def test_skipped(measure): ...

def test_quick(): ...
"""
REMEMBERED = Path(".pytest_cache/v/shardmark/seconds_on_cpu")


def test_what_is_left_is_what_the_tests_took_before() -> None:
    estimate = Estimate(["a", "b", "c"], {"a": 1.0, "b": 20.0, "c": 300.0, "gone": 4000.0}, usual=50000.0)
    assert estimate.left == 321
    estimate.done("a", 1.0)
    estimate.done("unknown", 0.0)
    assert estimate.left == 320
    estimate.done("c", 300.0)
    estimate.done("b", 20.0)
    assert estimate.left == 0


def test_a_test_that_is_not_remembered_takes_the_mean_of_the_others_or_what_is_usual() -> None:
    assert Estimate(["a", "b", "c"], {"a": 1.0, "b": 3.0}, usual=7.0).left == 6
    assert Estimate(["a", "b", "c"], {}, usual=7.0).left == 21


def test_how_the_run_goes_corrects_what_is_left_the_more_the_longer_it_has_run() -> None:
    """Everything takes twice as long as before."""
    tests = [str(i) for i in range(1000)]
    estimate = Estimate(tests, dict.fromkeys(tests, 1.0), usual=0.0)
    estimate.done("0", 2.0)
    assert 999 < estimate.left < 1.1 * 999
    for test in tests[1:500]:
        estimate.done(test, 2.0)
    assert 1.9 * 500 < estimate.left < 2 * 500


def test_times_are_in_words() -> None:
    seconds = (0.0, 1.4, 89.0, 90.0, 550.0, 5399.0, 9000.0)
    assert [in_words(s).removeprefix("about ") for s in seconds] == [
        "1 s",
        "1 s",
        "89 s",
        "2 min",
        "9 min",
        "90 min",
        "2.5 h",
    ]


@pytest.fixture
def project(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    return make_project(pytester, monkeypatch, CONFTEST, test_sizes=TESTS)


def test_a_pipe_gets_nothing_and_the_next_run_knows_how_long_each_test_took(project: pytest.Pytester) -> None:
    result = project.runpytest_inprocess("--device=cpu", "--scale=smoke")
    result.assert_outcomes(passed=31, skipped=1)
    assert not re.search(r"to measure|left|\x1b", result.stdout.str())
    assert set(json.loads(REMEMBERED.read_text())) == {f"test_sizes.py::test_size[{i}]" for i in range(30)}


def on_a_terminal(*arguments: str) -> str:
    """Output of a run of pytest on a terminal of 80 columns; AssertionError if the run fails."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm", COLUMNS="80")
        os.execv(sys.executable, [sys.executable, "-m", "pytest", "--device=cpu", "--color=no", *arguments])
    output = b""
    while True:
        try:
            read = os.read(terminal, 4096)
        except OSError:  # EIO: the other end is closed
            break
        if not read:
            break
        output += read
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0, output.decode()
    return output.decode()


@pytest.mark.sweep
def test_a_terminal_shows_how_long_it_will_take_and_what_is_left_beside_the_dots(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith(("PYTEST_", "TORCHELASTIC"))]:
        monkeypatch.delenv(name)
    REMEMBERED.parent.mkdir(parents=True)
    REMEMBERED.write_text(json.dumps({f"test_sizes.py::test_size[{i}]": 20.0 for i in range(30)}))
    output = on_a_terminal()
    assert output.index("30 cases to measure, about 10 min\r\n") < output.index("test_sizes.py")
    left = re.findall(r"\x1b7\x1b\[K\x1b\[(\d+)G(about \d+ \w+ left)\x1b8", output)
    assert left[0] == ("63", "about 10 min left") and {int(column) + len(text) for column, text in left} == {80}
    seconds = [int(text.split()[1]) * (60 if "min" in text else 1) for _, text in left]
    assert seconds == sorted(seconds, reverse=True) and seconds[-1] < 10  # everything is quicker than remembered
    # Without what is written beside them the lines are pytest's own.
    plain = re.sub(r"\x1b7.*?\x1b8", "", output)
    assert "\x1b" not in plain and re.search(r"\ntest_sizes.py \.{30}s\. +\[100%\]\r\n", plain)
