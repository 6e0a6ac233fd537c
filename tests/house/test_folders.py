"""A family's tests are in its folder of correctness/, which is all that `--impl` collects."""

import re

import impl  # noqa: F401
from correctness.support.paths import ROOT
from shardmark.api.registry import FAMILIES
from tests.support.runs import Fresh


def test_each_test_is_in_the_folder_of_its_family() -> None:
    elsewhere = [
        f"{path.relative_to(ROOT)} has tests of {name}"
        for path in (ROOT / "correctness").rglob("*.py")
        for name in re.findall(r'mark\.family\("(\w+)"', path.read_text())
        if path.parent.name != FAMILIES[name].folder
    ]
    assert elsewhere == []


def test_of_other_families_nothing_is_collected() -> None:
    ended = Fresh(ROOT, ["correctness", "--impl=optimizer=plain", "--collect-only", "-n0"]).run()
    count = re.search(r"(\d+)/(\d+) tests collected", ended.output)
    assert count and 50 < int(count[1]) < int(count[2]) < 1000, ended.output
