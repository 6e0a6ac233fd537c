"""`python -m shardmark.calibrate`: a device of known rates gives them back, and its file says what was measured."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median

import pytest
import torch

from correctness.support.paths import ROOT
from shardmark import calibrate as command
from shardmark.meter.clock import Laps
from shardmark.meter.hardware import CPU, Hardware, Reached, hardware
from shardmark.meter.roofline import Roofline
from shardmark.predict.calibration import measuring
from shardmark.predict.calibration.figures import Timings, hardware_of
from shardmark.predict.calibration.measuring import calibrated, small_plan
from shardmark.predict.calibration.points import SIZES, Sizes
from shardmark.predict.calibration.rows import calibration_of_run
from shardmark.predict.calibration.toml import toml
from shardmark.predict.simulation.costs import Cost, Product
from shardmark.predict.simulation.links import collective_seconds
from shardmark.predict.simulation.measured import Measured, rates_of
from shardmark.predict.simulation.predict import predict, simulation
from shardmark.predict.simulation.program import Call
from shardmark.predict.simulation.rates import GPU
from shardmark.predict.simulation.this_machine import events_of

RECORDS = ROOT / "studies" / "records"
FEW = Sizes(
    rows=((8, 16), (4096, 4096)),
    linears=((8, 16, 16), (4096, 128, 4096), (4096, 4096, 4096), (8192, 4096, 4096)),
    attention=((1, 32, 8192, 128),),
    parameters=(256, 2**24),
    sent=(256, 2**20, 2**26, 2**27),
)
REACHED = Reached(
    products={"float32": 0.61},
    narrow=0.47,
    attention=0.53,
    bandwidth=0.83,
    reduction=0.71,
    scattered=0.37,
    kernel=3e-6,
    launch=9e-6,
    backward_launch=1.3e-5,
    link=0.62,
    collective=2.1e-5,
)
A_GPU = replace(hardware("a100-80gb"), name="mine", reached=REACHED, flops={"float32": 19.5e12})
A_CPU = replace(
    CPU,
    name="mine",
    memory_bytes=2**35,
    flops={"float32": 1e11},
    bandwidth=2e10,
    link=1e9,
    latency=0.0,
    devices_per_node=2,
    reached=replace(REACHED, narrow=1.0, link=1.0),
)


class MadeUp:
    """A device that takes exactly what the model says, by figures that the calibration does not see."""

    def __init__(self, on: Hardware, noise: float = 0.0) -> None:
        self.on, self.rates, self.noise = on, GPU(on), noise

    def roofline(self, dtype: torch.dtype) -> Roofline:
        return Roofline(self.on.flops["float32"], self.on.bandwidth, self.on.flops["float32"])

    def operators(self, calls: Mapping[Call, Cost], budget: float) -> list[list[float]]:
        return [[self.rates.seconds(cost) * (1 + self.noise * i) for i in (-1, 0, 1)] for cost in calls.values()]

    def collectives(self, calls: Mapping[Call, tuple[str, int]], budget: float) -> list[float]:
        return [collective_seconds(self.on, name, nbytes, range(2)) for name, nbytes in calls.values()]

    def small_steps(self) -> list[Laps]:
        plan = small_plan("cpu")
        with simulation(on=self.on) as schedule:
            workload = plan.workload(plan.implementation, None, "cpu")
            for _ in range(2):
                workload.prepare()
                step = schedule.step(workload.step)  # the device waits for the host's first launch
            assert step is not None
        return [Laps(step.seconds, step.parts)]


@cache
def _calibrated(device: str, noise: float = 0.0) -> measuring.Calibration:
    on = {"cuda": A_GPU, "cpu": A_CPU}[device]
    known = replace(on, name="found", reached=Reached())
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(SIZES, device, FEW)
        return calibrated(MadeUp(on, noise), known, 2, 1e9, ["float32"], {"float32": on.flops["float32"]})


def test_a_gpu_of_known_rates_gives_them_back() -> None:
    found = _calibrated("cuda").hardware.reached
    assert found.products["float32"] == pytest.approx(REACHED.products["float32"], rel=1e-3)
    for name in ("narrow", "attention", "bandwidth", "reduction", "scattered", "kernel", "link", "collective"):
        assert getattr(found, name) == pytest.approx(getattr(REACHED, name), rel=0.01), name
    assert found.launch == pytest.approx(REACHED.launch, rel=0.05)
    assert found.backward_launch == pytest.approx(REACHED.backward_launch, rel=0.05)


def test_a_cpu_of_known_rates_gives_them_back() -> None:
    found = _calibrated("cpu").hardware.reached
    for name in ("bandwidth", "reduction", "scattered", "kernel", "collective", "launch", "backward_launch"):
        assert getattr(found, name) == pytest.approx(getattr(A_CPU.reached, name), rel=0.01), name


def test_a_calibrated_device_takes_what_was_measured() -> None:
    """The same steps as on the device itself, also of operators and sizes that were not measured."""
    found = _calibrated("cuda").hardware
    real, again = (predict(small_plan("cpu"), on=on).steps[on.name].seconds for on in (A_GPU, found))
    assert again == pytest.approx(real, rel=0.05)


def test_its_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    found = _calibrated("cpu").hardware
    path = tmp_path / "found.toml"
    path.write_text(toml(found, ["a comment"]))
    read = hardware(str(path))
    assert read.measured == found.measured and read.device == "cpu"
    assert read.reached.launch == pytest.approx(found.reached.launch, rel=1e-3)
    assert toml(read, ["a comment"]) == path.read_text()


def test_a_size_between_two_lies_between_them() -> None:
    rows = [[2**10, 1e-5], [2**20, 1e-3]]
    on = replace(A_CPU, measured={"float32": {"gelu": rows}, "collectives": {"all_reduce": [[2, 2**10, 1e-3]]}})
    rates = Measured(on)

    def seconds(nbytes: float, name: str = "gelu") -> float:
        return rates.seconds(Cost(torch.float32, 0.0, nbytes, name=name))

    assert [seconds(nbytes) for nbytes, _ in rows] == pytest.approx([1e-5, 1e-3])
    assert 1e-5 < seconds(2**15) < 1e-3
    assert seconds(2**21) == pytest.approx(2e-3, rel=0.1)  # as far as the model goes beyond the largest
    assert seconds(2**10, "mish") == seconds(2**10)  # one of its kind
    norm = Cost(torch.float32, 0.0, 2**10, reduces=True, name="norm")
    assert rates.seconds(norm) == GPU(on).seconds(norm)  # nothing of its kind was measured
    assert rates.collective("all_reduce", 2**10, range(2)) == pytest.approx(1e-3)


def test_products_are_told_apart_by_their_shape() -> None:
    wide, narrow = [1, 512, 512, 512, 1e-2], [1, 512, 16, 512, 1e-2]
    rates = Measured(replace(A_CPU, measured={"float32": {"mm": [wide, narrow]}}))
    for m, n, k, seconds in ((512, 512, 512, 1e-2), (512, 16, 512, 1e-2)):
        product = Cost(
            torch.float32, 2.0 * m * n * k, 4.0 * (m * n + m * k + n * k), (Product(1, m, n, k),), name="addmm"
        )
        assert rates.seconds(product) == pytest.approx(seconds)


def test_rates_that_nothing_measured_predict_no_time() -> None:
    assert rates_of(CPU) is None
    alone = replace(A_CPU, link=float("nan"))
    assert rates_of(alone) is not None and rates_of(alone, 2) is None


def test_on_a_cpu_the_host_waits_for_each_operator() -> None:
    step = predict(small_plan("cpu"), on=A_CPU).steps["mine"]
    assert step.seconds == step.host
    events = events_of(small_plan("cpu"))
    rates = GPU(A_CPU)
    computing = sum(rates.seconds(event.cost) for event in events if event.cost is not None)
    assert step.seconds > computing + sum(event.launches for event in events) * REACHED.launch * 0.9


@pytest.mark.parametrize(("noise", "loaded"), [(0.01, False), (0.4, True)])
def test_a_loaded_machine_is_told(noise: float, loaded: bool) -> None:
    said = "\n".join(_calibrated("cpu", noise).lines())
    assert f"spans {2 * noise:.0%} of their median" in said
    assert ("the machine was loaded" in said) == loaded


def test_a_saved_run_tells_its_roofline_and_collectives() -> None:
    found = calibration_of_run(RECORDS / "two-cores-cpu.json.gz")
    on = found.hardware
    assert on.flops["float32"] > 1e11 and on.bandwidth > 1e10 and on.link > 1e8
    assert "all_reduce" in on.measured["collectives"]
    assert "launches" in "\n".join(found.lines())


def test_a_saved_run_of_a_gpu_knows_its_data_sheet() -> None:
    on = calibration_of_run(RECORDS / "nvidia-h200.json.gz").hardware
    assert on.flops["bfloat16"] == hardware("h200").flops["bfloat16"] and on.link == hardware("h200").link
    assert 0.5 < on.reached.products["bfloat16"] < 1


def test_without_operators_the_defaults_stay() -> None:
    found = hardware_of(A_GPU, A_GPU.flops, Timings(flops={"float32": 1e13}, bandwidth=1e12)).reached
    assert (found.reduction, found.scattered, found.kernel) == (
        Reached().reduction,
        Reached().scattered,
        Reached().kernel,
    )
    assert found.products["float32"] == pytest.approx(1e13 / 19.5e12)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["out.txt"], "out.txt: the name of the file to write ends with .toml"),
        (["out.toml", "--minutes", "0"], "--minutes 0: it takes more than none, and at most 60"),
        (["out.toml", "--ranks", "0"], "--ranks 0: at least one rank measures"),
        (["out.toml", "--dtypes", "float8"], "--dtypes float8: float8 is none of float16, bfloat16, float32"),
        (
            ["out.toml", "--dtypes", "bfloat16"],
            "--dtypes bfloat16: float32 is needed, as the one dtype of every device",
        ),
        (["out.toml", "--from", "no.json"], "no.json: No such file or directory"),
        (["no/out.toml"], "[Errno 2] No such file or directory: 'no/out.toml'"),
    ],
)
def test_errors_are_one_line(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(arguments) == command.USAGE
    assert capsys.readouterr().err == f"python -m shardmark.calibrate: {says}\n"
    assert not list(tmp_path.glob("*.toml")) or arguments[0] == "out.toml"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("measured = 3", "measured has a table for each dtype, and one for collectives"),
        ("[measured.float33]\nmm = [[1, 2]]", "measured.float33 is neither a dtype nor collectives"),
        ("[measured.float32]\nmm = [[1]]", r"measured.float32.mm = \[1\] is no size with its seconds"),
        ("[measured.float32]\nmm = [[1, -2.0]]", r"measured.float32.mm = \[1, -2.0\] is no size with its seconds"),
        ("[measured.float32]\nmm = [[1, 2], [1, 2, 3]]", "measured.float32.mm has sizes of several kinds"),
    ],
)
def test_what_is_wrong_in_a_file_is_one_line(text: str, says: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(text + "\n" + toml(A_GPU) if text.startswith("measured") else toml(A_GPU) + text)
    with pytest.raises(ValueError, match=f"mine.toml: {says}$"):
        hardware(str(path))


def test_a_spread_is_that_of_the_middle_half() -> None:
    assert measuring._spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(1.0)
    assert median([measuring._spread([2.0])]) == 0.0
