"""What if the optimizer is made before the model is sharded: what trains, what stays in memory, can it be repaired?

FSDP2 gives a model new parameters. An optimizer that holds the old ones updates what is no longer used and keeps it
alive, and nothing says so.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from impl.fsdp.optimizer_order import rewire
from impl.fsdp.optimizer_order_accounting import VARIANTS, stage_bytes
from impl.model.mlp import MLP_SIZES, MLPLanguageModel
from impl.training_step.cases import TrainingStepCase
from shardmark.api import Grid, stage
from shardmark.meter.clock import Stopwatch
from shardmark.meter.measure_case import MOST_PASSES, NEAR
from shardmark.meter.memory import meter
from shardmark.meter.plan import Identity, Measured
from shardmark.plugin.measure import Measure
from shardmark.ranks.world import World
from shardmark.report.observed_answers import who_trains
from shardmark.report.plots import MEMORY_BY_STAGE
from shardmark.rows.observers import Losses, Stages

CASES = Grid(
    smoke=[TrainingStepCase("mlp-tiny", batch=2, context=32)],
    laptop=[TrainingStepCase("mlp-mini", batch=2, context=64)],
    paper=[TrainingStepCase("mlp-1024", batch=4, context=256)],
)


STEPS = 2
WITH_STATE = "before_with_state_repaired"
CALLED = {
    "after": "an optimizer made after sharding",
    "before": "one made before sharding",
    "before_repaired": "one made before and given the shards",
    WITH_STATE: "one that has stepped before and was given the shards",
}


def model_and_batch(case: TrainingStepCase, device: str) -> tuple[MLPLanguageModel, Tensor]:
    """The model and the global batch of token ids, (ranks * batch, context): the same on every rank."""
    torch.manual_seed(0)
    with torch.device(device):
        model = MLPLanguageModel(MLP_SIZES[case.model])
        return model, torch.randint(model.size.vocab, (dist.get_world_size() * case.batch, case.context))


def adamw(model: nn.Module) -> AdamW:
    """AdamW, fused: it allocates no temporaries."""
    return AdamW(model.parameters(), lr=1e-3, fused=True)


def backward(model: nn.Module, tokens: Tensor) -> Tensor:
    """Run forward and backward; return the mean cross entropy of predicting each token from itself."""
    loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    loss.backward()
    return loss.detach()


def update(optimizer: AdamW) -> None:
    """Step the optimizer and free the gradients."""
    optimizer.step()
    optimizer.zero_grad()


def unsharded_losses(case: TrainingStepCase, device: str, dtype: torch.dtype) -> list[float]:
    """The losses of a single process on the whole batch, over one step more than the sharded runs take."""
    model, tokens = model_and_batch(case, device)
    optimizer, losses = adamw(model.to(dtype)), []
    for _ in range(1 + STEPS):
        losses.append(backward(model, tokens).item())
        update(optimizer)
    return losses


def shard(variant: str, model: MLPLanguageModel, tokens: Tensor) -> AdamW:
    """Shard the model and make the optimizer, in the variant's order; `WITH_STATE` steps once before it shards."""
    optimizer = None
    if variant != "after":
        optimizer = adamw(model)
        if variant == WITH_STATE:
            backward(model, tokens)
            update(optimizer)
        stage("optimizer")
    before = dict(model.named_parameters()) if variant.endswith("repaired") else {}
    mesh = init_device_mesh(tokens.device.type, (dist.get_world_size(),))  # by default it is a GPU's, if there is one
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    stage("sharding")
    if optimizer is None:
        optimizer = adamw(model)
        stage("optimizer")
    if before:
        rewire(optimizer, before, dict(model.named_parameters()))
        before.clear()
        stage("repair")
    return optimizer


def train(variant: str, case: TrainingStepCase, device: str) -> tuple[Measured, list[float]]:
    """This rank's measurements, and the loss of each step averaged over the ranks."""
    laps, losses = [], []
    with meter(device) as memory:
        model, tokens = model_and_batch(case, device)
        stage("model")
        optimizer = shard(variant, model, tokens)
        mine = tokens.chunk(dist.get_world_size())[dist.get_rank()]
        for step in range(1, 1 + STEPS):
            watch = Stopwatch(device)
            watch.start()
            losses.append(backward(model, mine))
            if step == 1:
                stage("backward_1")
            update(optimizer)
            laps.append(watch.stop())
            stage(f"step_{step}")
        for loss in losses:
            dist.all_reduce(loss)
    return Measured.once(dist.get_backend(), memory, laps), [loss.item() / dist.get_world_size() for loss in losses]


@pytest.mark.question(
    "What if the optimizer is made before the model is sharded?",
    short="early optimizer",
    columns=["case", "implementation", "time ms", "losses"],
    answer=who_trains,
    plots=[MEMORY_BY_STAGE],
)
@pytest.mark.cases(CASES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_optimizer_order(variant: str, case: TrainingStepCase, world: World, measure: Measure) -> None:
    expected = stage_bytes(variant, 4 * MLP_SIZES[case.model].parameters, world.size)
    for _ in range(MOST_PASSES):
        measured, losses = zip(*world.run(train, variant, case, world.device), strict=True)
        if all(rank.memory.stages[name].live <= NEAR * held for rank in measured for name, held in expected.items()):
            break
    identity = Identity("fsdp", variant, case, world.device, world.size, called=CALLED[variant])
    row = measure.record(identity, list(measured), observe=[Stages(expected), Losses(losses[0])])
    live = {name: held["live"] for name, held in row["memory"]["stages"].items()}

    if world.device == "cpu":  # on CUDA the workspaces that libraries keep are live, too
        assert live == pytest.approx(expected, rel=0.02)
    exact, alone = (
        world.run(unsharded_losses, case, world.device, dtype)[0] for dtype in (torch.float64, torch.float32)
    )
    wanted = {"before": [exact[0]] * STEPS, WITH_STATE: exact[1:]}.get(variant, exact[:STEPS])
    # Twice a single process's error. That may be small by luck: at least twice a rounding for each rank's mean.
    error = max(abs(loss - other) for loss, other in zip(alone, exact, strict=True))
    allowed = 2 * max(error, world.size * torch.finfo(torch.float32).eps * exact[0])
    assert losses[0] == pytest.approx(wanted, rel=0, abs=allowed)
    assert exact[0] - exact[1] > 100 * allowed  # so a variant that trains differs clearly from one that does not
