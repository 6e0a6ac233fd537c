"""A repository with a step whose time, memory and counters are known, to be changed by a known share."""

from __future__ import annotations

import json
import shutil
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "before"
"""The tag of the version before a change."""


@dataclass(frozen=True)
class Step:
    """The work of the step: `repeated` passes forward and backward, each of which allocates and frees blocks of 64 and
    256 KiB; every `stall_every`-th step does `stall` times as many; iterations of Python; all-reduces; copies; bytes
    that are held. `peer` are the peer's passes."""

    repeated: int
    peer: int
    stall_every: int = 0
    stall: int = 3
    python: int = 1000
    collectives: int = 4
    copies: int = 1
    held: int = 1_000_000


CONFTEST = "import steps  # noqa: F401  (registers the family)\n"
PYTEST_INI = (
    "[pytest]\npythonpath = .\naddopts = --import-mode=importlib --benchmark-min-rounds=6 --benchmark-max-time=0.5\n"
)
STEPS = '''
"""The step that is measured."""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from model import make_model

from shardmark.api import Family, Race, add_family, register

GIVEN = json.loads(Path(__file__).with_name("step.json").read_text())


@dataclass(frozen=True)
class Case:
    ranks: int
    dtype: str = "float32"

    def __str__(self):
        return f"{self.ranks}ranks"


class Passes:
    """`step(number)` does that many passes."""


class Repeat:
    backend = "torch"

    def __init__(self, implementation, case, device):
        self.passes, self.number = implementation.target(), 0
        self.mine = implementation.name == "mine"
        self.model, self.inputs = make_model()
        self.gradients = torch.zeros(4 * 96 * 96)
        self.held = torch.zeros(GIVEN["held"] // 4 if self.mine else 1)

    def prepare(self):
        self.model.zero_grad()

    def step(self, mark):
        self.number += 1
        stalls = self.mine and GIVEN["stall_every"] and self.number % GIVEN["stall_every"] == 0
        for _ in range(self.passes * (GIVEN["stall"] if stalls else 1)):
            self.model(self.inputs).square().mean().backward()
        total = 0
        for i in range(GIVEN["python"] if self.mine else 1000):
            total += i
        for _ in range(GIVEN["copies"] if self.mine else 1):
            self.inputs.clone()
        for bucket in self.gradients.chunk(GIVEN["collectives"] if self.mine else 4):
            if dist.get_world_size() > 1:
                dist.all_reduce(bucket)


add_family(Family("passes", Passes, reference="peer", check=lambda target, device: None))
register("passes", "peer", lambda: GIVEN["peer"])
register("passes", "mine", lambda: GIVEN["repeated"], time=Race("peer"))
'''
TEST = '''
"""One row for each number of ranks."""

import pytest
from steps import Case, Repeat

from shardmark.api import Work


@pytest.mark.family("passes")
@pytest.mark.parametrize("ranks", [1, 2], ids=["1ranks", "2ranks"])
def test_step(implementation, ranks, measure):
    measure(Repeat, implementation, Case(ranks), work=Work(flops=1), world_size=ranks)
'''


def make(folder: Path, step: Step) -> None:
    """Write the repository, and tag it."""
    files = {"conftest.py": CONFTEST, "pytest.ini": PYTEST_INI, "steps.py": STEPS, "test_step.py": TEST}
    for name, text in files.items():
        (folder / name).write_text(text.lstrip("\n"))
    shutil.copy(Path(__file__).with_name("model.py"), folder)
    change(folder, step)
    who = ["-c", "user.name=study", "-c", "user.email=study@example.org"]
    for command in (["init", "-q"], ["add", "."], [*who, "commit", "-q", "-m", "before"], ["tag", NAME]):
        subprocess.run(["git", "-C", str(folder), *command], check=True)


def change(folder: Path, step: Step) -> None:
    """Change the step."""
    (folder / "step.json").write_text(json.dumps(asdict(step)))
