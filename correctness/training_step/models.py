"""Small language models whose loss depends on modes, the full batch, dropout and shared parameters."""

from typing import Any

import torch
from torch import Tensor, nn

from correctness.training_step.stepping import SIZE
from impl.model.mlp import MLPLanguageModel


class Halves(nn.Module):
    """Halves its input, in training mode only."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2 if self.training else x


class Mixes(nn.Module):
    """The mean of each position and the mean position of the batch: like a model that is not causal."""

    def forward(self, x: Tensor) -> Tensor:  # (batch, context, dim)
        return (x + x.mean((0, 1), keepdim=True)) / 2


class Tracks(nn.Module):
    """Subtracts a running mean, as a batch norm that evaluates does, and counts its calls in training mode: one buffer
    changes in place, and one is replaced."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:  # (batch, context, dim)
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(x.mean((0, 1)).to(self.mean), 0.3)
                self.calls = self.calls + 1
        return x - self.mean


class Table(nn.Module):
    """Each token's logits are a row of the weight: exact in any dtype, and in the weight's dtype under autocast too.

    `inner` is applied to the logits.
    """

    def __init__(self, vocab: int, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.rows = nn.Embedding(vocab, vocab)
        self.blocks = nn.ModuleList([inner or nn.Identity()])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.rows(tokens)
        for block in self.blocks:
            x = block(x)
        return x


KINDS = ("plain", "tied", "unused", "shared", "context_first", "tracking")
"""Kinds of models: every parameter used once; one used in two places; one not used; a layer used in two blocks; logits
whose memory is in the order (context, batch, vocab); buffers that forward changes, behind the blocks."""


def context_first(model: nn.Module, args: Any, logits: Tensor) -> Tensor:
    """A forward hook that returns the same logits in another order of memory."""
    return logits.transpose(0, 1).contiguous().transpose(0, 1)


def moody_model(kind: str = "plain") -> nn.Module:
    """A model whose loss depends on its full batch and on each submodule's mode."""
    model: Any = MLPLanguageModel(SIZE)
    for block in model.blocks:
        block.gelu = nn.Sequential(block.gelu, Halves())
    model.norm = nn.Sequential(model.norm, Mixes(), Halves())
    if kind == "tied":
        model.output.weight = model.embedding.weight
        with torch.no_grad():
            model.output.weight.mul_(0.5)
    elif kind == "unused":
        model.unused = nn.Parameter(torch.ones(3))
    elif kind == "shared":
        model.blocks[1].w1 = model.blocks[0].w1
    elif kind == "context_first":
        model.register_forward_hook(context_first)
    elif kind == "tracking":
        model.norm.append(Tracks(SIZE.dim))
    return model


def set_modes(model: nn.Module, number: int) -> None:
    """Set each module's mode at random, seeded by `number`."""
    draw = torch.Generator().manual_seed(number)
    for module in model.modules():
        module.training = bool(torch.randint(2, (), generator=draw))


def what_stays(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Snapshot of what a step must not change, by the name that a failure prints."""
    stays = {f"the training mode of {name or 'the model'}": module.training for name, module in model.named_modules()}
    for name, p in model.named_parameters():
        stays |= {f"{what} of {name}": getattr(p, what) for what in ("requires_grad", "dtype")}
        stays[f"the identity of {name}"] = id(p)
    for i, group in enumerate(optimizer.param_groups if optimizer else ()):
        stays |= {f"{name!r} of param group {i}": value for name, value in group.items() if name != "params"}
        stays[f"the parameters of param group {i}"] = [id(p) for p in group["params"]]
    stays["whether gradients are recorded"] = torch.is_grad_enabled()
    stays["autocast on CPU"] = torch.is_autocast_enabled("cpu")
    return stays


def assert_stays(model: nn.Module, before: dict[str, Any], when: str, optimizer: Any = None) -> None:
    after = what_stays(model, optimizer)
    for what, value in before.items():
        assert after.get(what) == value, f"{what} was {value}, and is {after.get(what)} {when}"


def values_of(model: nn.Module) -> dict[str, Tensor | None]:
    """Copies of the parameters, their gradients and the buffers, by the name that a failure prints."""
    found: dict[str, Tensor | None] = {name: x.detach().clone() for name, x in model.state_dict().items()}
    grads = {f"the gradient of {name}": p.grad for name, p in model.named_parameters()}
    return found | {name: None if grad is None else grad.clone() for name, grad in grads.items()}


def assert_values_stay(model: nn.Module, before: dict[str, Tensor | None], when: str) -> None:
    after = values_of(model)
    for name, value in before.items():
        now = after.get(name)
        stays = now is value if now is None or value is None else torch.equal(now, value)
        assert stays, f"{name} is {'gone' if now is None else 'another than it was'} {when}"
