"""Check a user's own model (`--model`) by a simulated forward and backward pass."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from traceback import walk_tb
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from shardmark.api.finding import RegistryError
from shardmark.api.own_model import Made, OwnModel, found, make
from shardmark.api.recipe import PLAIN, Recipe, named_optimizer
from shardmark.api.registry import Unsupported
from shardmark.meter.allocations import user_line


def check(spec: str, simulated: bool, recipe: Recipe = PLAIN) -> OwnModel:
    """Run one forward and one backward pass of the model, and one update; return the facts that its cases need.

    The pass runs no kernels, so a large model costs no more. If the program depends on values it runs again with
    kernels, unless it must be `simulated`. Raises RegistryError, in one line, where the spec names no such function or
    the function raises.
    """
    label = f"--model {spec}"
    _, absolute = found(label, spec)
    try:
        return _followed(label, absolute, recipe, kernels=False)
    except Unsupported as refused:
        if simulated:
            raise RegistryError(f"{label}: {refused}") from None
        return _followed(label, absolute, recipe, kernels=True)


def _followed(label: str, spec: str, recipe: Recipe, kernels: bool) -> OwnModel:
    # Imported here because all of PyTorch's FSDP comes with it, which takes a second.
    from shardmark.predict.simulation.group import one_rank_of
    from shardmark.predict.simulation.predict import simulation
    from shardmark.predict.simulation.routing import Routing

    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(_in_one_line(label))
        stack.enter_context(one_rank_of(1) if kernels else simulation(routing=Routing.of(recipe.routing)))
        made = make(spec, "cpu")
        # The counter is a mode of the dispatcher, under which PyTorch compiles nothing, and later no more either.
        eager = torch.compiler.set_stance("force_eager")
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Using `torch.compile")  # it counts by hooks on all modules
        with eager, FlopCounterMode(display=False) as counter, _noticing_checkpoints() as checkpoints:
            loss = made.loss(made.module, *made.batch)
            _check_loss(label, made, loss)
            loss.backward()
        parameters = list(made.module.parameters())
        named = recipe.optimizer
        with _in_one_line(f"{label}: its optimizer" if named is None else f"--optimizer {named}"):
            optimizer = (made.optimizer if named is None else named_optimizer(named))(parameters)
            if not isinstance(optimizer, Optimizer):
                raise TypeError(f"it makes a {type(optimizer).__name__}, and not a torch.optim.Optimizer")
            optimizer.step()
    if recipe.compute_dtype and any(p.dtype != torch.float32 for p in parameters):
        wide = "takes a model whose parameters are float32"
        raise RegistryError(f"--compute-dtype {recipe.compute_dtype} {wide}, not {_dtypes(parameters)}")
    source, _, attribute = spec.rpartition(":")
    return OwnModel(
        spec,
        name=f"{source.removesuffix('.py').replace('/', '.').rpartition('.')[2]}.{attribute}",
        dtype=str(parameters[0].dtype).removeprefix("torch."),
        parameters=sum(p.numel() for p in parameters),
        flops=counter.get_total_flops(),
        optimizer=type(optimizer).__name__,
        recipe=recipe,
        checkpoints=bool(checkpoints),
    )


@contextmanager
def _noticing_checkpoints() -> Iterator[list[str]]:
    """Yield a list of the calls of `torch.utils.checkpoint.checkpoint`, however it was imported, in the block."""
    calls: list[str] = []

    def noticed(name: str, own: Any) -> Any:
        def checkpointing(*args: Any, **kwargs: Any) -> Any:
            calls.append(name)
            return own(*args, **kwargs)

        return checkpointing

    with ExitStack() as stack:
        for owner, name in (
            (checkpoint, "_checkpoint_without_reentrant_generator"),
            (checkpoint.CheckpointFunction, "apply"),  # the reentrant variant
        ):
            stack.enter_context(patch.object(owner, name, noticed(name, getattr(owner, name))))
        yield calls


def _dtypes(parameters: Sequence[Tensor]) -> str:
    return ", ".join(sorted({str(p.dtype).removeprefix("torch.") for p in parameters}))


def _check_loss(label: str, made: Made, loss: Any) -> None:
    if not isinstance(loss, Tensor):
        raise RegistryError(f"{label}: its loss is of type {type(loss).__name__}, and not a tensor of one number")
    if loss.numel() != 1:
        raise RegistryError(f"{label}: its loss is of shape {tuple(loss.shape)}, and not one number: take its mean")
    if not loss.requires_grad:
        raise RegistryError(f"{label}: its loss depends on no parameter of its {type(made.module).__name__}")


@contextmanager
def _in_one_line(label: str) -> Iterator[None]:
    """Turn an exception of the user's code into a RegistryError of one line, which names the exception and its line."""
    try:
        yield
    except (KeyboardInterrupt, RegistryError, Unsupported):
        raise
    except BaseException as error:
        *_, (innermost, _) = walk_tb(error.__traceback__)
        where = user_line(innermost)
        said = next(iter(str(error).strip().splitlines()), "")
        raise RegistryError(f"{label}: {where or 'PyTorch'}: {type(error).__name__}: {said}") from error
