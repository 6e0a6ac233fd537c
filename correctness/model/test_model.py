"""Our language model: published sizes, initial weights, layers."""

import math

import pytest
import torch

from impl.model import SIZES, Transformer, TransformerSize
from impl.model.layers import RotaryEmbedding, truncated_normal_

PUBLISHED = {
    "small": 128_625_408,
    "medium": 423_183_360,
    "large": 969_411_840,
    "xl": 1_998_235_200,
    "2.7b": 3_406_809_600,
    "8b": 8_125_698_048,
    "10b": 12_832_823_808,
}


@pytest.mark.parametrize("name", ["tiny", "mini", *PUBLISHED])
def test_sizes_have_the_parameters_they_say(name: str) -> None:
    with torch.device("meta"):
        model = Transformer(SIZES[name], context_length=128)
    counted = sum(p.numel() for p in model.parameters())
    assert counted == SIZES[name].parameters == PUBLISHED.get(name, counted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_weights_are_from_a_normal_that_is_cut_off_at_three_standard_deviations(
    dtype: torch.dtype, device: str
) -> None:
    weight = torch.full((1000, 1000), torch.nan, dtype=dtype, device=device)
    truncated_normal_(weight, 0.5)
    drawn = weight.double() / 0.5
    assert 2.8 < drawn.abs().max() <= 3 and drawn.mean().abs() < 0.01
    # The variance is 1 - 2 c p(c) / (1 - 2 P(-c)) for c = 3 (Johnson, Kotz and Balakrishnan, 1994).
    assert drawn.std().item() == pytest.approx(0.98658, abs=0.01)
    within_one = (drawn.abs() < 1).double().mean().item()
    assert within_one == pytest.approx(math.erf(1 / math.sqrt(2)) / math.erf(3 / math.sqrt(2)), abs=0.01)


def test_positions_are_relative(device: str) -> None:
    """A score between two rotated vectors depends only on the distance of their positions."""
    rotary = RotaryEmbedding(head_dim=16, context_length=64).to(device)
    q, k = (torch.randn(16, device=device).expand(64, 16) for _ in range(2))
    scores = rotary(q) @ rotary(k).T
    for distance in (0, 1, 30):
        along = scores.diagonal(distance)
        torch.testing.assert_close(along, along[:1].expand_as(along), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("d_model", "heads"), [(64, 3), (12, 4)], ids=["heads_do_not_divide", "odd_head_dim"])
def test_widths_that_do_not_divide_are_one_line(d_model: int, heads: int) -> None:
    with pytest.raises(ValueError, match=rf"d_model {d_model} does not divide into {heads} heads of an even size"):
        TransformerSize(d_model, d_ff=64, layers=1, heads=heads)
