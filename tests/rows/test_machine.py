"""Two runs are of one machine where everything that a ratio to a peer depends on is equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shardmark.rows.baseline import Machine
from shardmark.rows.machine import _cpu_part, describe_machine

INFO: dict[str, Any] = {
    **{"device": "cpu", "gpus": [], "cores": 8, "threads": 8, "torch": "2.13.0", "python_version": "3.11.7"},
    "cpu": {"brand_raw": "AMD EPYC", "family": 25, "model": 1, "stepping": 1, "flags": ["avx2", "fma", "nonstop_tsc"]},
}


def with_cpu(**changed: Any) -> dict[str, Any]:
    return INFO | {"cpu": INFO["cpu"] | changed}


def test_one_brand_has_several_generations_and_the_parts_that_differ_are_named() -> None:
    one, other = Machine.of(INFO), Machine.of(with_cpu(model=17, flags=["avx2", "fma", "avx512f", "avx512_bf16"]))
    assert one != other
    assert one.beside(other) == "family 25 model 1 stepping 1, without these instruction sets"
    assert other.beside(one) == "family 25 model 17 stepping 1, with avx512_bf16 avx512f"
    assert str(one) == "cpu, AMD EPYC, family 25 model 1 stepping 1, 8 cores, 8 threads, torch 2.13.0, Python 3.11"


def test_another_python_is_another_machine() -> None:
    other = Machine.of(INFO | {"python_version": "3.12.1"})
    assert Machine.of(INFO).beside(other) == "Python 3.11" and other.beside(Machine.of(INFO)) == "Python 3.12"


@pytest.mark.parametrize(
    "same",
    [INFO | {"python_version": "3.11.9"}, with_cpu(flags=["avx2", "fma", "ibpb"]), INFO | {"release": "6.18"}],
    ids=["patch version of Python", "flags of Linux", "Linux"],
)
def test_an_update_of_linux_or_a_patch_of_python_makes_no_other_machine(same: dict[str, Any]) -> None:
    assert Machine.of(same) == Machine.of(INFO)


def test_a_part_that_one_file_lacks_differs_and_one_that_both_lack_does_not() -> None:
    bare: dict[str, Any] = INFO | {"cpu": {}}
    assert Machine.of(bare) == Machine.of(bare) != Machine.of(INFO)
    assert Machine.of(bare).beside(Machine.of(INFO)) == (
        "a processor without a name, a processor of unknown model, without these instruction sets"
    )


ARM = "processor\t: 0\nFeatures\t: fp asimd\nCPU implementer\t: 0x41\nCPU variant\t: 0x3\nCPU part\t: 0xd0c\n\n"


def test_on_arm_the_part_is_the_generation(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text(ARM + ARM.replace("0xd0c", "0xd40"))
    assert _cpu_part(tmp_path / "cpuinfo") == "0x41 0x3 0xd0c"
    assert _cpu_part(tmp_path / "gone") == ""
    arm = Machine.of(INFO | {"cpu": {"flags": ["asimd"]}, "cpu_part": "0x41 0x3 0xd0c"})
    assert (arm.generation, arm.instruction_sets) == ("part 0x41 0x3 0xd0c", "asimd")


def test_a_run_says_whether_instructions_can_be_counted() -> None:
    said = describe_machine("cpu")["instructions"]
    assert said == "counted" or said.startswith("not countable: ")
