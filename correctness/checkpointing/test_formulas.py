"""Closed forms of checkpointing against the meter and the FLOP counter: bytes kept, peak, recomputed FLOPs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from correctness.checkpointing.models import SIZE
from impl.attention import eager_attention
from impl.checkpointing.accounting import POLICIES
from impl.checkpointing.cases import SegmentsCase
from impl.checkpointing.nesting import again, halves, most_inputs, numbers, segments
from impl.model import SIZES, Transformer
from impl.training_step.cases import TrainingStepCase
from impl.training_step.workload import CheckpointedStep
from shardmark.api import family
from shardmark.meter.memory import Memory, meter

DEPTHS = [1, *(pytest.param(layers, marks=pytest.mark.sweep) for layers in (2, 3, 7)), 5]


def test_a_dtype_without_a_closed_form_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"^checkpointing's bytes have a closed form in float32, not in bfloat16$"):
        POLICIES["full"].peak(TrainingStepCase("tiny", 2, 32, "bfloat16"))


@contextmanager
def sized(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Iterator[str]:
    """Register a size in `SIZES` within the block; yield its name."""
    with monkeypatch.context() as patch:
        patch.setitem(SIZES, "passing", replace(SIZE, **changes))
        yield "passing"


@pytest.mark.parametrize("layers", DEPTHS)
@pytest.mark.parametrize("name", POLICIES)
def test_recomputed_flops_are_those_counted(name: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(policy: str) -> int:
        model = Transformer(replace(SIZE, layers=layers), context_length=16, attention=eager_attention)
        with FlopCounterMode(display=False) as counter:
            family("checkpointing").implementations[policy].target(model)(tokens).sum().backward()
        return counter.get_total_flops()

    tokens = torch.zeros(2, 13, dtype=torch.int64)
    with sized(monkeypatch, layers=layers) as model:
        case, policy = TrainingStepCase(model, *tokens.shape), POLICIES[name]
        # The counter counts all of eager attention; the formula counts half of it, as it is causal.
        attention = 2 * tokens.numel() * tokens.shape[1] * SIZE.d_model
        masked = attention * sum(again(policy.series(case))) if policy.products_again else 0
        assert counted(name) - counted("none") == policy.recomputed(case) + masked


def step_memory(name: str, case: TrainingStepCase) -> Memory:
    """Meter the second step; the mark "forward" is at the end of forward."""
    with meter("cpu") as memory:
        step = CheckpointedStep(family("checkpointing").implementations[name], case, "cpu")
        step.step(lambda part: None)  # makes the optimizer's state
        step.prepare()
        memory.mark("before")
        memory.reset_peak()
        step.step(memory.mark)
    return memory


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("changes", "batch", "context"),
    [
        ({"layers": 5}, 3, 33),  # the peak is at SwiGLU's product
        pytest.param(  # at SwiGLU's product in the last block, as inputs outweigh gradients
            {"layers": 8, "d_model": 8, "d_ff": 32}, 3, 90, marks=pytest.mark.sweep
        ),
        ({"layers": 4, "vocab": 1000}, 2, 30),  # the peak is at the loss
        pytest.param({"layers": 1, "d_model": 32, "d_ff": 96}, 1, 200, marks=pytest.mark.sweep),
        ({"layers": 3, "d_model": 60, "d_ff": 151, "heads": 3, "vocab": 121}, 3, 9),  # the peak is in W1's backward
        pytest.param(  # the peak is at the embedding
            {"layers": 2, "d_model": 40, "heads": 4, "vocab": 200}, 1, 5, marks=pytest.mark.sweep
        ),
    ],
    ids=["product", "last_product", "loss", "one_block", "w1", "embedding"],
)
def test_kept_and_peak_bytes_are_the_formulas_to_the_byte(
    name: str, changes: dict[str, int], batch: int, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sized(monkeypatch, **changes) as model:
        case = TrainingStepCase(model, batch, context)
        memory = step_memory(name, case)
        assert memory.phases["forward"] - memory.phases["before"] == POLICIES[name].kept(case)
        assert memory.tensors == POLICIES[name].peak(case)


@pytest.mark.parametrize(
    "model", ["medium", *(pytest.param(model, marks=pytest.mark.sweep) for model in ("large", "xl"))]
)
def test_each_policy_saves_what_it_is_for(model: str) -> None:
    case = TrainingStepCase(model, batch=4, context=2048)
    kept, peak, flops = (
        {name: getattr(policy, form)(case) for name, policy in POLICIES.items()}
        for form in ("kept", "peak", "recomputed")
    )
    for small in ("recursive", "segments"):
        assert kept[small] < kept["full"] < kept["every_2"] < kept["selective"] < kept["none"]
    assert peak["recursive"] == peak["full"] < peak["segments"] < peak["every_2"] < peak["selective"] < peak["none"]
    assert flops["none"] == flops["selective"] == 0 < flops["every_2"] < flops["full"]
    assert flops["full"] < flops["segments"] < flops["recursive"]


@pytest.mark.sweep
def test_segments_of_a_root_keep_the_fewest_inputs_and_those_of_one_block_the_least_memory() -> None:
    lengths = range(1, 33)
    peaks = [POLICIES["segments"].peak(SegmentsCase("2.7b", 4, 2048, length=length), "cuda") for length in lengths]
    assert peaks == sorted(peaks) and peaks[0] < peaks[1]
    assert min(lengths, key=lambda length: most_inputs(segments(32, length))) in (5, 6)


@pytest.mark.parametrize(("tokens", "saves"), [(15, False), (17, True)])
def test_recursive_lowers_the_peak_where_a_block_has_a_larger_input_than_gradients(
    tokens: int, saves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward of a block adds gradients of 16 d^2 (f is 4 d) and frees its input of T d."""
    with sized(monkeypatch, d_model=128, d_ff=512, layers=25, vocab=100) as model:
        case = TrainingStepCase(model, batch=128, context=tokens)
        assert (POLICIES["recursive"].peak(case) < POLICIES["full"].peak(case)) == saves


def test_recursive_lowers_the_peak_of_a_second_micro_batch_by_the_inputs_that_it_does_not_keep() -> None:
    """The gradients of the first one are there, so the peak is where all inputs are."""

    def peak(name: str) -> int:
        with meter("cpu") as memory:
            step = CheckpointedStep(family("checkpointing").implementations[name], case, "cpu")
            step.step(lambda part: None)
            memory.reset_peak()
            step.step(lambda part: None)
        return memory.tensors

    case = TrainingStepCase("deep", 2, 64, mode="forward_backward")
    layers, stream = SIZES["deep"].layers, 4 * 2 * 64 * SIZES["deep"].d_model
    assert peak("full") - peak("recursive") == (layers - most_inputs(halves(layers))) * stream


@pytest.mark.parametrize("blocks", [*range(1, 40), 1000])
def test_recursive_keeps_a_logarithm_of_the_inputs(blocks: int) -> None:
    series, levels = halves(blocks), math.log2(blocks)
    assert [number for nest in series for number in numbers(nest)] == list(range(blocks))
    assert most_inputs(series) == 1 + int(levels)
    assert sum(again(series)) <= blocks * (1 + levels / 2)


@pytest.mark.parametrize("blocks", [1, 2, 9, 17, 32])
def test_segments_keep_an_input_each_and_those_of_one_segment(blocks: int) -> None:
    for length in range(1, blocks + 1):
        series = segments(blocks, length)
        assert [number for segment in series for number in numbers(segment)] == list(range(blocks))
        assert max(map(len, series)) == length
        last = blocks - (len(series) - 1) * length
        assert most_inputs(series) == len(series) - 1 + max(last, length - 1 if len(series) > 1 else 0)
        assert again(series) == (len(series), blocks - len(series))
