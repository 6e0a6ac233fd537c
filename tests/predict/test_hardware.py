"""Known hardware and a user's own file: figures in their units, and one clear line for what is wrong."""

import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from correctness.support.paths import ROOT
from shardmark.meter.hardware import TABLE, Reached, hardware, known_hardware
from shardmark.meter.roofline import published_peak

GPUS = [name for name in known_hardware() if name != "cpu"]
GIB = 2**30

MINE = """
device = "cuda"
capability = [9, 0]
memory_bytes = 1_000
blas_workspace_bytes = 10
flops = { float32 = 1e12 }
bandwidth = 1e9
sm_count = 1
link = 1e9
latency = 1e-6
devices_per_node = 2
network = 1e9
network_latency = 2e-6
"""


@pytest.fixture
def mine(tmp_path: Path) -> Callable[[str], str]:
    """The path of a file of one's own with that text."""

    def write(text: str) -> str:
        path = tmp_path / "mine.toml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize("name", GPUS)
def test_figures_are_in_their_units(name: str) -> None:
    known = hardware(name)
    assert 15 * GIB < known.memory_bytes < 200 * GIB
    assert 10e12 < known.flops["float32"] <= max(known.flops.values()) < 10e15
    assert 0.5e12 < known.bandwidth < 10e12 and 20e9 < known.link < 1e12 and 1e9 < known.network <= known.link
    assert 1e-6 < known.latency < known.network_latency < 1e-4
    assert 80 <= known.sm_count <= 304 and known.devices_per_node in (8, 72)


@pytest.mark.parametrize("name", GPUS)
def test_fewer_bits_are_no_slower(name: str) -> None:
    flops = hardware(name).flops
    rates = [flops[dtype] for dtype in ("float8", "float16", "tf32", "float32") if dtype in flops]
    assert rates == sorted(rates, reverse=True)
    assert flops.get("bfloat16", flops["float16"]) == flops["float16"]


@pytest.mark.parametrize("name", GPUS)
def test_memory_is_what_the_name_says_less_what_the_driver_keeps(name: str) -> None:
    sizes = {"h100-pcie": 80, "h200": 141, "b200": 180, "gb200": 186, "rtx-4090": 24, "mi300x": 192}
    sold = sizes.get(name) or int(name.rpartition("-")[2].removesuffix("gb"))
    assert 0.95 * sold * 1e9 < hardware(name).memory_bytes <= sold * GIB


def test_only_hopper_has_the_larger_workspace_of_cublas() -> None:
    """PyTorch's default: two of 4096 KiB and eight of 16 KiB; 32 MiB where the capability is 9.0."""
    small = 2 * 4096 * 1024 + 8 * 16 * 1024
    for name in GPUS:
        known = hardware(name)
        if known.capability is not None:
            assert known.blas_workspace_bytes == (32 * 2**20 if known.capability == (9, 0) else small)


def test_each_table_says_where_it_is_from() -> None:
    blocks = TABLE.read_text().split("\n\n")[1:]
    assert len(blocks) == len(known_hardware()) and all(block.startswith("# ") for block in blocks)


def test_a_cpu_has_no_rates_that_anyone_could_know() -> None:
    cpu = hardware("cpu")
    assert cpu.device == "cpu" and cpu.blas_workspace_bytes == 0
    assert all(math.isnan(rate) for rate in (cpu.bandwidth, cpu.link, cpu.network, *cpu.flops.values()))


@pytest.mark.parametrize(
    ("reported", "name"),
    [("NVIDIA H100 80GB HBM3", "h100-80gb"), ("NVIDIA H100 PCIe", "h100-pcie"), ("NVIDIA GB200", "gb200")],
)
def test_the_peak_of_a_device_at_hand_is_that_of_the_table(reported: str, name: str) -> None:
    assert published_peak(reported, torch.bfloat16) == hardware(name).flops["bfloat16"]


def test_a_file_of_ones_own_is_taken(mine: Callable[[str], str]) -> None:
    own = hardware(mine(MINE))
    assert (own.name, own.capability, own.flops) == ("mine", (9, 0), {"float32": 1e12})
    assert hardware(mine(MINE.replace("capability = [9, 0]\n", ""))).capability is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (MINE.replace("bandwidth = 1e9\nsm_count = 1\n", ""), "missing bandwidth, sm_count"),
        (MINE + "memory = 1\nspeed = 2\n", "unknown memory, speed; the keys are device, memory_bytes, "),
        (MINE.replace("memory_bytes = 1_000", 'memory_bytes = "80 GB"'), "memory_bytes = '80 GB' is not"),
        (MINE.replace("memory_bytes = 1_000", "memory_bytes = 1e3"), "memory_bytes = 1000.0 is not a positive whole"),
        (MINE.replace("bandwidth = 1e9", "bandwidth = -1e9"), "bandwidth = -1000000000.0 is not a positive"),
        (MINE.replace("bandwidth = 1e9", "bandwidth = true"), "bandwidth = True is not a positive number of bytes/s"),
        (MINE.replace("latency = 1e-6", "latency = nan"), "latency = nan is not a positive number of seconds"),
        (MINE.replace("link = 1e9", "link = inf"), "link = inf is not a positive number of bytes/s"),
        (MINE.replace("sm_count = 1", "sm_count = 0"), "sm_count = 0 is not a positive whole number of "),
        (MINE.replace('"cuda"', '"tpu"'), 'device = \'tpu\' is neither "cuda" nor "cpu"'),
        (MINE.replace("[9, 0]", "9.0"), "capability = 9.0 is not [major, minor]"),
        (MINE.replace("{ float32 = 1e12 }", "1e12"), "flops = 1000000000000.0 is not a table of FLOP/s of float32"),
        (MINE.replace("float32 =", "half ="), "flops = {'half': 1000000000000.0} is not a table of FLOP/s of float32"),
        (MINE.replace("1e12", "'1 TFLOP/s'"), "flops.float32 = '1 TFLOP/s' is not a positive number of FLOP/s"),
        ("device = ", "mine.toml is not TOML: "),
    ],
)
def test_a_wrong_file_is_one_line(text: str, reason: str, mine: Callable[[str], str]) -> None:
    with pytest.raises(ValueError, match=r"mine\.toml") as error:
        hardware(mine(text))
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_the_document_names_what_is_known_and_its_example_is_a_file(mine: Callable[[str], str]) -> None:
    text = (ROOT / "docs" / "hardware.md").read_text(encoding="utf-8")
    assert [name for name in known_hardware() if f"`{name}`" not in text] == []
    example, reached = re.findall(r"```toml\n(.*?)```", text, flags=re.S)
    own, known = hardware(mine(example)), hardware("h100-80gb")
    assert replace(own, name=known.name, flops=known.flops, reached=known.reached) == known
    assert hardware(mine(example + reached)).reached == own.reached == Reached()


def test_a_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"mine\.toml: No such file or directory"):
        hardware(str(tmp_path / "mine.toml"))


def test_an_unknown_name_is_told_the_known_ones() -> None:
    with pytest.raises(
        ValueError, match=r"no hardware is known as 'h1000'; known is cpu, v100-16gb, .*, mi300x, this, or a"
    ):
        hardware("h1000")


def test_no_file_is_the_machine_at_hand(tmp_path: Path) -> None:
    (tmp_path / "this.toml").write_text("")
    with pytest.raises(ValueError, match=r"this\.toml: this is the machine at hand, and no file's name"):
        hardware(str(tmp_path / "this.toml"))
