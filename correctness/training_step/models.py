"""Small language models whose loss shows what a training step does with them: modes, context, batch, dropout, ties."""

from typing import Any

import torch
from torch import Tensor, nn

from correctness.training_step.stepping import SIZE
from impl.model.mlp import MLPLanguageModel


class Halves(nn.Module):
    """In training mode alone."""

    def forward(self, x: Tensor) -> Tensor:
        return x / 2 if self.training else x


class Mixes(nn.Module):
    """The mean of each position and of all positions of the batch, as a model that is not causal may."""

    def forward(self, x: Tensor) -> Tensor:  # (batch, context, dim)
        return (x + x.mean((0, 1), keepdim=True)) / 2


class Table(nn.Module):
    """Logits are a row of its weight for each token, so they are exact in any dtype; `inner` comes after them.

    They are in the weight's dtype, whatever autocast does.
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


KINDS = ("plain", "tied", "unused", "shared")
"""Models by what their parameters are: all in use once; one in two places; one not in use; a block in use twice."""


def moody_model(kind: str = "plain") -> nn.Module:
    """A model that looks at its full batch, and whose submodules' modes change its loss."""
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
    return model


def set_modes(model: nn.Module, number: int) -> None:
    """Of each module on its own, at random."""
    draw = torch.Generator().manual_seed(number)
    for module in model.modules():
        module.training = bool(torch.randint(2, (), generator=draw))


def what_stays(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """What a step may not change: by words that a failure says."""
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
