"""A project whose family doubles a number, to be judged with `--impl`."""

import pytest

from tests.support.project import make_project

CONFTEST = """
import pytest
from shardmark.api.finding import RegistryError
from shardmark.api import Family, Refusable, add_family, register

pytest_plugins = ["shardmark.plugin"]


class Contract: ...


def check(target, device):
    if not callable(target):
        raise RegistryError("it is not callable")


odd = Refusable("odd numbers", lambda x, **_: "odd numbers" if x % 2 else None)
add_family(Family("double", Contract, reference="plain", check=check, may_refuse=(odd,)))
register("double", "plain", lambda x, exactly=True: 2 * x)
"""

TESTS = """
import time
import pytest
from shardmark.api.registry import Unsupported

pytestmark = pytest.mark.family("double")


def test_of_one(implementation, record_property):
    record_property("note", "one is doubled in one step")
    assert implementation.watched(1) == 2, "twice 1 is 2"


def test_of_three(implementation):
    assert implementation.watched(3) == 6, "twice 3 is 6"


@pytest.mark.family("double", option="exactly")
def test_exactly(implementation):
    assert implementation.watched(1, exactly=True) == 2


@pytest.mark.parametrize("number", [2, 4])
def test_even(implementation, number):
    assert implementation.watched(number) == 2 * number
"""

OWN = """
import multiprocessing
import os
import time
from shardmark.api.registry import Unsupported

def plain(x):
    return x + x

def squares(x):
    return 2 if x == 1 else x**2

def hangs(x):
    while x != 2:
        time.sleep(0.01)
    while True:
        time.sleep(0.01)

def hangs_on_ranks(x):
    while multiprocessing.parent_process() is not None:
        time.sleep(0.01)

def unsupported(x):
    raise Unsupported("it doubles nothing")

def even_alone(x):
    if x % 2:
        raise Unsupported("it doubles even numbers")
    return 2 * x

def all_but_three(x):
    if x == 3:
        raise Unsupported("it does not double 3")
    return 2 * x

def interrupted(x):
    if x == 3:
        raise KeyboardInterrupt
    return 2 * x

def dies(x):
    if x == 3:
        os.kill(os.getpid(), 9)
    return 2 * x

number = 3
"""


def make_doubling(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> pytest.Pytester:
    """A family whose implementations double a number."""
    return make_project(pytester, monkeypatch, CONFTEST, test_double=TESTS, own=OWN)


def judged(project: pytest.Pytester, *names: str, options: tuple[str, ...] = ()) -> pytest.RunResult:
    targets = [f"--impl=double=own.py:{name}" for name in names]
    return project.runpytest_inprocess("--device=cpu", "-p", "no:cacheprovider", *targets, *options)


def verdict_of(result: pytest.RunResult) -> list[str]:
    """The lines from the verdict on."""
    return result.outlines[[" is " in line and line.startswith("double=") for line in result.outlines].index(True) :]
