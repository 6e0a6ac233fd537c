"""Published training steps: recordings replay as the schedule has them, and deeper models add the same a layer."""

import re
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from shardmark.meter.hardware import hardware
from shardmark.predict.simulation.costs import Cost
from shardmark.predict.simulation.predict import simulation
from shardmark.predict.simulation.rates import GPU, WITHIN
from shardmark.predict.simulation.schedule import Span, Step
from shardmark.predict.simulation.within import CHIPS, table, within
from studies.published.decoders import DecoderSize
from studies.published.recordings import Replayed, recorded
from studies.published.step_intervals import Judged, holds, interval
from studies.published.step_rows import Published, compiled, every, numbered, published_of, why_unknown
from studies.published.steps_fit import DEFAULTS, every_judged, judged, predicted, reaching, recording_of
from studies.published.steps_page import PAGE, page
from studies.published.training import Training, made

ON = hardware("a100-80gb")
SMALL = Training(
    size=DecoderSize("llama", 2, 512, 8, 4, 1024, 1024),
    length=512,
    batch=4,
    micro_batches=2,
    strategy="fsdp2",
    ranks=16,
    per_node=8,
    master=torch.float32,
    reduce=torch.float32,
)
MPT = replace(SMALL, size=DecoderSize("mpt", 2, 512, 8, 8, 2048, 1024), autocast=True, optimizer="loop")
TRAININGS = {
    "fsdp2": SMALL,
    "fsdp1-late": replace(MPT, strategy="fsdp1", prefetch_late=True, checkpoint_every=1),
    "hsdp": replace(SMALL, strategy="hsdp", reduce=torch.bfloat16),
    "ddp": replace(MPT, strategy="ddp"),
    "saves-operators": replace(SMALL, checkpoint_every=1, saves_operators=True),
}


@pytest.mark.filterwarnings("ignore:Attempted to get default timeout")
@pytest.mark.parametrize("training", TRAININGS.values(), ids=TRAININGS)
def test_a_replayed_recording_takes_what_the_schedule_says(training: Training) -> None:
    on = replace(ON, reached=replace(ON.reached, beside=0.7, collective_launch=1e-4))
    with simulation(training.ranks, on=on) as timer:
        step = timer.step(made(training), 0.01)
    assert step is not None
    again = recorded(partial(made, training), training.ranks, on).replay(GPU(on), 0.01)
    assert again.seconds == pytest.approx(step.seconds, rel=1e-9)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_layers_and_micro_batches_beyond_those_recorded_add_the_same(strategy: str) -> None:
    size = DecoderSize("llama", 7, 4096, 32, 8, 14_336, 32_000)  # no step of more layers in the file is launch-bound
    deep = replace(SMALL, size=size, length=2048, micro_batches=3, strategy=strategy, checkpoint_every=1)
    row = Published(2, "a source", "its authors", deep, ON, 1.0)
    on = reaching(ON, DEFAULTS)
    whole = recording_of(deep, ON).replay(GPU(on), steps=2)
    assert predicted(row, on).seconds == pytest.approx(whole.seconds, rel=1e-9)


def test_every_published_step_is_a_training_or_has_a_reason() -> None:
    for line, row in numbered():
        assert (published_of(line, row) is None) == bool(why_unknown(row)), (line, row)


HANDFUL = (84, 89, 171)
"""Lines of the file: FSDP1, one GPU, and FSDP2 whose host binds the step."""


@pytest.mark.parametrize("line", HANDFUL)
def test_the_page_has_what_is_predicted(line: int) -> None:
    [row] = [each for each in every() if each.line == line]
    [shown] = [each for each in shown_rows() if each[0] == str(line)]
    assert shown[4] == f"{row.seconds:.3f}"
    assert float(shown[5]) == pytest.approx(judged(row).step.seconds, abs=6e-4)


def shown_rows() -> list[list[str]]:
    """Cells of the page's figures."""
    text = PAGE.read_text(encoding="utf-8").partition("## Every figure")[2].partition("## Not predicted")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[2:3].isdigit()]


def test_the_pages_intervals_hold_as_often_as_they_say() -> None:
    shown = shown_rows()
    assert len(shown) == len(every())
    held = ["(missed)" not in cells[7] for cells in shown]
    for cells, inside in zip(shown, held, strict=True):
        low, high = (float(bound) for bound in cells[7].removesuffix(" (missed)").split(" to "))
        assert (low - 6e-4 <= float(cells[4]) <= high + 6e-4) == inside or abs(float(cells[4]) - low) < 2e-3
    assert sum(held) / len(held) == pytest.approx(0.9, abs=0.03)


def test_the_readme_has_the_pages_figures() -> None:
    summary = next(line for line in PAGE.read_text(encoding="utf-8").splitlines() if "median error " in line)
    readme = " ".join(Path("README.md").read_text(encoding="utf-8").split())
    middle, share = re.search(r"median error ([\d.]+%)", summary), re.search(r"\((\d+%); they say", summary)
    assert middle and share
    assert f"have a median error of {middle[1]}; {share[1]} lie in their interval" in readme
    for chip in ("A100", "H100"):
        [interval] = re.findall(rf"{chip} (\d\.\d+ to \d\.\d+)", summary)
        assert f"{interval} times on {chip}s" in readme or f"{interval} on {chip}s" in readme


def test_an_interval_holds_nine_of_ten_and_a_chip_without_a_source_has_a_wide_one() -> None:
    row = Published(2, "a source", "its authors", SMALL, ON, 1.0)
    steps = [Judged(replace(row, seconds=1 + i / 100), SOME._replace(seconds=1.0)) for i in range(100)]
    # From the fifth from below to the fifth from above: one more of the same kind lies there in 91 of 101 cases.
    assert sum(holds(each, interval(steps)) for each in steps) == 92
    known = table()
    assert known["other"].sources == 0
    for chip in set(CHIPS.values()):
        assert known[chip].sources > 1
        assert known["other"].high / known["other"].low > known[chip].high / known[chip].low


SOME = Replayed(1.0, 1.0, 0.0)


@pytest.mark.parametrize(("on", "chip"), [("a100-40gb", "a100"), ("h200", "other"), ("b200", "other")])
def test_a_step_has_its_chips_interval(on: str, chip: str) -> None:
    products = [Span("mm", "", 0.0, 1.0, 0.5, Cost(torch.bfloat16, 1e12, 0.0))]
    assert within(Step(1.0, 0.1, {}, products), hardware(on)) == table()[chip]


def test_a_step_in_float32_or_bound_by_its_host_has_the_interval_of_operators() -> None:
    wide = [Span("mm", "", 0.0, 1.0, 0.5, Cost(torch.float32, 1e12, 0.0))]
    idle = [Span("mm", "", 0.0, 0.1, 0.05, Cost(torch.bfloat16, 1e12, 0.0))]
    for spans in (wide, idle):
        found = within(Step(1.0, 1.0, {}, spans), hardware("a100-80gb"))
        assert (found.low, found.high) == WITHIN


@pytest.mark.sweep
def test_the_page_is_that_of_the_rows() -> None:
    assert PAGE.read_text(encoding="utf-8") == page()
    assert len(every_judged()) == len(every())


@pytest.mark.sweep
@pytest.mark.filterwarnings("ignore:Attempted to get default timeout")
def test_compiled_steps_take_what_was_published() -> None:
    """No number is fitted to a compiled step. Those on an H200 are as far off as eager ones there."""
    rows = [each for each in compiled() if each.on.name != "h200"]
    ratios = [row.seconds / predicted(row, row.on).seconds for row in rows]
    assert len(ratios) == 7 and all(1 / 1.15 < ratio < 1.15 for ratio in ratios), ratios
