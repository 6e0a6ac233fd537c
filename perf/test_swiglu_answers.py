"""With SwiGLU, what do data parallel, FSDP, tensor parallel and both need? Held to brute force, as the other answers on
scaling are."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import silu

from impl.accounting.feed_forward import FeedForwards
from perf.part import asks
from perf.scaling_part import MESH, least, saved_bytes
from perf.swiglu_answers import GATED, TOKENS, layouts, swiglu

SWIGLU = asks(swiglu())
D, F, BLOCKS = 16_384, 53_248, 126
C, W = 4.6e14, 1.8e11


class Block(nn.Module):
    """A rank's part of a network: `columns` of its hidden size."""

    def __init__(self, dim: int, columns: int) -> None:
        super().__init__()
        kwargs = {"bias": False, "device": "meta", "dtype": torch.bfloat16}
        self.w1, self.w3 = nn.Linear(dim, columns, **kwargs), nn.Linear(dim, columns, **kwargs)
        self.w2 = nn.Linear(columns, dim, **kwargs)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(silu(self.w1(x)) * self.w3(x))


@SWIGLU
@pytest.mark.parametrize("devices", [1, 4, 8])
def test_a_device_keeps_what_autograd_keeps_of_its_part(devices: int) -> None:
    part = Block(D, F // devices)
    one, two = (saved_bytes(part, torch.empty(tokens, D, device="meta", dtype=torch.bfloat16)) for tokens in (1, 2))
    assert GATED.tensor_parallel_saved_per_token(devices) == BLOCKS * (two - one)
    assert sum(weight.numel() for weight in part.parameters()) * BLOCKS * devices == GATED.parameters
    assert GATED.state == 16 * 329_772_957_696


@SWIGLU
def test_a_small_model_saves_and_computes_in_proportion() -> None:
    """Every field of the formula counts: none is fitted to the large model."""
    small = FeedForwards(blocks=2, dim=8, ffn_dim=24, linears=3, hidden_saved=4)
    model = nn.Sequential(Block(8, 24), Block(8, 24))
    assert sum(weight.numel() for weight in model.parameters()) == small.parameters
    assert saved_bytes(model, torch.empty(5, 8, device="meta", dtype=torch.bfloat16)) == 5 * small.saved_per_token


def seconds(tokens: float, x: int, y: int, m_x: int, m_y: int) -> tuple[float, float, float]:
    """A block's forward on a device: three products, three weights gathered, input and output of activations; a
    dimension of one device sends nothing."""
    rows, columns = tokens / x, F / y
    products = 2 * (2 * rows * D * columns) + 2 * rows * columns * D
    gathered = 3 * D * columns * 2 * (x > 1)
    exchanged = 2 * rows * D * 2 * (y > 1)
    return products / C, gathered / (m_x * W), exchanged / (m_y * W)


@SWIGLU
@pytest.mark.parametrize("index", range(5))
def test_compute_hides_communication_from_where_bisection_finds_it(index: int) -> None:
    mesh = layouts()[index].mesh

    def hides(tokens: float) -> bool:
        compute, *links = seconds(tokens, mesh.fsdp, mesh.tensor, mesh.fsdp_axes, mesh.tensor_axes)
        return compute >= sum(links)

    assert layouts()[index].least_tokens == pytest.approx(least(hides) / mesh.devices, rel=1e-9, abs=1e-6)


@SWIGLU
def test_data_parallel_hides_as_fsdp_does() -> None:
    """Backward computes two products for each of forward's, and an all-reduce sends each byte twice."""
    data, sharded, *_ = layouts()
    backward = 2 * 3 * 2 * data.least_tokens * D * F / C
    scattered = gathered = 3 * D * F * 2 / (3 * W)
    assert backward == pytest.approx(scattered + gathered)
    assert data.least_tokens == sharded.least_tokens


@SWIGLU
def test_beyond_the_limit_no_batch_hides_tensor_parallel() -> None:
    alone = replace(layouts()[2], mesh=replace(MESH, linears=3, fsdp=1, tensor=94, tensor_axes=3))
    compute, _, exchanged = seconds(TOKENS, 1, 94, 1, 3)
    assert compute < exchanged and alone.least_tokens == math.inf


@SWIGLU
def test_bytes_sent_are_those_of_rings_round_by_round() -> None:
    n, weights = 64, 2 * GATED.parameters
    data, sharded, tensor, *both = (each.sent for each in layouts())
    assert data == 2 * sum(weights // n for _ in range(n - 1))
    assert sharded == 3 * sum(weights // n for _ in range(n - 1))
    activations = 2 * TOKENS * D
    exchanges = 5  # input and gradient of the output gathered, the input again, output and input's gradient scattered
    assert tensor == BLOCKS * exchanges * sum(activations // n for _ in range(n - 1))
    for sent, (x, y) in zip(both, [(16, 4), (8, 8)], strict=True):
        own_weights = 3 * sum(weights // y // x for _ in range(x - 1))
        assert sent == own_weights + BLOCKS * exchanges * sum(activations // x // y for _ in range(y - 1))


@SWIGLU
@pytest.mark.parametrize(
    ("index", "copies", "x", "y"), [(0, 64, 64, 1), (1, 1, 64, 1), (2, 1, 1, 64), (3, 1, 16, 4), (4, 1, 8, 8)]
)
def test_state_and_saved_bytes_are_those_of_a_devices_tensors(index: int, copies: int, x: int, y: int) -> None:
    layout, rows, columns = layouts()[index], TOKENS // x, F // y
    elements = BLOCKS * sum(weight.numel() for weight in Block(D, columns).parameters()) * copies // x
    assert layout.state == 4 * 4 * elements
    shapes = [(rows // y, D), *[(rows, columns)] * 4]  # a part of the input's tokens, and four hidden tensors
    assert layout.saved == BLOCKS * sum(2 * math.prod(shape) for shape in shapes)
