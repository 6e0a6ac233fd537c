"""Memory metered on real ranks, beside which predictions are judged; programs whose allocations are predicted."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import (
    binary_cross_entropy,
    cross_entropy,
    dropout,
    gelu,
    huber_loss,
    l1_loss,
    mse_loss,
    scaled_dot_product_attention,
    smooth_l1_loss,
)

from impl.attention.cases import AttentionCase
from impl.attention.workload import AttentionPass
from impl.data_parallel.cases import ReductionCase
from impl.data_parallel.workload import DataParallelStep
from impl.fsdp.cases import FSDPCase
from impl.fsdp.workload import FSDPStep
from impl.loss.cases import LossCase
from impl.loss.workload import LossStep
from impl.optim.cases import OptimizerCase
from impl.optim.workload import OptimizerStep
from impl.sharded_optimizer.cases import ShardedStepCase
from impl.sharded_optimizer.workload import ShardedStep
from impl.training_step.cases import TrainingStepCase
from impl.training_step.workload import CheckpointedStep, LanguageModelStep
from shardmark.api.own_model import OwnModelCase
from shardmark.meter.allocations import Allocated, Released
from shardmark.meter.gloo_workers import workers_free_first
from shardmark.meter.measure_case import meter_pass
from shardmark.meter.memory import Memory
from shardmark.meter.plan import Plan
from shardmark.meter.recording import recording
from shardmark.plugin import WorldsBySize
from shardmark.predict.simulation.predict import predict

PASSES = 3
"""Metered passes; the smallest figure counts, as a busy machine's backend may release a tensor late."""


def metered(plan: Plan) -> Memory:
    """Meter the plan on this rank. The first pass of a process includes what libraries keep for good."""
    passes = [meter_pass(plan)[1] for _ in range(PASSES)]
    return Memory(
        phases=_least([each.phases for each in passes]),
        peaks=_least([each.peaks for each in passes]),
        tensors=min(each.tensors for each in passes),
    )


def assert_metered_as_predicted(plan: Plan, worlds: WorldsBySize) -> None:
    """Meter the plan on real ranks; each rank's bytes are those that are predicted."""
    predict(plan)  # DTensor keeps the first mesh of a process
    for rank, real in enumerate(worlds(plan.world_size).run(metered, plan)):
        found = predict(plan, rank).memory
        assert (found.phases, found.peaks, found.tensors) == (real.phases, real.peaks, real.tensors)


def _least(figures: Sequence[dict[str, int]]) -> dict[str, int]:
    return {name: min(each[name] for each in figures) for name in figures[0]}


def allocations(program: Callable[[], object]) -> list[tuple[str, int]]:
    """Each tensor that the program allocates or frees, in order, by its bytes."""
    with workers_free_first("cpu"), recording("cpu") as recorded:
        program()
    return [
        (type(event).__name__, event.block.nbytes)
        for event in recorded.replay()
        if isinstance(event, Allocated | Released) and not event.block.workspace
    ]


def _pair(size: int) -> tuple[Tensor, Tensor]:
    return torch.randn(size, size, requires_grad=True) * 1, torch.randn(size, size, requires_grad=True)


def residual(size: int) -> None:
    """Autograd sums gradients in place, where nothing else refers to them."""
    y, w = _pair(size)
    z = (y @ w).relu() + y
    (z * y.exp()).sum().backward()


def shared(size: int) -> None:
    """Autograd sums into a new tensor where something else refers to the gradient: here a hook has kept it."""
    y, w = _pair(size)
    kept: list[Tensor] = []
    v, z = y.exp(), y + w
    z.register_hook(kept.append)
    (z.sin().sum() + v.sum()).backward()


def retained(size: int) -> None:
    y, w = _pair(size)
    y.retain_grad()
    ((y @ w) + y + y.exp()).sum().backward()


class _Exp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)  # type: ignore[attr-defined]
        return x.exp()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad * x.exp()


def functions_of_python(size: int) -> None:
    y, _ = _pair(size)
    (_Exp.apply(y) + y.sin() + _Exp.apply(y)).sum().backward()


def operators(size: int) -> None:
    y, _ = _pair(size)
    z = gelu(torch.cat([y, y])[:size].softmax(-1)) * torch.sigmoid(y)
    rows = torch.randint(size, (5,))
    loss = cross_entropy(z, torch.randint(size, (size,))) + z[rows].mean() + z.gather(1, rows[:, None]).sum()
    loss = loss + dropout(z, 0.5).sum() + z.masked_fill(z > 0, 0.0).sum() + torch.where(z > 0, z, y).sum()
    loss = (
        loss + z.max(1).values.sum() + z.std() + z.norm() + z.cumsum(0).sum() + z.split(10)[1].sum() + (z.t() @ z).var()
    )
    loss.backward()


def losses(size: int) -> None:
    """The mean of some keeps the storage of all elements' losses."""
    for loss in (mse_loss, smooth_l1_loss, huber_loss, l1_loss, binary_cross_entropy):
        x, y = torch.rand(size, size, requires_grad=True), torch.rand(size, size)
        loss(x * 1, y).backward()


def attention_of_parts(size: int) -> None:
    q, k, v = (torch.randn(2, 2, size, 32, requires_grad=True) for _ in range(3))
    with sdpa_kernel(SDPBackend.MATH):
        scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()


def optimizers(size: int) -> None:
    model = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size))
    for optimizer in (
        torch.optim.Adam(model.parameters(), foreach=True),
        torch.optim.AdamW(model.parameters(), fused=True),
        torch.optim.SGD(model.parameters(), momentum=0.9, foreach=False),
    ):
        model(torch.randn(3, size)).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def loss_scaling(size: int) -> None:
    """The scaler reads a number that a kernel wrote: no gradient is infinite here."""
    model = nn.Linear(size, size)
    optimizer, scaler = torch.optim.AdamW(model.parameters(), fused=True), torch.amp.GradScaler("cpu")
    for _ in range(2):
        scaler.scale(model(torch.randn(3, size)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def batch_norms(size: int) -> None:
    """Operators that write their arguments, the running statistics, and return new tensors."""
    x = torch.randn(4, 8, size, size, requires_grad=True)
    # Not affine: the kernel of backward allocates the weight's gradient before the input's.
    for norm in (nn.BatchNorm2d(8, affine=False), nn.InstanceNorm2d(8, track_running_stats=True)):
        norm(x).square().mean().backward()
        x.grad = None
        with torch.no_grad():
            norm.eval()(x)


def grouped_products(size: int) -> None:
    """Products of tokens with their experts' matrices, in each of their four forms."""
    tokens, experts = torch.randn(3 * size, size, requires_grad=True), torch.randn(3, size, 4, requires_grad=True)
    ends = torch.tensor([size, 2 * size, 3 * size], dtype=torch.int32)
    torch._grouped_mm(tokens, experts, ends).square().mean().backward()
    batch = tokens.detach().view(3, size, size)
    torch._grouped_mm(batch, experts.detach())
    torch._grouped_mm(batch, torch.randn(size, 12), torch.tensor([4, 8, 12], dtype=torch.int32))


PROGRAMS = [
    residual,
    shared,
    retained,
    functions_of_python,
    operators,
    losses,
    attention_of_parts,
    optimizers,
    loss_scaling,
    batch_norms,
    grouped_products,
]


OWN = OwnModelCase("tests.support.own_models:make", "make", "float32", 0, 0)
"""A user's own model."""

CASES: dict[str, tuple[type[Any], list[Any], tuple[int, ...]]] = {
    "training_step": (
        LanguageModelStep,
        [*(TrainingStepCase("tiny", 2, 32, dtype=dtype) for dtype in ("float32", "bfloat16", "float16")), OWN],
        (1,),
    ),
    "checkpointing": (CheckpointedStep, [TrainingStepCase("tiny", 2, 64), OWN], (1,)),
    "attention": (AttentionPass, [AttentionCase(1, 256, 32), AttentionCase(1, 256, 32, mode="backward")], (1,)),
    "loss": (LossStep, [LossCase(256, 64, 1000)], (1,)),
    "optimizer": (
        OptimizerStep,
        [
            OptimizerCase("tiny"),
            OptimizerCase("tiny", dtype="bfloat16", master_weights=True),
            OptimizerCase("tiny", clipping="in_step"),
        ],
        (1,),
    ),
    "data_parallel": (DataParallelStep, [TrainingStepCase("tiny", 2, 32), ReductionCase("tiny", 2, 32), OWN], (2, 3)),
    "sharded_optimizer": (ShardedStep, [ShardedStepCase("tiny", 2, 32), OWN], (2, 3)),
    "fsdp": (FSDPStep, [FSDPCase("tiny", 2, 32), FSDPCase("tiny", 2, 32, dtype="bfloat16"), OWN], (2, 3)),
}
"""By family: its workload, cases and numbers of ranks."""

COMPILED = ("compile", "flex", "triton")
"""Parts of the names of implementations that are not eager."""
