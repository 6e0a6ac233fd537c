"""The work of a case in closed form, against what a step is counted to do where the form is exact.

It is not for causal attention, of which PyTorch counts the masked scores, too; for what reductions compute; and for
what a library sends beyond what its technique needs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from correctness.support.metering import device_of_rank, plan_of
from impl.attention import accounting as attention
from impl.attention.cases import MODES, AttentionCase
from impl.attention.workload import AttentionPass
from impl.data_parallel import accounting as data_parallel
from impl.data_parallel.workload import DataParallelStep
from impl.fsdp import accounting as fsdp
from impl.fsdp.cases import FSDPCase
from impl.fsdp.workload import FSDPStep
from impl.sharded_optimizer import accounting as sharded_optimizer
from impl.sharded_optimizer.cases import ShardedStepCase
from impl.sharded_optimizer.workload import ShardedStep
from impl.training_step import accounting as training_step
from impl.training_step.cases import TrainingStepCase
from impl.training_step.workload import LanguageModelStep
from shardmark.api.registry import resolve
from shardmark.api.work import Work
from shardmark.api.workload import Workload
from shardmark.meter.counters import Counters, count
from shardmark.meter.measure_case import warmed_up
from shardmark.plugin import WorldsBySize

REPLICATED, SHARDED = TrainingStepCase("tiny", 2, 32), FSDPCase("tiny", 2, 32, ranks=2)
OPTIMIZER = ShardedStepCase("tiny", 2, 32)


def counters(workload: type[Workload], family: str, name: str, case: Any, ranks: int) -> Counters | None:
    """Counters of a steady-state step on this rank."""
    plan = plan_of(workload, resolve(family, name), case, ranks, device=device_of_rank())
    return count(warmed_up(plan), plan.device)


SENT: list[Any] = [
    (DataParallelStep, "data_parallel", "bucketed", REPLICATED, data_parallel.work(REPLICATED, 2)),
    (DataParallelStep, "data_parallel", "ddp", REPLICATED, data_parallel.work(REPLICATED, 2)),
    (ShardedStep, "sharded_optimizer", "sharded", OPTIMIZER, sharded_optimizer.work(OPTIMIZER)),
    (ShardedStep, "sharded_optimizer", "zero_redundancy", OPTIMIZER, sharded_optimizer.zero_redundancy_work(OPTIMIZER)),
    (FSDPStep, "fsdp", "sharded", SHARDED, fsdp.work(SHARDED)),
    (FSDPStep, "fsdp", "fsdp2_kept", SHARDED, fsdp.work(SHARDED, kept=True)),
]


def _ids(cases: list[Any]) -> list[str]:
    return [f"{name}-{case}" for _, _, name, case, _ in cases]


@pytest.mark.parametrize(("workload", "family", "name", "case", "work"), SENT, ids=_ids(SENT))
def test_a_step_sends_the_bytes_of_the_formula(
    workload: type[Workload], family: str, name: str, case: Any, work: Work, worlds: WorldsBySize
) -> None:
    found = worlds(2).run(counters, workload, family, name, case, 2)
    assert [rank.bytes_sent for rank in found] == [work.bytes_communicated] * 2


WHOLE = [AttentionCase(batch=2, seq=64, head_dim=16, is_causal=False, mode=mode) for mode in MODES]
FUSED = ("sdpa", "flash_pytorch")
MLP = [TrainingStepCase("mlp-tiny", 2, 32, mode=mode) for mode in ("forward", "step")]


COMPUTED: list[Any] = [
    *((AttentionPass, "attention", name, case, attention.work(case)) for name in FUSED for case in WHOLE),
    *((LanguageModelStep, "training_step", "eager", case, training_step.work(case)) for case in MLP),
]


@pytest.mark.parametrize(("workload", "family", "name", "case", "work"), COMPUTED, ids=_ids(COMPUTED))
def test_a_step_has_the_flops_of_the_formula(
    workload: type[Workload], family: str, name: str, case: Any, work: Work
) -> None:
    found = counters(workload, family, name, case, 1)
    assert found is not None and found.flops == work.flops


def test_causal_attention_has_half_of_the_flops() -> None:
    for case in WHOLE:
        assert 2 * attention.work(replace(case, is_causal=True)).flops == attention.work(case).flops
