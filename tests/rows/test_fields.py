"""The types of a row: the schema and docs/rows.md are generated from them, and hold the fields of any observer."""

import json
import os
import subprocess
import sys

import pytest

from correctness.support.paths import ROOT
from shardmark.meter.allocations import Block as MeteredBlock
from shardmark.rows.__main__ import DOCS, SCHEMA_FILE, docs_text, fields_of, schema_text
from shardmark.rows.fill import part_of
from shardmark.rows.row import Block
from tests.support.project import make_project, run_project

pytest_plugins = ["pytester"]

COMMAND = ["python", "-m", "shardmark.rows"]


def test_the_schema_and_the_page_are_those_that_are_generated() -> None:
    fields = fields_of(COMMAND[3:])
    for path, text in ((SCHEMA_FILE, schema_text(fields)), (DOCS, docs_text(fields))):
        differs = f"{path.relative_to(ROOT)} differs from what is generated: run {' '.join(COMMAND)}"
        assert path.read_text(encoding="utf-8") == text, differs


def test_a_part_of_a_row_has_the_fields_of_its_type_alone() -> None:
    metered = MeteredBlock(8, 4096, "block", "mm", "gradients", place="pinned")
    expected = {"nbytes": 8, "address": 4096, "module": "block", "operator": "mm", "kind": "gradients"}
    assert part_of(Block, metered) == {**expected, "line": "", "workspace": ""}


OBSERVED = """
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from shardmark.meter.clock import Laps
from shardmark.meter.memory import Memory
from shardmark.meter.plan import IMPLEMENTATION, Identity, Measured
from shardmark.rows.observers import Observer
from shardmark.rows.row import Seconds

class Yawns(Observer):
    fields: ClassVar[Mapping[str, Any]] = {"time.yawn": Annotated[Seconds, "The longest yawn."]}

    def fill(self, row, ranks):
        row["time"]["yawn"] = 2.5

def test_yawn(measure):
    measured = Measured("by hand", Memory(), {IMPLEMENTATION: [Laps(0.5)]})
    measure.record(Identity("own", "mine", "a case", "cpu"), [measured], observe=[Yawns()])
"""


def test_a_field_is_one_line_of_its_observer_beside_the_one_that_fills_it(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is in the JSON, in the schema and in the table, in the type and with the words of that line."""
    project = make_project(pytester, monkeypatch, 'pytest_plugins = ["shardmark.plugin"]', test_yawns=OBSERVED)
    result, output = run_project(project, "--scale=smoke")
    result.assert_outcomes(passed=1)
    assert output["benchmarks"][0]["extra_info"]["time"]["yawn"] == 2.5
    command = [sys.executable, *COMMAND[1:3], "--print", "test_yawns"]
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{project.path}"}
    printed = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    schema, end = json.JSONDecoder().raw_decode(printed)
    found = schema["properties"]["time"]["properties"]["yawn"]
    assert found == {"type": "number", "unit": "seconds", "minimum": 0, "description": "The longest yawn."}
    assert "| `time.yawn` | seconds | The longest yawn. |" in printed[end:].splitlines()
