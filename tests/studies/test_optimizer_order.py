"""The page on optimizers that were made before sharding has what is predicted, and what the closed form says."""

import pytest
import torch

from impl.fsdp.optimizer_order_accounting import stage_bytes
from shardmark.meter.hardware import hardware
from studies import optimizer_order as study
from studies.published.decoders import Decoder


@pytest.mark.sweep
def test_the_page_has_what_is_predicted() -> None:
    assert study.PAGE.read_text(encoding="utf-8") == study.page()


@pytest.mark.sweep
@pytest.mark.parametrize("variant", study.VARIANTS)
def test_what_is_predicted_of_the_benchmark_is_the_closed_form(variant: str) -> None:
    """But for gradients, which the benchmark frees as a step begins, for RoPE's tables, cuBLAS's workspaces, and what
    the allocator leaves of a block unsplit: up to 1 MiB each.
    """
    workspaces = 2 * hardware(study.ON).blas_workspace_bytes
    tables = study.QWEN.layers * 2 * study.LENGTH * study.QWEN.width // study.QWEN.heads * 4
    with torch.device("meta"):
        model = Decoder(study.QWEN, study.LENGTH)
    model.output.weight = model.embedding.weight
    nbytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    for ranks in study.RANKS:
        expected = stage_bytes(variant, nbytes, ranks)["step_1"]
        kept = 0 if variant == "before" else -(-nbytes // ranks)
        found = study.at_marks(variant, ranks)["step 2"].allocated
        assert found == pytest.approx(expected + kept + tables + workspaces, rel=0.02)
