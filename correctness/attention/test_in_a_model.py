"""Every attention inside our language model."""

import pytest
import torch

from impl.attention import eager_attention
from impl.model import SIZES, Transformer
from shardmark.api import Implementation

pytestmark = pytest.mark.family("attention")


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-4)], ids=["float64", "float32"]
)
def test_the_model_takes_any_attention(
    implementation: Implementation, dtype: torch.dtype, tolerance: float, device: str
) -> None:
    size = SIZES["tiny"]
    tokens = torch.randint(size.vocab, (2, 40), device=device)
    reference = Transformer(size, context_length=40, attention=eager_attention).to(device, dtype)
    model = Transformer(size, context_length=40, attention=implementation.watched).to(device, dtype)
    model.load_state_dict(reference.state_dict())
    torch.testing.assert_close(model(tokens), reference(tokens), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_model_trains_under_autocast_to_bfloat16_and_float16(
    implementation: Implementation, dtype: torch.dtype, device: str
) -> None:
    torch.manual_seed(0)
    model = Transformer(SIZES["tiny"], context_length=16, attention=implementation.watched).to(device)
    tokens = torch.randint(SIZES["tiny"].vocab, (2, 16), device=device)
    with torch.autocast(device, dtype=dtype):
        logits = model(tokens)
    assert logits.dtype == dtype
    torch.testing.assert_close(logits.float(), model(tokens), rtol=0.1, atol=0.1)
    logits.float().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
