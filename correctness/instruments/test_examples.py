"""The files of examples/ do what they say."""

from __future__ import annotations

import os
import re
import shlex

import pytest

from correctness.support.paths import ROOT
from correctness.support.planted_rows import figures, run
from correctness.support.planted_rows import planted as planted
from correctness.support.repository import commit

pytest_plugins = ["pytester"]


def test_the_workflow_gates_and_updates(planted: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its commands, in a repository that measures in perf/."""
    monkeypatch.setenv("GITHUB_BASE_REF", "main")
    commit(planted.path, tag="origin/main")
    (planted.path / "perf").mkdir()
    (planted.path / "test_planted.py").rename(planted.path / "perf" / "test_planted.py")
    workflow = (ROOT / "examples" / "github-workflow.yml").read_text()
    commands = re.findall(r"^ +- run: pytest (.+)$", workflow, re.MULTILINE)
    gate, update = (shlex.split(os.path.expandvars(command)) for command in commands)
    missing = run(planted, *gate, a=figures())
    assert missing.ret == 4
    missing.stderr.fnmatch_lines(["ERROR: --against perf/baseline.json: No such file or directory"])
    run(planted, *update, a=figures()).assert_outcomes(passed=1)
    run(planted, *gate, a=figures()).assert_outcomes(passed=1)
    run(planted, *gate, a=figures(tensors=4001)).assert_outcomes(failed=1)
    assert (planted.path / "new.json").exists()
    assert "## Against baseline.json: 1 slower or larger" in (planted.path / "new.md").read_text()
