"""SimpleFSDP's memory against its closed forms, and models that start on the meta device."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from correctness.fsdp.modes import TINY, mesh_for, ranks_for
from correctness.support.metering import assert_metered, device_of_rank
from correctness.support.training import whole
from impl.checkpointing import full
from impl.fsdp.cases import RankRung
from impl.fsdp.simple import PLACEMENTS, data_parallel, init_weights
from impl.fsdp.simple_accounting import peak_of_stages, stages, step_bytes
from impl.model.mlp import MLPLanguageModel
from impl.training_step import EagerStep
from shardmark.meter.memory import meter
from shardmark.plugin import WorldsBySize


def initialized(mode: str, device: str, seed: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Each parameter's shard and full value, for a model that starts on meta."""
    torch.manual_seed(dist.get_rank())  # the ranks' default generators must not matter
    with torch.device("meta"):
        model = MLPLanguageModel(TINY)
    data_parallel(model, mesh_for(mode, device), mode).to_empty(device=device)
    init_weights(model, seed)
    return {name: (p.to_local().detach().cpu(), whole(p)) for name, p in model.named_parameters()}


@pytest.mark.parametrize("mode", PLACEMENTS)
def test_weights_made_on_ranks_are_distributed_as_the_constructors(
    mode: str, device: str, worlds: WorldsBySize
) -> None:
    torch.manual_seed(0)
    expected = MLPLanguageModel(TINY).state_dict()
    first, *others = worlds(ranks_for(mode)).run(initialized, mode, device, 0)
    for name, (shard, parameter) in first.items():
        if name.startswith("norm"):
            assert torch.equal(parameter, expected[name])
            continue
        spread = 3 / expected[name].numel() ** 0.5  # three standard errors, for standard deviations as for means
        assert abs(parameter.mean() / expected[name].std()) < spread, name
        assert abs(parameter.std() / expected[name].std() - 1) < spread, name
        assert all(torch.equal(other[name][1], parameter) for other in others), name
        if mode != "replicate":
            assert not torch.equal(shard, others[0][name][0]), f"{name}'s shards are alike"
    again, *_ = worlds(ranks_for(mode)).run(initialized, mode, device, 1)
    assert not torch.equal(again["output.weight"][1], first["output.weight"][1])


def test_init_weights_draws_what_the_constructor_does() -> None:
    torch.manual_seed(0)
    expected = MLPLanguageModel(TINY).state_dict()
    with torch.device("meta"):
        model = MLPLanguageModel(TINY)
    torch.manual_seed(0)
    model.to_empty(device="cpu").init_weights()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def metered_stages(case: RankRung) -> dict[str, int]:
    device = device_of_rank()
    mesh = mesh_for("fully_shard", device)
    with meter(device) as memory:
        with torch.device("meta" if case.meta else device):
            model = MLPLanguageModel(TINY)
        memory.mark("model")
        data_parallel(model, mesh)
        memory.mark("data_parallel")
        if case.meta:
            model.to_empty(device=device)
            memory.mark("to_empty")
            init_weights(model)
            memory.mark("init_weights")
    return {**memory.phases, "peak": memory.tensors}


@pytest.mark.parametrize("meta", [False, True], ids=["no_meta", "meta"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_stage_holds_more_than_its_formula(meta: bool, ranks: int, worlds: WorldsBySize) -> None:
    """A model that starts on meta never holds more than its shards and a generator's state."""
    case = RankRung("mlp-tiny", 1, 8, meta=meta, ranks=ranks)
    assert_metered(worlds(ranks), ranks * [{**stages(case), "peak": peak_of_stages(case)}], metered_stages, case)


PHASES = ("after_init", "before_step", "after_forward", "after_backward")
PEAKS = ("peak_of_first_step", "peak_of_forward", "peak_of_backward")


def expected_step(case: RankRung, reshard: bool) -> dict[str, int]:
    expected = step_bytes(case, reshard)
    return {name: expected[name] for name in PHASES + PEAKS}


def metered_step(case: RankRung, reshard: bool) -> dict[str, int]:
    """The second step's phases and peaks, and the first step's peak."""
    device = device_of_rank()
    mesh = mesh_for("fully_shard", device)
    policy = MixedPrecisionPolicy(
        param_dtype=getattr(torch, case.dtype), reduce_dtype=getattr(torch, case.reduce_dtype)
    )
    with meter(device) as memory:
        with torch.device("meta"):
            model = MLPLanguageModel(TINY)
        data_parallel(model, mesh, mp_policy=policy, reshard_after_forward=reshard)
        init_weights(model.to_empty(device=device))
        if case.checkpointed:
            full(model)
        step = EagerStep(model, torch.optim.AdamW(model.parameters(), fused=True))
        tokens, targets = (torch.randint(TINY.vocab, (case.batch, case.context), device=device) for _ in range(2))
        memory.mark("after_init")

        def mark(part: str) -> None:
            memory.mark(f"after_{part}")
            if part == "forward":
                memory.keep_peak("peak_of_forward")

        for name in ("peak_of_first_step", "peak_of_backward"):
            memory.mark("before_step")
            memory.reset_peak()
            step(tokens, targets, mark)
            memory.keep_peak(name)
            step.optimizer.zero_grad()
    return {name: memory.phases[name] for name in PHASES} | {name: memory.peaks[name] for name in PEAKS}


@pytest.mark.parametrize(
    ("dtype", "reduce_dtype", "checkpointed", "reshard"),
    [
        ("float32", "float32", False, True),
        ("float32", "float32", False, False),
        ("float32", "bfloat16", True, False),
        ("bfloat16", "float32", False, True),
        ("bfloat16", "bfloat16", True, True),
    ],
)
def test_bytes_of_a_step_are_exact(
    dtype: str, reduce_dtype: str, checkpointed: bool, reshard: bool, worlds: WorldsBySize
) -> None:
    case = RankRung("mlp-tiny", 3, 61, dtype, reduce_dtype=reduce_dtype, checkpointed=checkpointed)
    assert_metered(worlds(2), 2 * [expected_step(case, reshard)], metered_step, case, reshard)


def test_on_four_ranks_and_where_the_peak_is_elsewhere(worlds: WorldsBySize) -> None:
    """With few tokens memory peaks at the end of backward."""
    case = RankRung("mlp-tiny", 3, 2, ranks=4)
    assert_metered(worlds(4), 4 * [expected_step(case, True)], metered_step, case, True)
