"""What does a large model need, on how many devices, and when does communication hide? Derived, held to brute force.

The answers and their derivations are `perf/scaling_answers.py`'s; docs/scaling-answers.md has them all.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from impl.accounting.feed_forward import FeedForwards
from impl.accounting.mesh import pipeline_utilization
from impl.collectives.accounting import (
    half_bandwidth_bytes,
    ring_all_reduce_seconds,
    ring_meets_tree_bytes,
    tree_all_reduce_seconds,
)
from perf import scaling_answers
from perf.part import asks
from perf.scaling_part import MESH, MODEL, least, saved_bytes

BLOCKS, D, F = 126, 16_384, 53_248
C, W = 4.6e14, 1.8e11
GB = 10**9


MEMORY, SHARDED, MEETING, LEVERS, TENSOR_PARALLEL, _, ALL_REDUCES = map(asks, scaling_answers.parts())


def linears(
    blocks: int, dim: int, ffn_dim: int, device: str = "meta", dtype: torch.dtype | None = None
) -> nn.Sequential:
    """The model itself."""
    sizes = [(dim, ffn_dim), (ffn_dim, dim)] * blocks
    return nn.Sequential(*(nn.Linear(*size, bias=False, device=device, dtype=dtype) for size in sizes))


@MEMORY
def test_the_parameters_are_those_of_the_model_itself() -> None:
    assert FeedForwards(BLOCKS, D, F) == MODEL
    assert MODEL.parameters == sum(weight.numel() for weight in linears(BLOCKS, D, F).parameters()) == 219_848_638_464


@MEMORY
def test_the_state_is_what_adam_and_accumulation_keep() -> None:
    """Compared with a small model's own float32 tensors: 16 bytes a parameter in total."""
    model = linears(2, 8, 24, "cpu")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 8)).sum().backward()
    optimizer.step()
    kept = [*model.parameters(), *(weight.grad for weight in model.parameters())]
    kept += [state[name] for state in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    assert FeedForwards(2, 8, 24).state == sum(tensor.nbytes for tensor in kept)
    assert MODEL.state == 16 * 219_848_638_464 == 3_517_578_215_424


@MEMORY
def test_a_token_saves_what_autograd_keeps_of_it() -> None:
    model = linears(BLOCKS, D, F, dtype=torch.bfloat16)
    one, two = (saved_bytes(model, torch.empty(tokens, D, device="meta", dtype=torch.bfloat16)) for tokens in (1, 2))
    assert two - one == MODEL.saved_per_token == 2 * 126 * (16_384 + 53_248) == 17_547_264


@MEMORY
def test_the_cards_are_the_fewest_that_hold_the_state() -> None:
    assert next(cards for cards in range(1, 100) if cards * 80 * GB >= 3_517_578_215_424) == 44
    assert "44 cards" in scaling_answers.memory().answer


@SHARDED
@pytest.mark.parametrize(("tokens", "least"), [(0, 38), (1_024, 41), (4_096, 61), (8_192, 156), (10_828, None)])
def test_the_fewest_devices_are_found_by_trying(tokens: int, least: int | None) -> None:
    """Every second linear saves its full input; the inputs of the others are sharded, as the state is."""

    def of_a_device(devices: int) -> float:
        whole = 63 * (16_384 + 53_248) * 2 * tokens
        return 16 * 219_848_638_464 / devices + whole / devices + whole

    found = next((devices for devices in range(1, 10_000) if of_a_device(devices) < 95e9), None)
    assert MODEL.least_devices(tokens, 95 * GB) == found == least
    if least is not None:
        assert MODEL.sharded(tokens, least) == pytest.approx(of_a_device(least))


def seconds(tokens: float, x: int, y: int, m_x: int, m_y: int, nbytes: int = 2) -> tuple[float, float, float]:
    """A block's forward on a device, from its own tensors: its products, the weights it gathers, what it sends of
    activations."""
    rows, columns = tokens / x, F / y
    products = 2 * rows * D * columns + 2 * rows * columns * D
    gathered = 2 * (D * columns) * nbytes
    exchanged = 2 * (rows * D) * nbytes
    return products / C, gathered / (m_x * W), exchanged / (m_y * W)


def least_tokens(x: int, y: int, overlapped: bool = False, nbytes: int = 2) -> float:
    """The smallest batch, in tokens, whose matrix products take as long as the communication; by bisection."""

    def hides(tokens: float) -> bool:
        compute, *links = seconds(tokens, x, y, 2, 1, nbytes)
        return compute >= (max(links) if overlapped else sum(links))

    found = least(hides)
    return found if found < 0.99e9 else math.inf


@MEETING
def test_compute_meets_communication_at_25302_tokens() -> None:
    tokens = MESH.least_tokens(F)
    assert tokens == pytest.approx(least_tokens(16, 4)) == pytest.approx(25_301.71, abs=0.01)
    assert tokens / 64 == pytest.approx(395.34, abs=0.01)
    compute, weights, activations = seconds(tokens, 16, 4, 2, 1)
    assert compute == pytest.approx(weights + activations)
    assert compute == pytest.approx(MESH.compute_seconds(tokens, D, F))
    assert (weights, activations) == pytest.approx((MESH.weights_seconds(D, F), MESH.activations_seconds(tokens, D)))


@LEVERS
def test_overlap_leaves_the_larger_communication_alone() -> None:
    overlapped = MESH.least_tokens(F, overlapped=True)
    assert overlapped == pytest.approx(least_tokens(16, 4, overlapped=True)) == pytest.approx(20_444.44, abs=0.01)


@LEVERS
@pytest.mark.parametrize("overlapped", [False, True], ids=["in_turns", "overlapped"])
def test_no_tensor_dimension_needs_fewer_tokens_than_the_best(overlapped: bool) -> None:
    """Among all meshes of 5,040 devices, the best one is next to the formula's optimum and needs less than 5% more."""
    tried = {y: least_tokens(5_040 // y, y, overlapped) / 5_040 for y in range(1, 30) if 5_040 % y == 0}
    meshes = {y: replace(MESH, fsdp=5_040 // y, tensor=y) for y in tried}
    assert {y: mesh.least_tokens(F, overlapped) / 5_040 for y, mesh in meshes.items()} == pytest.approx(tried)
    least = MESH.least_tokens_per_device(F, overlapped)
    assert least == pytest.approx(61.32 if overlapped else 245.30, abs=0.01)
    assert least <= min(tried.values()) < 1.05 * least
    assert abs(min(tried, key=tried.__getitem__) - MESH.best_tensor(F, overlapped)) < 1


@LEVERS
def test_beyond_the_limit_of_the_tensor_dimension_no_batch_is_enough() -> None:
    assert MESH.most_tensor(F) == pytest.approx(53_248 / (4.6e14 / 1.8e11)) == pytest.approx(20.836, abs=0.001)
    assert least_tokens(3, 20) < math.inf and least_tokens(3, 21) == math.inf
    assert replace(MESH, fsdp=3, tensor=20).least_tokens(F) < math.inf
    assert replace(MESH, fsdp=3, tensor=21).least_tokens(F) == math.inf


@LEVERS
def test_stages_of_a_pipeline_divide_the_batch() -> None:
    """On the same 64 devices: four stages of 4 by 4, each with a quarter of the blocks, which changes no ratio."""
    assert (
        MESH.pipelined(4).least_tokens(F) == pytest.approx(least_tokens(4, 4)) == pytest.approx(25_301.71 / 4, abs=0.01)
    )


@LEVERS
@pytest.mark.parametrize("microbatches", [1, 4, 27])
def test_a_stage_waits_while_the_pipeline_fills_and_drains(microbatches: int) -> None:
    """Counted slot by slot: a stage takes a microbatch as soon as the stage before it has finished it."""
    slots = {(stage, stage + microbatch) for stage in range(4) for microbatch in range(microbatches)}
    last = max(slot for _, slot in slots)
    assert pipeline_utilization(4, microbatches) == pytest.approx(len(slots) / (4 * (last + 1)))


@LEVERS
def test_one_byte_an_element_is_less_than_half_of_the_tokens() -> None:
    narrow = replace(MESH, weight_bytes=1, activation_bytes=1).least_tokens(F)
    assert narrow == pytest.approx(least_tokens(16, 4, nbytes=1)) == pytest.approx(11_307.6, abs=0.1)
    assert narrow < MESH.least_tokens(F) / 2


@TENSOR_PARALLEL
@pytest.mark.parametrize("devices", [1, 4, 8])
def test_a_tensor_parallel_device_keeps_its_part_of_each_block(devices: int) -> None:
    """Compared with the linears of one device: columns of the first weight, rows of the second."""
    part = nn.Sequential(
        nn.Linear(D, F // devices, bias=False, device="meta", dtype=torch.bfloat16),
        nn.Linear(F // devices, D, bias=False, device="meta", dtype=torch.bfloat16),
    )
    one, two = (saved_bytes(part, torch.empty(tokens, D, device="meta", dtype=torch.bfloat16)) for tokens in (1, 2))
    assert MODEL.tensor_parallel_saved_per_token(devices) == BLOCKS * (two - one)
    assert MODEL.tensor_parallel_saved_per_token(devices, sequence_parallel=True) == MODEL.saved_per_token // devices
    assert sum(weight.numel() for weight in part.parameters()) * BLOCKS * devices == MODEL.parameters


@TENSOR_PARALLEL
def test_a_tensor_parallel_device_sends_two_all_reduces_a_block() -> None:
    """Round by round: of a ring of four, 3 parts to reduce-scatter and 3 to all-gather, each a quarter."""
    message = 2 * 100 * D
    rounds = sum(message // 4 for _ in range(3)) + sum(message // 4 for _ in range(3))
    assert MODEL.tensor_parallel_sent(100, 4) == BLOCKS * 2 * rounds
    gathered = sum(message // 4 for _ in range(3))
    assert MODEL.tensor_parallel_sent(100, 4, sequence_parallel=True) == BLOCKS * (2 * rounds + gathered)


@ALL_REDUCES
@pytest.mark.parametrize("ranks", [4, 8, 64, 512])
def test_ring_and_trees_meet_where_trying_finds_it(ranks: int) -> None:
    """Steps one by one: a ring's 2(n-1) with an n-th each; the trees' latency up and down, and every byte twice."""
    bandwidth, latency = 50e9, 14e-6

    def ring(nbytes: float) -> float:
        return sum(latency + nbytes / ranks / bandwidth for _ in range(2 * (ranks - 1)))

    def trees(nbytes: float) -> float:
        levels = ranks.bit_length() - 1
        return sum(latency for _ in range(2 * levels)) + 2 * nbytes / bandwidth

    for nbytes in (1e3, 1e6, 1e9):
        assert ring_all_reduce_seconds(nbytes, ranks, bandwidth, latency) == pytest.approx(ring(nbytes))
        assert tree_all_reduce_seconds(nbytes, ranks, bandwidth, latency) == pytest.approx(trees(nbytes))
    ring_corner = half_bandwidth_bytes(2 * (ranks - 1), 2 * (ranks - 1) / ranks, bandwidth, latency)
    assert ring(ring_corner) == pytest.approx(2 * ring(0))
    assert trees(half_bandwidth_bytes(2 * math.log2(ranks), 2, bandwidth, latency)) == pytest.approx(2 * trees(0))
    meeting = ring_meets_tree_bytes(ranks, bandwidth, latency)
    assert ring(0.999 * meeting) > trees(0.999 * meeting) and ring(1.001 * meeting) < trees(1.001 * meeting)


@ALL_REDUCES
def test_the_document_is_what_the_code_says() -> None:
    """To regenerate it: python -m perf.scaling_answers > docs/scaling-answers.md"""
    document = Path(__file__).parents[1] / "docs" / "scaling-answers.md"
    assert document.read_text(encoding="utf-8") == scaling_answers.document()
