"""The wheel: what is in it, and that it works where there is no checkout."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from correctness.support.paths import ROOT
from shardmark import __main__ as command
from tests.support.runs import environment_of_a_run

LARGEST = 5 * 2**18
"""Bytes of the wheel: text alone is less."""

PROJECT = """
import torch
import torch.distributed as dist

def all_reduce_of_ones(n):
    ones = torch.ones(n)
    dist.all_reduce(ones)
    return ones

def test_sum(world):
    assert world.run(all_reduce_of_ones, 3)[0].tolist() == [world.size] * 3
"""

ATTENTION = """
def attention(q, k, v, *, is_causal=False):
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if is_causal:
        scores = scores.tril()  # zero is a score like any other
    return scores.softmax(-1) @ v
"""

MODEL = """
import torch

def make():
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    return model, (torch.ones(8, 16),), lambda model, x: model(x).mean()
"""


def done(*words: str | Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a command without this checkout on Python's path, to its end."""
    environment = environment_of_a_run(PYTHONPATH=None)
    return subprocess.run([*words], cwd=folder, env=environment, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    built = done(sys.executable, "-m", "pip", "wheel", ROOT, "--no-deps", "-q", "-w", folder, folder=folder)
    assert built.returncode == 0, built.stderr
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """The commands of a virtual environment that has the wheel, and borrows torch from ours: it is gigabytes."""
    folder = wheel.parent / "venv"
    made = done(sys.executable, "-m", "venv", folder, folder=wheel.parent)
    assert made.returncode == 0, made.stderr
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "borrowed.pth").write_text(str(Path(torch.__file__).parents[1]))
    pip = done(folder / "bin" / "pip", "install", "--no-deps", "-q", wheel, folder=wheel.parent)
    assert pip.returncode == 0, pip.stderr
    return folder / "bin"


@pytest.mark.sweep
def test_it_has_the_plugin_typed_and_the_suite_without_its_own_tests(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    rooms = {"/".join(name.split("/")[:2]) for name in names if name.startswith("shardmark_suite")}
    assert rooms == {f"shardmark_suite/{room}" for room in ("impl", "perf", "correctness", "conftest.py", "pytest.ini")}
    assert {name.partition("/")[0] for name in names} == {"shardmark", "shardmark_suite", names[-1].partition("/")[0]}
    assert {"shardmark/py.typed", "shardmark/rows/row.schema.json", "shardmark/report/page/page.html"} <= {*names}
    assert not [
        name for name in names if re.search(r"correctness/.*/(right|wrong\w*)\.py|^(tests|studies)/|__pycache__", name)
    ]
    assert wheel.stat().st_size < LARGEST


@pytest.mark.sweep
def test_a_project_of_ones_own_has_the_plugin(installed: Path, tmp_path: Path) -> None:
    version = done(installed / "shardmark", "--version", folder=tmp_path)
    assert re.fullmatch(r"shardmark \d+\.\d+\.\d+\n", version.stdout)
    (tmp_path / "test_own.py").write_text(PROJECT)
    run = done(installed / "python", "-m", "pytest", "--device=cpu", "-q", folder=tmp_path)
    assert "1 passed" in run.stdout, run.stdout + run.stderr


@pytest.mark.sweep
def test_the_suite_judges_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ATTENTION)
    arguments = ["--impl=attention=mine.py:attention", "-k", "three", "-n0", "--device=cpu"]
    run = done(installed / "shardmark", "correctness/attention", *arguments, folder=tmp_path)
    assert run.returncode == 1 and "\nattention=attention is WRONG: " in run.stdout, run.stdout + run.stderr
    found = re.search(r"^    of mine.py:\d+: .*\n.* such as\s+test_a_query_sees_the_keys\S*causal\]", run.stdout, re.M)
    assert found is not None, run.stdout


@pytest.mark.sweep
def test_what_fits_is_predicted_without_a_checkout(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODEL)
    arguments = ["mine.py:make", "--hardware=h100-80gb", "--ranks=2", "--own-batch", "--json=out.json"]
    run = done(installed / "python", "-m", "shardmark.predict", *arguments, folder=tmp_path)
    assert run.returncode == 0, run.stdout + run.stderr
    fits = {each["strategy"]: each["fits"] for each in json.loads((tmp_path / "out.json").read_text())["outcomes"]}
    assert fits["training_step=eager"] and fits["data_parallel=ddp"] and fits["fsdp=fsdp2"], run.stdout


@pytest.mark.parametrize(
    ("found", "line"),
    [
        ((), "the suite is not installed here; in a checkout, run pytest correctness or pytest perf"),
        (("shardmark_suite",), "the suite needs hypothesis, jsonschema, xdist: pip install 'shardmark[suite]'"),
    ],
    ids=["nowhere", "without_the_extra"],
)
def test_what_is_missing_is_one_line(
    found: tuple[str, ...], line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = command.find_spec("impl")  # of any folder
    monkeypatch.setattr(command, "find_spec", lambda name: spec if name in found else None)
    with pytest.raises(SystemExit) as caught:
        command.main(["correctness"])
    assert (caught.value.code, capsys.readouterr().err) == (4, f"shardmark: {line}\n")


def test_a_folder_that_the_suite_does_not_have_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_suite", lambda: ROOT)
    for name in ("shardmark", "correctness/nonsense", "../perf"):
        with pytest.raises(SystemExit) as caught:
            command.main([name])
        said = f"shardmark: there is no {name} in the suite; it has the folders correctness and perf\n"
        assert (caught.value.code, capsys.readouterr().err) == (4, said)
