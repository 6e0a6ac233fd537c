"""The optimizer, compute dtype, micro-batches and clipping of a user's own model: metered and predicted."""

from dataclasses import replace
from typing import Any

import pytest

from impl.data_parallel.workload import DataParallelStep
from impl.fsdp.workload import FSDPStep
from impl.sharded_optimizer.workload import ShardedStep
from impl.training_step.workload import LanguageModelStep
from shardmark.api.own_model import OwnModelCase
from shardmark.api.recipe import PLAIN, Recipe
from shardmark.api.registry import family
from shardmark.meter.plan import Plan
from shardmark.plugin import WorldsBySize
from shardmark.predict.simulation.predict import predict
from tests.support.predicting import OWN, metered

pytest_plugins = ["pytester", "tests.support.project"]

WORKLOADS: dict[str, type[Any]] = {
    "training_step": LanguageModelStep,
    "data_parallel": DataParallelStep,
    "sharded_optimizer": ShardedStep,
    "fsdp": FSDPStep,
}

RECIPES = {
    "sgd": Recipe("sgd"),
    "foreach": Recipe("torch.optim.AdamW(foreach=True)"),
    "momentum": Recipe("torch.optim.SGD(lr=0.1, momentum=0.9, foreach=False)"),
    "adagrad": Recipe("torch.optim.Adagrad(foreach=True)"),
    "bfloat16": Recipe(compute_dtype="bfloat16"),
    "micro_batches": Recipe(micro_batches=3),
    "clip": Recipe(clip=0.1),
    "all": Recipe("torch.optim.NAdam(foreach=True)", "bfloat16", 2, 1.0),
}

EVERY_TIME = [
    *(("training_step", "eager", recipe) for recipe in RECIPES),
    ("data_parallel", "ddp", "all"),
    ("sharded_optimizer", "sharded", "all"),
    ("sharded_optimizer", "zero_redundancy", "all"),
    ("fsdp", "fsdp1", "all"),
    ("fsdp", "fsdp2", "all"),
    ("fsdp", "fsdp2", "bfloat16"),
    ("fsdp", "sharded", "all"),
]


def _plans() -> list[Any]:
    found = []
    for name, workload in WORKLOADS.items():
        for implementation in family(name).implementations:
            if "compile" in implementation:
                continue
            for recipe in [*RECIPES, "own"]:
                often = (name, implementation, recipe) in EVERY_TIME
                marks = [] if often else [pytest.mark.sweep]
                found.append(pytest.param(workload, name, implementation, recipe, marks=marks))
    return found


def _plan(workload: type[Any], name: str, implementation: str, case: OwnModelCase) -> Plan:
    size = 2 if family(name).on_ranks else 1
    case = replace(case, ranks=size)
    return Plan(workload, family(name).implementations[implementation], None, case, "cpu", size)


@pytest.mark.parametrize(("workload", "name", "implementation", "recipe"), _plans())
def test_what_is_predicted_is_what_each_rank_meters(
    workload: type[Any], name: str, implementation: str, recipe: str, worlds: WorldsBySize
) -> None:
    own = replace(OWN, model="tests.support.own_models:with_optimizer") if recipe == "own" else OWN
    plan = _plan(workload, name, implementation, replace(own, recipe=RECIPES.get(recipe, PLAIN)))
    if reason := plan.implementation.unavailable_reason("cpu", to_measure=True):
        pytest.skip(reason)
    predict(plan)  # DTensor keeps the first mesh of a process
    for rank, real in enumerate(worlds(plan.world_size).run(metered, plan)):
        found = predict(plan, rank).memory
        assert (found.phases, found.peaks, found.tensors) == (real.phases, real.peaks, real.tensors)
