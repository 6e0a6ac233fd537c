"""Stages that pipelines are tested with: of several widths, with several outputs, shared weights, dropout, frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from correctness.pipeline.outputs import NumbersFirst, PassesOn, Rotated, Several, Sometimes, Views
from correctness.pipeline.plain import CONTEXT, HIDDEN, VOCABULARY, Plain, width
from correctness.support.default_dtype import default_dtype

Tensors = tuple[Tensor, ...]

ROWS = 3
IGNORED = -100


class Recomputed(Plain):
    """A stage whose forward pass is run again in backward."""

    def passed(self, x: Tensor) -> Tensor:
        return checkpoint(super().passed, x, use_reentrant=False)


class Autocast(Plain):
    """A stage whose products are of bfloat16, as is what it passes on; weights and their gradients are float32."""

    def passed(self, x: Tensor) -> Tensor:
        with torch.autocast(x.device.type, torch.bfloat16):
            return super().passed(x)


class Dropping(Plain):
    """A stage with dropout, whose seed is told along with the values: that of the micro-batch."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        self.stage, self.last = stage, stage == stages - 1

    def forward(self, x: Tensor, seed: Tensor | None = None) -> Any:
        seed = x.flatten()[:1] if seed is None else seed
        known = int(seed) % 2**31  # PyTorch tries stages on memory that nobody has written
        random = torch.Generator().manual_seed(known * 100 + self.stage)
        out = super().forward(x)
        out = out * (torch.rand(out.shape, generator=random) > 0.3).to(out) / 0.7
        return out if self.last else (out, seed)


class Tied(Plain):
    """The last stage computes logits with a copy of the first stage's embedding."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        if stage == stages - 1:
            self.outer = nn.Linear(HIDDEN, width(0), bias=False)
            self.head = nn.Linear(width(0), VOCABULARY, bias=False)

    def passed(self, x: Tensor) -> Tensor:
        x = super().passed(x)
        return self.head(x) if hasattr(self, "head") else x


class Frozen(Plain):
    """The first stage is frozen, and so is the first layer of each other stage."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        for parameter in self.parameters() if stage == 0 and stages > 1 else self.inner.parameters():
            parameter.requires_grad_(False)


class Adapted(nn.Linear):
    """A linear layer with a forward pass of its own: half of its product is by another weight."""

    def __init__(self, into: int, out: int) -> None:
        super().__init__(into, out, bias=False)
        self.low = nn.Parameter(torch.randn(out, into) / into)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + nn.functional.linear(x, self.low)


class WithAnAdapter(Plain):
    """A stage one of whose layers is a subclass of `nn.Linear`."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        self.outer = Adapted(HIDDEN, self.outer.out_features)


class Counting(Plain):
    """A stage that counts the rows that it has seen, in a buffer."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        self.register_buffer("rows", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.rows += len(x)
        return super().forward(x)


class UsedTwice(Plain):
    """A weight that a pass uses twice, the second time on what came of the first."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        self.again = nn.Linear(HIDDEN, HIDDEN)

    def passed(self, x: Tensor) -> Tensor:
        hidden = self.again(torch.tanh(self.inner(self.norm(x))))
        return self.outer(torch.tanh(self.again(hidden)))


class Hooked(Plain):
    """A stage that halves the gradient of its input, by a hook on it."""

    def forward(self, x: Tensor) -> Any:
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / 2)
        return super().forward(x)


class Bare(Plain):
    """The second stage has no parameters."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        if stage == 1:
            self.norm, self.inner, self.outer = nn.Identity(), nn.Identity(), Widened(self.outer.out_features)


class InDouble(Plain):
    """The first stage is of float32; the others, and with them the loss, are of float64."""

    def passed(self, x: Tensor) -> Tensor:
        return super().passed(x if self.embedding is not None else x.double())


class Quantized(Plain):
    """A stage with a frozen weight of int8, times a trained scale of each row."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages)
        self.quantized = nn.Parameter(torch.randint(-127, 128, (HIDDEN, HIDDEN), dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.rand(HIDDEN, 1) / 300)

    def passed(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.inner(self.norm(x)))
        return self.outer(hidden + nn.functional.linear(hidden, self.quantized.to(hidden) * self.scale))


class Widened(nn.Module):
    """The values, cut or repeated to that width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def forward(self, x: Tensor) -> Tensor:
        return x.repeat(1, 1, 2)[..., : self.width].contiguous()


@dataclass(frozen=True)
class Kind:
    """A kind of stages, and how near to one process it comes, relative to the largest value of a tensor: of float64
    alone, or where products are rounded as in one process, and added up in another order."""

    of: type[Plain]
    dtype: torch.dtype = torch.float64
    first: torch.dtype | None = None
    """The dtype of the first stage, where it is another one."""
    within: float = 1e-12
    scaled: bool = False
    """Whether the first stage takes a scale of each row beside the tokens."""


KINDS = {
    "plain": Kind(Plain),
    "several_outputs": Kind(Several),
    "sometimes_unused_outputs": Kind(Sometimes),
    "numbers_first": Kind(NumbersFirst),
    "views": Kind(Views),
    "passes_on_what_it_has": Kind(PassesOn, scaled=True),
    "buffers": Kind(Counting),
    "dropout": Kind(Dropping),
    "tied": Kind(Tied),
    "frozen": Kind(Frozen),
    "recomputed": Kind(Recomputed),
    "autocast": Kind(Autocast, dtype=torch.float32, within=1e-5),
    "subclass_of_linear": Kind(WithAnAdapter),
    "used_twice": Kind(UsedTwice),
    "hook_on_its_input": Kind(Hooked),
    "without_parameters": Kind(Bare),
    "frozen_integers": Kind(Quantized),
    "complex_numbers": Kind(Rotated),
    "of_two_dtypes": Kind(InDouble, first=torch.float32, within=1e-5),
}


def build(kind: str, device: str, stage: int, stages: int) -> nn.Module:
    """A stage with the same weights on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(50 + stage)
        with default_dtype((stage == 0 and KINDS[kind].first) or KINDS[kind].dtype):
            module = KINDS[kind].of(stage, stages)
        if isinstance(module, Tied) and stage == stages - 1:
            torch.manual_seed(50)
            with default_dtype(KINDS[kind].dtype):
                module.head.weight.data.copy_(KINDS[kind].of(0, stages).embedding.weight.data)  # type: ignore[union-attr]
    return module.to(device)


def micro_batches(
    count: int, step: int, device: str = "cpu", equal: bool = False, kind: str = "plain"
) -> tuple[list[Tensors], list[Tensor]]:
    """Tokens (rows, CONTEXT) of each micro-batch, with one to three rows, beside what else stages of the kind take; and
    targets with some left out."""
    random = torch.Generator().manual_seed(1000 + step)
    inputs, targets = [], []
    for number in range(count):
        rows = ROWS if equal else 1 + (number + step) % ROWS
        tokens, aims = (torch.randint(VOCABULARY, (rows, CONTEXT), generator=random) for _ in range(2))
        aims[torch.rand(aims.shape, generator=random) > 0.7] = IGNORED
        scales = (0.5 + torch.rand(rows, generator=random, dtype=torch.float64),) * KINDS[kind].scaled
        inputs.append(tuple(each.to(device) for each in (tokens, *scales)))
        targets.append(aims.to(device))
    return inputs, targets


def loss(output: Any, targets: Tensor) -> Tensor:
    """The sum of the cross entropies of the targets that are not left out, in float32 at least, and of a number that
    the last stage returned beside the logits."""
    logits, *more = output if isinstance(output, tuple) else (output,)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return sum(more, losses)


def builder(kind: str, device: str) -> Any:
    return partial(build, kind, device)


def passed(modules: Sequence[nn.Module], inputs: Tensors) -> Tensor:
    """A micro-batch's output, through all stages."""
    x: Any = inputs
    for module in modules:
        x = module(*x) if isinstance(x, tuple) else module(x)
    return x
