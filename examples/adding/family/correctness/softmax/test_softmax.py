"""Softmax against its definition in float64."""

from __future__ import annotations

import pytest
import torch

from shardmark.api import Implementation


@pytest.mark.family("softmax")
def test_it_is_the_share_of_each_exponential(implementation: Implementation, device: str) -> None:
    x = torch.randn(3, 8, device=device)
    expected = x.double().exp() / x.double().exp().sum(-1, keepdim=True)
    torch.testing.assert_close(implementation.target(x), expected.float())
