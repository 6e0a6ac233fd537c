"""What if the optimizer is made before the model is sharded: what trains, what stays in memory, can it be repaired?

FSDP2 gives a model new parameters. An optimizer that holds the old ones updates what is no longer used and keeps it
alive, and nothing says so. accelerate's benchmark of FSDP2 asks this, of the same variants; docs/optimizer-order.md has
what is predicted for its model and its GPUs.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from impl.fsdp.accelerated import prepare, requires_accelerate
from impl.fsdp.optimizer_order import rewire
from impl.fsdp.optimizer_order_accounting import STEPS, VARIANTS, stage_bytes
from impl.model import SIZES
from impl.training_step.cases import TrainingStepCase
from impl.training_step.models import language_model, random_tokens
from shardmark.api import Grid, stage
from shardmark.meter.clock import Stopwatch
from shardmark.meter.measure_case import MOST_PASSES, NEAR
from shardmark.meter.memory import meter
from shardmark.meter.plan import Identity, Measured
from shardmark.plugin.measure import Measure
from shardmark.ranks.world import World
from shardmark.report.observed_answers import who_trains
from shardmark.report.plots import MEMORY_BY_STAGE, Lines
from shardmark.rows.observers import Losses, Stages

CASES = Grid(
    smoke=[TrainingStepCase("tiny", batch=2, context=32)],
    laptop=[TrainingStepCase("mini", batch=2, context=64)],
    paper=[TrainingStepCase("medium", batch=2, context=128)],
)


WITH_STATE = "before_with_state_repaired"
CALLED = {
    "after": "an optimizer made after sharding",
    "before": "one made before sharding",
    "before_repaired": "one made before and given the shards",
    WITH_STATE: "one that has stepped before and was given the shards",
    "accelerate": "one made before and repaired by accelerate",
}


def model_and_batch(case: TrainingStepCase, device: str) -> tuple[nn.Module, Tensor]:
    """The model and the global batch of token ids, (ranks * batch, context): the same on every rank."""
    torch.manual_seed(0)
    with torch.device(device):
        return language_model(case), random_tokens(replace(case, batch=dist.get_world_size() * case.batch))[0]


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


def shard(variant: str, model: nn.Module, tokens: Tensor) -> AdamW:
    """Shard the model and make the optimizer, in the variant's order; `WITH_STATE` steps once before it shards."""
    optimizer = None
    if variant != "after":
        optimizer = adamw(model)
        if variant == WITH_STATE:
            backward(model, tokens)
            update(optimizer)
        stage("optimizer")
    before = dict(model.named_parameters()) if variant.endswith("repaired") else {}
    mesh = init_device_mesh(  # by default it is a GPU's, if there is one
        tokens.device.type, (dist.get_world_size(),), mesh_dim_names=("ranks",)
    )
    if variant == "accelerate":
        assert optimizer is not None
        prepare(model, optimizer, mesh, (type(model.blocks[0]),))
        stage("sharding")
        return optimizer
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
    plots=[Lines("Loss by step", "", "losses", x_title="step", y_title="loss", log_y=False), MEMORY_BY_STAGE],
)
@pytest.mark.cases(CASES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_optimizer_order(variant: str, case: TrainingStepCase, world: World, measure: Measure) -> None:
    if variant == "accelerate" and (reason := requires_accelerate(world.device)):
        pytest.skip(f"{variant}: {reason}")
    size = SIZES[case.model]
    held = 4 * case.context * size.head_dim + 8 * world.size * case.tokens  # RoPE's tables and the batch
    stages = stage_bytes(variant, 4 * size.parameters, world.size)
    expected = {name: nbytes + held for name, nbytes in stages.items()}
    for _ in range(MOST_PASSES):
        measured, losses = zip(*world.run(train, variant, case, world.device), strict=True)
        if all(rank.memory.stages[name].live <= NEAR * most for rank in measured for name, most in expected.items()):
            break
    identity = Identity("fsdp", variant, case, world.device, world.size, called=CALLED[variant])
    row = measure.record(identity, list(measured), observe=[Stages(expected), Losses(losses[0])])
    live = {name: stage["live"] for name, stage in row["memory"]["stages"].items()}

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
