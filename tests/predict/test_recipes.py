"""The optimizer, compute dtype, micro-batches and clipping of a user's own model: metered and predicted."""

import os
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.support.own_model import Trained, assert_as_in_one_process, optimizer_of, own_model, train
from impl.data_parallel.workload import DataParallelStep
from impl.fsdp import TorchFSDP2, with_blocks
from impl.fsdp.workload import FSDPStep
from impl.sharded_optimizer.workload import ShardedStep
from impl.training_step.workload import LanguageModelStep
from shardmark.api.finding import RegistryError
from shardmark.api.own_model import OwnModelCase
from shardmark.api.recipe import ADAMW, PLAIN, Recipe, recipe_of, taken_apart
from shardmark.api.registry import Unsupported, family
from shardmark.meter.hardware import hardware
from shardmark.meter.plan import Plan
from shardmark.plugin import WorldsBySize
from shardmark.predict.own_model import check
from shardmark.predict.simulation.predict import predict, simulation
from shardmark.predict.simulation.routing import Routing
from tests.support.own_models import with_groups
from tests.support.predicting import OWN, assert_metered_as_predicted, metered

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
    *(("training_step", "eager", recipe) for recipe in ("foreach", "momentum", "micro_batches", "all")),
    ("data_parallel", "ddp", "all"),
    ("sharded_optimizer", "sharded", "all"),
    ("fsdp", "fsdp2", "all"),
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
    assert_metered_as_predicted(plan, worlds)


LIKE = "it is adamw, sgd, or a class with its options by name, such as torch.optim.AdamW(lr=1e-4, foreach=True)"
SPEC = "tests.support.own_models"


class InTwoNodes(FSDPStep):
    """As if torchrun had started two ranks on each node."""

    def __init__(self, *args: Any) -> None:
        with patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
            super().__init__(*args)


def test_a_copy_in_each_of_two_nodes_is_predicted_as_metered(worlds: WorldsBySize) -> None:
    """Each rank of four has half of the parameters, gradients and moments."""
    case = replace(OWN, ranks=4, recipe=RECIPES["all"])
    plan = Plan(InTwoNodes, family("fsdp").implementations["fsdp2_hybrid"], None, case, "cpu", 4)
    assert_metered_as_predicted(plan, worlds)
    found, flat = predict(plan, 3).memory, predict(replace(plan, workload=FSDPStep)).memory
    assert found.phases["after_init"] > 1.7 * flat.phases["after_init"]


def trained_in_two_nodes(case: OwnModelCase, device: str) -> Trained:
    own = own_model(case, device, dist.get_rank())
    with patch.dict(os.environ, LOCAL_WORLD_SIZE="2"):
        model = TorchFSDP2(own.module, wrap=with_blocks(own.blocks), hybrid=True)
    optimizer = optimizer_of(case, own)(list(model.parameters()))
    return train(model, case, device, model.gather_full_parameters, optimizer, model, model.clip_grad_norm_)


def test_a_copy_in_each_of_two_nodes_trains_as_one_process(worlds: WorldsBySize, device: str) -> None:
    case = replace(OWN, recipe=Recipe(micro_batches=2, clip=0.01))
    assert_as_in_one_process(worlds(4).run(trained_in_two_nodes, case, device), case, device)


@pytest.mark.parametrize("name", ["masks", "where"])
@pytest.mark.parametrize("shares", ["uniform", "0.4,0.1,0.3,0.2"])
@pytest.mark.parametrize("on_ranks", [False, pytest.param(True, marks=pytest.mark.sweep)], ids=["one", "ranks"])
def test_a_loop_over_experts_is_predicted_by_their_shares(
    name: str, shares: str, on_ranks: bool, worlds: WorldsBySize
) -> None:
    """To the byte, where the real router chooses as many tokens for each expert."""
    spec = f"{SPEC}:{name}_{'uniform' if shares == 'uniform' else 'uneven'}"
    case = replace(OWN, model=spec, recipe=Recipe(routing=shares))
    workload, of, how = (FSDPStep, "fsdp", "fsdp2") if on_ranks else (LanguageModelStep, "training_step", "eager")
    plan = _plan(workload, of, how, case)
    predict(plan)
    [real, *_] = worlds(plan.world_size).run(metered, plan)
    found = predict(plan).memory
    assert (found.phases, found.peaks, found.tensors) == (real.phases, real.peaks, real.tensors)
    with pytest.raises(Unsupported, match="depends on values"):
        predict(replace(plan, case=replace(case, recipe=PLAIN)))


@pytest.mark.parametrize("shares", [(), (0.4, 0.1, 0.3, 0.2), (0.5, 0.5, 0.0, 0.0)])
def test_each_expert_gets_its_share_and_each_token_different_experts(shares: tuple[float, ...]) -> None:
    chosen = Routing(shares).chosen(1001, 2, 4)
    expected = [2 * 1001 * share for share in shares or (0.25,) * 4]
    assert chosen.shape == (1001, 2) and (chosen[:, 0] != chosen[:, 1]).all()
    assert all(abs((chosen == i).sum() - n) <= 1 for i, n in enumerate(expected))
    with pytest.raises(Unsupported, match=r"each token goes to 2 experts, so a share is at most 0\.5"):
        Routing((0.6, 0.4)).chosen(10, 2, 2)


def test_hybrid_sharding_takes_full_nodes() -> None:
    with simulation(12, on=hardware("h100-80gb")), pytest.raises(Unsupported, match=r"not 12 ranks in nodes of 8$"):
        TorchFSDP2(nn.Linear(2, 2), hybrid=True)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (("adam", None, None, None, None), f"--optimizer adam: {LIKE}"),
        (("torch.optim.SGD(0.1)", None, None, None, None), f"--optimizer torch.optim.SGD(0.1): {LIKE}"),
        (("torch.optim.SGD(lr=f())", None, None, None, None), f"--optimizer torch.optim.SGD(lr=f()): {LIKE}"),
        (("torch.optim.Old", None, None, None, None), "--optimizer torch.optim.Old: torch.optim has no 'Old'"),
        (("torch.nn.Linear", None, None, None, None), "--optimizer torch.nn.Linear: it is not a class of *.Optimizer"),
        ((None, "float16", None, None, None), "--compute-dtype is bfloat16, not 'float16'"),
        ((None, None, "0", None, None), "--micro-batches is a number from 1 to 99,999, not '0'"),
        ((None, None, None, "-1", None), "--clip is the largest norm of the gradients, such as 1.0, not '-1'"),
        ((None, None, None, None, "even"), "--routing is uniform, or experts' shares such as *, not 'even'"),
        ((None, None, None, None, "0.5,-1"), "--routing is uniform, or experts' shares such as *, not '0.5,-1'"),
        ((None, None, None, "nan", None), "--clip is the largest norm of the gradients, such as 1.0, not 'nan'"),
    ],
)
def test_a_bad_value_is_one_line(given: tuple[str | None, ...], line: str) -> None:
    with pytest.raises(RegistryError) as error:
        recipe_of(*given)
    assert fnmatchcase(str(error.value), line.replace("[", "[[]")), str(error.value)


@pytest.mark.parametrize(
    ("name", "recipe", "line"),
    [
        (
            "make",
            Recipe("torch.optim.SGD(rate=1)"),
            "--optimizer torch.optim.SGD(rate=1): *: TypeError: *unexpected keyword argument 'rate'",
        ),
        ("make", Recipe("torch.optim.LBFGS"), "--optimizer torch.optim.LBFGS: *: TypeError: *'closure'"),
        (
            "in_bfloat16",
            Recipe(compute_dtype="bfloat16"),
            "--compute-dtype bfloat16 takes a model whose parameters are float32, not bfloat16",
        ),
    ],
)
def test_a_recipe_that_the_model_cannot_follow_is_one_line(name: str, recipe: Recipe, line: str) -> None:
    with pytest.raises(RegistryError) as error:
        check(f"{SPEC}:{name}", True, recipe)
    assert fnmatchcase(str(error.value), line) and "\n" not in str(error.value), str(error.value)


def test_a_case_says_how_it_is_trained_and_counts_every_micro_batch() -> None:
    recipe = Recipe("sgd", "bfloat16", 4, 0.5)
    plain, case = (OwnModelCase.of(check(f"{SPEC}:make", True, each)) for each in (PLAIN, recipe))
    assert str(case) == "own_models.make-float32-step-SGD-bfloat16_compute-4_micro_batches-clip_0.5"
    assert case.work.flops == 4 * plain.work.flops and case.compute_dtype == "bfloat16" != plain.compute_dtype
    assert OwnModelCase.of(check(f"{SPEC}:with_optimizer", True)).optimizer == "AdamW"


class Scaled(torch.optim.SGD):
    """Does not say its `scale`."""

    def __init__(self, params: Any, lr: float = 0.1, scale: float = 1.0) -> None:
        super().__init__(params, lr * scale)


def test_a_strategy_makes_the_same_optimizer_itself() -> None:
    """Groups, class and options; the state that some make at once is not made twice at full size."""
    parameters = [nn.Parameter(torch.ones(3, 2)) for _ in range(4)]
    groups, kind, options = taken_apart(with_groups, parameters)
    assert kind is torch.optim.AdamW and options["lr"] == 1e-3 and options["fused"] is None
    assert [(group.get("weight_decay"), len(group["params"])) for group in groups] == [(0.1, 2), (None, 2)]
    assert all(a is b for a, b in zip(groups[0]["params"] + groups[1]["params"], parameters, strict=True))
    rebuilt = kind(groups, **options)
    assert [group["weight_decay"] for group in rebuilt.param_groups] == [0.1, 0.01]
    assert taken_apart(ADAMW, parameters) == (parameters, torch.optim.AdamW, {"lr": 1e-4, "fused": True})
    seen: list[Tensor] = []
    taken_apart(lambda ps: seen.extend(ps) or torch.optim.SGD(ps), parameters)  # type: ignore[func-returns-value]
    assert [each.shape for each in seen] == [(1, 1)] * 4
    assert taken_apart(partial(Scaled, scale=2.0), parameters)[2] == {"scale": 2.0}
    with pytest.raises(Unsupported, match=r"^Scaled's option 'scale' is not among its defaults: return functools"):
        taken_apart(Scaled, parameters)


@pytest.mark.parametrize("name", ["checkpointing", "checkpointing_reentrant"])
def test_a_model_that_checkpoints_itself_is_not_checkpointed_twice(name: str) -> None:
    own = OwnModelCase.of(check(f"{SPEC}:{name}", True))
    assert own.checkpoints and not OwnModelCase.of(check(f"{SPEC}:make", True)).checkpoints
    plan = _plan(LanguageModelStep, "training_step", "eager", own)
    again = replace(plan, case=replace(own, checkpointed=True))
    assert (
        predict(plan).memory.phases["after_forward"] < predict(replace(plan, case=OWN)).memory.phases["after_forward"]
    )
    with pytest.raises(Unsupported, match=r"^Checkpointing calls torch.utils.checkpoint itself, and is not "):
        predict(again)


def test_one_call_for_a_step_takes_one_batch() -> None:
    plan = _plan(LanguageModelStep, "training_step", "compile_step", replace(OWN, recipe=Recipe(micro_batches=2)))
    with pytest.raises(Unsupported, match=r"^compile_step takes one batch a step"):
        LanguageModelStep(plan.implementation, plan.case, "cpu")
