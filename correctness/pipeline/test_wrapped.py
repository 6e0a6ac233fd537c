"""Pipelines of stages that data parallelism, FSDP2 or tensor parallelism is around."""

from __future__ import annotations

import pytest

from correctness.pipeline.training import differences_on
from correctness.pipeline.wrapped import WRAPS, in_one_process, train_on_rank
from correctness.support.complaints import assert_none
from impl.pipeline import is_schedule
from shardmark.api import Implementation, Mesh, NotAsked
from shardmark.plugin import WorldsBySize


@pytest.mark.long
@pytest.mark.family("pipeline")
@pytest.mark.parametrize("kind", ["plain", pytest.param("recomputed", marks=pytest.mark.large)])
@pytest.mark.parametrize("name", WRAPS)
def test_wrapped_stages_have_the_gradients_of_one_process(
    implementation: Implementation, name: str, kind: str, worlds: WorldsBySize, device: str
) -> None:
    """Gradients of two steps, which accumulate, are averaged over the ranks with batches of their own."""
    if not is_schedule(implementation.target):
        raise NotAsked("studies.composed judges PyTorch's own runtime around wrapped stages")
    mesh = Mesh.parse(WRAPS[name][0])
    ranks = worlds(mesh.size).run(train_on_rank, implementation, name, kind, device)
    stages = 1 + max(int(name.partition(".")[0]) for own in ranks for name in own.parameters)
    for rank, own in enumerate(ranks):
        assert_none(differences_on(rank, own, in_one_process(name, kind, stages, rank)))
