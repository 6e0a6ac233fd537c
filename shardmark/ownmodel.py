"""A user's own model, of `--model FILE:ATTR`: a function that makes a module, a batch, and what their loss is.

    def make():
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        batch = torch.randn(32, 64), torch.randint(10, (32,))
        return model, batch, lambda model, x, y: cross_entropy(model(x), y)

Each rank calls it after PyTorch's generator was seeded for that rank: so each has a batch of its own, and the weights
are the first rank's. `loss(model, *batch)` is given the model as a strategy has wrapped it. A fourth value names the
blocks, where `find_blocks` would find others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from shardmark.grid import OwnModel
from shardmark.registry import RegistryError, Unsupported, find
from shardmark.replay import user_line

Loss = Callable[..., Tensor]


@dataclass
class Made:
    """What a training step trains: `loss(module, *batch)` is its loss."""

    module: nn.Module
    batch: tuple[Any, ...]
    loss: Loss
    blocks: nn.ModuleList
    """Alike, one after the other; perhaps none."""


def make(spec: str, device: str) -> Made:
    """Call the user's function, and have what it makes on that device."""
    label = f"--model {spec}"
    target, _ = _found(label, spec)
    if not callable(target):
        raise RegistryError(f"{label}: it is of type {type(target).__name__}, and not a function that makes a model")
    with torch.device(device):
        made = _checked(label, target())
    made.module.to(device)
    made.batch = tree_map_only(Tensor, lambda tensor: tensor.to(device), made.batch)
    return made


def check(spec: str, simulated: bool) -> OwnModel:
    """What cases have to know of the model, once a forward and a backward pass of it have been followed.

    Kernels are left out there, so it costs no more for a large model; those of a program that depends on values run,
    unless it is to be simulated. Raises RegistryError, in one line, for what is no such function, and for what it
    raises.
    """
    label = f"--model {spec}"
    _, absolute = _found(label, spec)
    try:
        return _followed(label, absolute, kernels=False)
    except Unsupported as refused:
        if simulated:
            raise RegistryError(f"{label}: {refused}") from None
        return _followed(label, absolute, kernels=True)


def _found(label: str, spec: str) -> tuple[Any, str]:
    source, _, attribute = spec.rpartition(":")
    if not (source and attribute):
        raise RegistryError(f"{label}: it is given as file.py:attribute or module:attribute")
    return find(label, source, attribute)


def _followed(label: str, spec: str, kernels: bool) -> OwnModel:
    # Imported here because all of PyTorch's FSDP comes with it, which takes a second.
    from shardmark.simulation.group import one_rank_of
    from shardmark.simulation.predict import simulation

    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(_in_one_line(label))
        stack.enter_context(one_rank_of(1) if kernels else simulation())
        made = make(spec, "cpu")
        with FlopCounterMode(display=False) as counter:
            loss = made.loss(made.module, *made.batch)
            _check_loss(label, made, loss)
            loss.backward()
    parameters = list(made.module.parameters())
    source, _, attribute = spec.rpartition(":")
    return OwnModel(
        spec,
        name=f"{source.removesuffix('.py').replace('/', '.').rpartition('.')[2]}.{attribute}",
        dtype=str(parameters[0].dtype).removeprefix("torch."),
        parameters=sum(p.numel() for p in parameters),
        flops=counter.get_total_flops(),
    )


def _checked(label: str, returned: Any) -> Made:
    """What the function returned, if it is of the right shape."""
    if not isinstance(returned, tuple) or len(returned) not in (3, 4):
        found = f"{len(returned)} values" if isinstance(returned, tuple) else type(returned).__name__
        raise RegistryError(f"{label}: it returns (model, batch, loss), and perhaps the model's blocks, not {found}")
    module, batch, loss, *blocks = returned
    for what, value, right, wanted in (
        ("model", module, isinstance(module, nn.Module), "an nn.Module"),
        ("batch", batch, isinstance(batch, tuple | list), "a tuple of what the loss is given beside the model"),
        ("loss", loss, callable(loss), "a function of the model and the batch"),
    ):
        if not right:
            raise RegistryError(f"{label}: the {what} that it returns is {wanted}, not {type(value).__name__}")
    if not any(p.requires_grad for p in module.parameters()):
        raise RegistryError(f"{label}: its {type(module).__name__} has no parameter to train")
    if any(p.is_meta for p in module.parameters()):
        raise RegistryError(f"{label}: its parameters are on meta, without values: make them on the default device")
    return Made(module, tuple(batch), loss, _as_list(label, module, *blocks) if blocks else find_blocks(module))


def _as_list(label: str, module: nn.Module, blocks: Any) -> nn.ModuleList:
    blocks = list(blocks) if isinstance(blocks, Iterable) and not isinstance(blocks, nn.ModuleList) else blocks
    if not isinstance(blocks, Iterable) or not {id(block) for block in blocks} <= {
        id(each) for each in module.modules()
    }:
        raise RegistryError(f"{label}: the fourth value that it returns is the model's blocks, a list of its modules")
    return blocks if isinstance(blocks, nn.ModuleList) else nn.ModuleList(blocks)


def _check_loss(label: str, made: Made, loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise RegistryError(f"{label}: its loss is of type {type(loss).__name__}, and not a tensor of one number")
    if loss.numel() != 1:
        raise RegistryError(f"{label}: its loss is of shape {tuple(loss.shape)}, and not one number: take its mean")
    if not loss.requires_grad:
        raise RegistryError(f"{label}: its loss depends on no parameter of its {type(made.module).__name__}")


def find_blocks(module: nn.Module) -> nn.ModuleList:
    """The outermost modules of one class of which a ModuleList or a Sequential holds several: a transformer's blocks.

    Those without modules in them, such as linears, do not count.
    """
    lists = list(_repeated(module))
    return lists[0] if len(lists) == 1 else nn.ModuleList(block for blocks in lists for block in blocks)


def _repeated(module: nn.Module) -> Iterator[nn.ModuleList]:
    children = list(module.children())
    if isinstance(module, nn.ModuleList | nn.Sequential):
        kinds = Counter(type(child) for child in children if any(True for _ in child.children()))
        if blocks := [child for child in children if kinds[type(child)] > 1]:
            yield module if isinstance(module, nn.ModuleList) and blocks == children else nn.ModuleList(blocks)
            return
    for child in children:
        yield from _repeated(child)


@contextmanager
def _in_one_line(label: str) -> Iterator[None]:
    """Whatever the user's code raises in the block becomes a RegistryError that says what, and in which line."""
    try:
        yield
    except (KeyboardInterrupt, RegistryError, Unsupported):
        raise
    except BaseException as error:
        where = user_line(_innermost(error.__traceback__).tb_frame)
        said = next(iter(str(error).strip().splitlines()), "")
        raise RegistryError(f"{label}: {where or 'PyTorch'}: {type(error).__name__}: {said}") from error


def _innermost(traceback: TracebackType | None) -> TracebackType:
    assert traceback is not None, "what was raised has a traceback"
    while traceback.tb_next is not None:
        traceback = traceback.tb_next
    return traceback
