"""Published training steps: recordings replay as the schedule has them, and deeper models add the same a layer."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from shardmark.meter.hardware import hardware
from shardmark.predict.simulation.predict import simulation
from shardmark.predict.simulation.rates import GPU
from studies.published.decoders import DecoderSize
from studies.published.recordings import recorded
from studies.published.step_rows import Published, numbered, published_of, why_unknown
from studies.published.steps_fit import DEFAULTS, predicted, reaching, recording_of
from studies.published.training import Training, made, with_layers

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
    assert again.host == pytest.approx(step.host, rel=1e-9)


@pytest.mark.parametrize("strategy", ["fsdp1", "fsdp2"])
def test_layers_and_micro_batches_beyond_those_recorded_add_the_same(strategy: str) -> None:
    deep = replace(with_layers(SMALL, 9, 4), strategy=strategy, checkpoint_every=1)
    row = Published(2, "a source", "its authors", deep, ON, 1.0)
    on = reaching(ON, DEFAULTS)
    whole = recording_of(deep, ON).replay(GPU(on), steps=2)
    assert predicted(row, on).seconds == pytest.approx(whole.seconds, rel=2e-3)


def test_every_published_step_is_a_training_or_has_a_reason() -> None:
    for line, row in numbered():
        assert (published_of(line, row) is None) == bool(why_unknown(row)), (line, row)
