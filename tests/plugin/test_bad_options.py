"""Every option with every kind of wrong value: one line, exit status 4, nothing measured and nothing left."""

import os
import sys
from pathlib import Path

import pytest
import torch

from tests.support.project import make_project
from tests.support.project import project as project
from tests.support.runs import CONFTEST, ROWS

pytest_plugins = ["pytester"]

WORDS = ["", "words", "nan", "1e999", "\x1b[31mred", "two\nlines", "\udcff", "ünï", ",", "1,,2", "/", "0x"]
"""Values that no option with a word or a number takes."""
CHOICES = {
    "--device": (WORDS, "--device is one of auto, cpu, cuda, not *"),
    "--scale": (WORDS, "--scale is one of auto, smoke, laptop, paper, full, not *"),
    "--ranks": ([*WORDS, "-1", "0", "2.5", "9" * 30], "--ranks *"),
    "--link": ([*WORDS, "-1", "0gbit", "1", "infgbit"], "--link *: a link's rate is written as *, not *"),
    "--seed": ([*WORDS, "-1", "2.5", "inf", str(2**63)], "--seed is a whole number from 0 to *, not *"),
    "--simulate": (
        [*WORDS, "tpu", "cpu:", "cpu:0", "cpu:-1", "cpu:2.5", "cpu:100001", "cpu:²", "h100:8"],
        "--simulate *: *",
    ),
    "--deadline": ([*WORDS, "-1", "0", "inf", "-inf", "2e6"], "--deadline is seconds, more than 0 and *, not *"),
    "--impl": ([*WORDS, "=", "attention", "attention=", "=x"], "--impl takes FAMILY=TARGET, not *"),
    "--model": ([*WORDS, "none.py:make", "os:none", "os:sep", ":make"], "--model *"),
    "--optimizer": ([*WORDS, "torch.optim.SGD(0.1)"], "--optimizer says how your own model is trained: it needs *"),
    "--compute-dtype": ([*WORDS, "bfloat16"], "--compute-dtype says how your own model is trained: it needs *"),
    "--micro-batches": ([*WORDS, "0"], "--micro-batches says how your own model is trained: it needs --model"),
    "--routing": ([*WORDS, "0.5,0.5"], "--routing says how your own model is trained: it needs --model"),
    "--clip": ([*WORDS, "nan"], "--clip says how your own model is trained: it needs --model"),
    "--benchmark-min-rounds": (["9" * 30], "--benchmark-min-rounds is a number from 0 to 1e+06, not *"),
    "--benchmark-max-time": (["-1", "nan", "inf"], "--benchmark-max-time is a number from 0 to 1e+06, not *"),
    "--benchmark-warmup-iterations": (["-1", "9" * 30], "--benchmark-warmup-iterations is a number from 0 to *, not *"),
    "--benchmark-group-by": (["words", "group,words"], "--benchmark-group-by is of group, *, param:NAME, not 'words'"),
    "--benchmark-compare-fail": (["min:5%"], "--benchmark-compare-fail needs --benchmark-compare, *"),
    "--benchmark-storage": (["http://x"], "--benchmark-storage is file://PATH or elasticsearch+http://HOST, not *"),
}
NO_PATHS = ["", "/", "a\0b", "long" * 100, "y/" * 3000, "/proc/nothing/x", "loop", "fifo", "/dev/full", "\x1b[31m/x/y"]
"""Paths of what can be neither read nor written as a file."""
PATHS = {
    "--benchmark-json": [*NO_PATHS, ".", "folder", "/dev/null", "none/x", "dangling"],
    "--against": [*NO_PATHS, ".", "folder", "/dev/null", "none/x", "dangling", "binary", "file"],
    "--budgets": [*NO_PATHS, ".", "folder", "/dev/null", "none/x", "dangling", "binary"],
    "--report": [*NO_PATHS, ".", "folder", "/dev/null", "none/x", "file", "none/x.html", "y" * 300 + ".html"],
    "--trace-dir": ["", "a\0b", "long" * 100, "y/" * 3000, "/proc/x", "loop", "fifo", "/dev/full", "file", "file/x"],
}
SEVERAL = {
    "--device=cpu --device=tpu": "--device is one of *, not 'tpu'",
    "--impl=none=x --impl=none=y": "no family 'none'; *",
    "--trace-dir=new/er --benchmark-json=none/x": "--benchmark-json none/x: there is no folder none",
    "--benchmark-json=out.json --benchmark-max-time=nan": "--benchmark-max-time is *",
    "--benchmark-json=out.json --trace-dir=file": "--trace-dir file: *",
    "--report=page.txt": "--report page.txt: expected a page (.html) or Markdown (.md)",
    "--report=none/x.html": "--report none/x.html: there is no folder none",
    "--report=new.html --trace-dir=file": "--trace-dir file: *",
    "--simulate=cpu:2 --ranks=2": "--simulate runs nothing: not with --ranks",
    "--ranks=two": "--ranks takes world sizes such as 2,4, not 'two'",
    "--ranks=2,9999": "--ranks 2,9999: 9999 ranks are more than this machine allows: *",
    "--ranks=0": "--ranks 0: a world has at least one rank, not 0",
    "--impl=optimiser=adam": "no family 'optimiser'; the families are *",
    "--impl=attention=nonesuch": "attention has no implementation 'nonesuch'; registered are *",
    "--impl=attention=own.py:": "attention has no implementation 'own.py:'; *",
    "--impl=attention=math:nonesuch": "attention=math:nonesuch: math has no 'nonesuch'",
    "--impl=attention=no_such:f": "attention=no_such:f: cannot import no_such: ModuleNotFoundError: No module named *",
    "--impl=attention=missing.py:f": "attention=missing.py:f: cannot import *missing.py: FileNotFoundError*",
    "--impl=attention=math:cos": "attention=math:cos does not meet the attention contract: expected (q, k, v, *",
    "--link=fast": "--link fast: a link's rate is written as 1gbit or 100mbit, not 'fast'",
    "--budgets=missing.toml": "--budgets missing.toml: No such file or directory",
    "--accept=missing.toml": "--accept needs --against or --against-ref, which name *",
    "--accept=missing.toml --against-ref=HEAD": "--accept missing.toml: No such file or directory",
    "--accept=nan.toml --against-ref=HEAD": '--accept nan.toml: ["x"] takes `time`, `memory` or `counters`, and *',
    "--trace-dir=file/x": "--trace-dir file/x: it is to be a folder, and cannot be: *",
    "--update-baseline": "--update-baseline needs --against, which names the file",
    "--update-baseline --against=none/x": "--update-baseline none/x: there is no folder none",
    "--update-baseline --against=folder": "--update-baseline folder: *",
    "--update-baseline --against=file": "--against file is not whole JSON: *",
    "--update-baseline --against=new --trace-dir=file": "--trace-dir file: *",
    "--benchmark-json=new --against=new --update-baseline": "--against new is the file of --benchmark-json too: *",
    "--budgets=nan.toml --benchmark-json=out.json": '--budgets nan.toml: ["x"] seconds = nan is not a positive number',
}
if not torch.cuda.is_available():
    SEVERAL["--device=cuda --ranks=4"] = "--device cuda needs 4 CUDA devices, and this machine has 0: torch *"
CASES = [([f"{option}={value}"], says) for option, (values, says) in CHOICES.items() for value in values]
CASES += [
    ([f"{option}={value}"], f"{option} *: *" if value else f"{option} *") for option in PATHS for value in PATHS[option]
]
NAMED = [(arguments.split(), says) for arguments, says in SEVERAL.items()]


@pytest.fixture
def folder(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with files that no option takes."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # all else that is left is ours
    make_project(pytester, monkeypatch, CONFTEST, test_costs=ROWS)
    here = pytester.path
    (here / "folder").mkdir()
    (here / "binary").write_bytes(b"\xff\0")
    (here / "file").write_text("")
    (here / "nan.toml").write_text("[x]\nseconds = nan")
    (here / "loop").symlink_to("loop")
    (here / "dangling").symlink_to("nowhere/x.json")
    os.mkfifo(here / "fifo")
    return here


@pytest.mark.parametrize(
    "cases", [CASES[::5] + NAMED, pytest.param(CASES, marks=pytest.mark.sweep)], ids=["some", "all"]
)
def test_a_wrong_value_is_one_line_and_nothing_is_left(
    cases: list[tuple[list[str], str]], pytester: pytest.Pytester, folder: Path
) -> None:
    before = sorted(folder.rglob("*"))
    wrong = []
    for arguments, says in cases:
        result = pytester.runpytest_inprocess("-p", "no:cacheprovider", *arguments)
        errors = [line for line in result.errlines if line]
        try:
            assert result.ret == 4 and len(errors) == 1 and not any(result.outlines)
            assert errors[0].isprintable()
            result.stderr.fnmatch_lines([f"ERROR: {says.replace('[', '[[]')}"])
            assert sorted(folder.rglob("*")) == before
        except (AssertionError, pytest.fail.Exception) as error:
            wrong.append((arguments, result.ret, errors, error))
    assert not wrong, "\n".join(f"{[each[:60] for each in case]}: {status} {lines}" for case, status, lines, _ in wrong)


OWN_FILES = {
    "RuntimeError": "raise RuntimeError('two\\nlines\\x1b[31m')",
    "GeneratorExit": "raise GeneratorExit",
    "SystemExit": "raise SystemExit(0)",
    "Own": "raise type('Own', (BaseException,), {})",
    "SyntaxError": "def f(:",
}
"""Files by the name of what their import raises."""


@pytest.mark.parametrize("raised", OWN_FILES)
def test_whatever_an_own_file_raises_is_one_line(raised: str, project: pytest.Pytester) -> None:
    project.makepyfile(own=OWN_FILES[raised])
    result = project.runpytest_inprocess("--impl=attention=own.py:f", "--benchmark-json=out.json")
    assert result.ret == 4 and not (project.path / "out.json").exists()
    (error,) = [line for line in result.errlines if line]
    assert error.isprintable() and f"own.py: {raised}: " in error
