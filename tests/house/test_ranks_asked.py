"""Contracts run on the numbers of ranks that the user asks for, those of PyTorch's own techniques too."""

import subprocess
import sys

from correctness.support.paths import ROOT
from tests.support.runs import environment_of_a_run

FILES = (
    "correctness/data_parallel/test_training.py",
    "correctness/fsdp/test_contract_ranks.py",
    "correctness/mesh/test_training.py",
    "correctness/tensor_parallel/test_calls.py",
)


def collected(*options: str) -> list[str]:
    """The tests of `FILES` that a run with these options has."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-n0", "-q", "--collect-only", "--device=cpu"]
    done = subprocess.run(
        [*command, *options, *FILES], cwd=ROOT, env=environment_of_a_run(), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def named(tests: list[str], *parts: str) -> list[str]:
    return [test for test in tests if all(part in test for part in parts)]


def test_four_ranks_that_are_asked_for_have_every_contract() -> None:
    usual, asked = collected(), collected("--ranks=2,4")
    for name in ("[ddp-", "[naive-", "[fsdp2-", "[simple-"):
        on_two, on_four = named(usual, name, "2ranks"), named(asked, name, "4ranks")
        assert on_two and on_four == [test.replace("2ranks", "4ranks") for test in on_two]
        assert not named(usual, name, "3ranks")  # by default the others stand for them
    assert named(asked, "[library-dp2_tp2-") and not named(usual, "[library-dp2_tp2-")


def test_tests_without_a_mesh_of_that_size_are_collected() -> None:
    assert named(collected("--ranks=3"), "NOTSET")
