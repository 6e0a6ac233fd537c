"""Closed forms of checkpointing against the meter and the FLOP counter: bytes kept, peak, recomputed FLOPs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from correctness.checkpointing.models import SIZE
from impl.accounting.beside import beside
from impl.attention import eager_attention
from impl.checkpointing.accounting import BLOCK, POLICIES, Recursive, segment_length
from impl.model import SIZES, Transformer
from impl.training_step.cases import TrainingStepCase
from impl.training_step.workload import CheckpointedStep
from shardmark.api import Followed, Moment, family
from shardmark.api.reference import BACKWARD, ENTER, LEAVE
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
        case = TrainingStepCase(model, *tokens.shape)
        but_for_last, whole = POLICIES[name].again(case)
        # The counter counts all of eager attention; the formula counts half of it, as it is causal.
        masked = 2 * tokens.numel() * tokens.shape[1] * SIZE.d_model * (but_for_last + whole)
        assert counted(name) - counted("none") == POLICIES[name].recomputed(case) + masked


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
    assert kept["recursive"] < kept["full"] < kept["every_2"] < kept["selective"] < kept["none"]
    assert peak["recursive"] == peak["full"] < peak["every_2"] < peak["selective"] < peak["none"]
    assert flops["none"] == flops["selective"] == 0 < flops["every_2"] < flops["full"] < flops["recursive"]


@pytest.mark.parametrize(("tokens", "saves"), [(15, False), (17, True)])
def test_recursive_lowers_the_peak_where_a_block_has_a_larger_input_than_gradients(
    tokens: int, saves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward of a block adds gradients of 16 d^2 (f is 4 d) and frees its input of T d."""
    with sized(monkeypatch, d_model=128, d_ff=512, layers=25, vocab=100) as model:
        case = TrainingStepCase(model, batch=128, context=tokens)
        assert (POLICIES["recursive"].peak(case) < POLICIES["full"].peak(case)) == saves


class CountingInputs(Recursive):
    """Counts the most block inputs that are live when backward reaches a block."""

    most = 0

    def compute_again(self, block: int) -> None:
        super().compute_again(block)
        inputs = self.ledger.live.entries[BLOCK] // self.stream - 1  # without the last block's output
        self.most = max(self.most, inputs)


@pytest.mark.parametrize("layers", [*range(1, 40), 1000])
def test_recursive_keeps_no_more_than_two_roots_of_the_inputs(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks here allocate nothing but their output."""
    with sized(monkeypatch, layers=layers) as model:
        technique = CountingInputs(TrainingStepCase(model, 1, 1))

    def moment(kind: str, block: int, inputs: int) -> Moment:
        live = {BLOCK: inputs * technique.stream}
        return Moment(kind, f"blocks.{block}", live, live)

    forward = [moment(kind, i, i + 1 + (kind == LEAVE)) for i in range(layers) for kind in (ENTER, LEAVE)]
    backward = [moment(BACKWARD, i, i + 2) for i in reversed(range(layers))]
    beside(Followed([*forward, *backward], {}, 0), technique)
    length = segment_length(layers)
    assert technique.most == -(-layers // length) + min(length, layers) - 1 or layers % length
    assert technique.most <= 2 * layers**0.5
