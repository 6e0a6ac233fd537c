"""Small models with blocks, their gradients, and comparisons to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from impl.model import Transformer, TransformerSize

SIZE = TransformerSize(d_model=24, d_ff=64, layers=5, heads=2, vocab=50)

Policy = Callable[[nn.Module], nn.Module]


def transformer(device: str, **changes: Any) -> Transformer:
    """A small transformer, always with the same parameters."""
    torch.manual_seed(0)
    return Transformer(replace(SIZE, **changes), context_length=16).to(device)


class Dropping(nn.Module):
    """A model whose blocks draw random numbers; each block is used `shared` times."""

    def __init__(self, layers: int = 5, shared: int = 1) -> None:
        super().__init__()
        blocks = [
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 8)) for _ in range(layers // shared)
        ]
        self.blocks = nn.ModuleList(blocks * shared)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def dropping(device: str, layers: int = 5, shared: int = 1) -> Dropping:
    """`Dropping`, always with the same parameters."""
    torch.manual_seed(0)
    return Dropping(layers, shared).to(device)


def distinct_blocks(model: nn.Module) -> list[nn.Module]:
    """Each block once, for planted policies. ValueError if there are none, or they are checkpointed already."""
    blocks = getattr(model, "blocks", None)
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        raise ValueError("this model has no blocks")
    if any("forward" in vars(block) for block in blocks):
        raise ValueError("this model is checkpointed already")
    return list(dict.fromkeys(blocks))


@contextmanager
def raising(block: nn.Module) -> Iterator[None]:
    """Within the block the module's last part raises an error."""

    def raise_(*args: Any) -> None:
        raise FloatingPointError("not finite")

    *_, last = block.children()
    handle = last.register_forward_pre_hook(raise_)
    try:
        yield
    finally:
        handle.remove()


def loss_of(model: nn.Module, inputs: Tensor) -> Tensor:
    return model(inputs).float().square().mean()


def gradients(model: nn.Module, inputs: Tensor) -> dict[str, Tensor | None]:
    """Run backward; return the gradients by name, summed with earlier ones."""
    loss_of(model, inputs).backward()
    return gradients_of(model)


def gradients_of(model: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def assert_same_bits(found: dict[str, Tensor | None], expected: dict[str, Tensor | None], when: str = "") -> None:
    """Assert that gradients by name are equal to the bit, and None where None is expected."""
    assert list(found) == list(expected), f"parameters are {list(found)}, and without the policy {list(expected)}"
    for name, theirs in expected.items():
        mine = found[name]
        if mine is None or theirs is None:
            kinds = ["no gradient" if x is None else "a gradient" for x in (mine, theirs)]
            assert kinds[0] == kinds[1], f"{when}{name} has {kinds[0]} with the policy, and {kinds[1]} without"
            continue
        if not torch.equal(mine, theirs):
            off = (mine.double() - theirs.double()).abs()
            raise AssertionError(
                f"{when}the gradient of {name} is not to the bit that without the policy: off by up to "
                f"{off.max().item():.1e} in {(mine != theirs).sum().item()} of {mine.numel()} elements, "
                f"whose largest is {theirs.abs().max().item():.1e}"
            )


def assert_equal(found: Tensor, expected: Tensor, what: str) -> None:
    assert torch.equal(found, expected), (
        f"{what} with the policy is not to the bit that without: "
        f"off by up to {(found.double() - expected.double()).abs().max().item():.1e}"
    )
