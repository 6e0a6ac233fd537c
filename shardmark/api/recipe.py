"""How a user's own model is trained under any strategy: its optimizer, compute dtype, micro-batches and clipping."""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shardmark.api.finding import RegistryError, find
from shardmark.api.registry import Unsupported
from shardmark.api.signature import parameters_of

MakesOptimizer = Callable[[list[nn.Parameter]], Optimizer]
"""Makes an optimizer of parameters."""

ADAMW: MakesOptimizer = partial(torch.optim.AdamW, lr=1e-4, fused=True)
"""The default: fused, so that the optimizer itself needs no temporaries."""

NAMED: dict[str, MakesOptimizer] = {"adamw": ADAMW, "sgd": partial(torch.optim.SGD, lr=1e-4)}
"""Optimizers that `--optimizer` names by one word. SGD is not fused: DTensors do not take its fused operator."""

COMPUTE_DTYPES = ("bfloat16",)
"""Dtypes of `--compute-dtype`: float16 would need its loss scaled."""


@dataclass(frozen=True)
class Recipe:
    """A step is `micro_batches` forward and backward passes, each over a batch, clipping, and one update."""

    optimizer: str | None = None
    """Text of `--optimizer`; None: the optimizer that the user's function returns, or the default."""
    compute_dtype: str | None = None
    """Dtype of products over float32 parameters: FSDP casts parameters to it, other strategies autocast. None: the
    dtype of the parameters."""
    micro_batches: int = 1
    """Batches whose gradients accumulate in one step; the gradient is that of their mean loss."""
    clip: float | None = None
    """Largest 2-norm of all gradients together; None: gradients are not clipped."""
    routing: str | None = None
    """In a simulation, the share of tokens that each expert gets: "uniform", or numbers with commas."""

    def __str__(self) -> str:
        """The end of a case's id: empty where nothing is asked for."""
        parts = [
            f"{self.compute_dtype}_compute" if self.compute_dtype else "",
            f"{self.micro_batches}_micro_batches" if self.micro_batches > 1 else "",
            f"clip_{self.clip:g}" if self.clip else "",
            f"routing_{self.routing}" if self.routing else "",
        ]
        return "".join(f"-{part}" for part in parts if part)


PLAIN = Recipe()
"""One batch, the optimizer of the model's own or the default, in the parameters' dtype, without clipping."""


RECIPE = {
    "optimizer": ("NAME", "adamw, sgd, or a class with its options: 'torch.optim.AdamW(lr=1e-4, foreach=True)'."),
    "compute-dtype": ("DTYPE", "bfloat16: products over float32 parameters."),
    "micro-batches": ("N", "batches whose gradients accumulate in one step."),
    "clip": ("NORM", "the largest norm of the gradients, such as 1.0."),
    "routing": ("SHARES", "in a simulation, the share of tokens of each expert: uniform, or 0.4,0.3,0.2,0.1."),
}
"""The options of a recipe: each with its metavar and help text, in the order of `recipe_of`."""


def recipe_of(
    optimizer: str | None, compute_dtype: str | None, micro_batches: str | None, clip: str | None, routing: str | None
) -> Recipe:
    """The recipe of options as texts, None where one is not given. RegistryError, in one line, for a bad one."""
    if optimizer is not None:
        named_optimizer(optimizer)
    if compute_dtype not in (None, *COMPUTE_DTYPES):
        raise RegistryError(f"--compute-dtype is {', '.join(COMPUTE_DTYPES)}, not {compute_dtype!r}")
    if routing not in (None, "uniform") and not _are_shares(routing or ""):
        raise RegistryError(f"--routing is uniform, or experts' shares such as 0.4,0.3,0.2,0.1, not {routing!r}")
    norm = None if clip is None else _norm(clip)
    return Recipe(optimizer, compute_dtype, _count(micro_batches or "1"), norm, routing)


def _count(text: str) -> int:
    if text.isascii() and text.isdecimal() and len(text) < 6 and int(text) >= 1:
        return int(text)
    raise RegistryError(f"--micro-batches is a number from 1 to 99,999, not {text!r}")


def _are_shares(text: str) -> bool:
    with suppress(ValueError):
        shares = [float(share) for share in text.split(",")]
        return all(0 <= share < math.inf for share in shares) and sum(shares) > 0
    return False


def _norm(text: str) -> float:
    with suppress(ValueError):
        if 0 < (norm := float(text)) < math.inf:
            return norm
    raise RegistryError(f"--clip is the largest norm of the gradients, such as 1.0, not {text!r}")


def named_optimizer(text: str) -> MakesOptimizer:
    """The optimizer of `--optimizer`: a name of NAMED, or a class with options that are literals, such as
    `torch.optim.AdamW(lr=1e-4, foreach=True)`. RegistryError, in one line, for another text."""
    if text in NAMED:
        return NAMED[text]
    label = f"--optimizer {text}"
    try:
        parsed = ast.parse(text, mode="eval").body
        called, options = (parsed.func, parsed.keywords) if isinstance(parsed, ast.Call) else (parsed, [])
        if isinstance(parsed, ast.Call) and parsed.args:
            raise ValueError("options have names")
        values = {str(option.arg): ast.literal_eval(option.value) for option in options}
        module, _, name = ast.unparse(called).rpartition(".")
    except (SyntaxError, ValueError):
        module, name, values = "", "", {}
    if not module or not all(part.isidentifier() for part in module.split(".")):
        like = "torch.optim.AdamW(lr=1e-4, foreach=True)"
        raise RegistryError(f"{label}: it is {', '.join(NAMED)}, or a class with its options by name, such as {like}")
    target, _ = find(label, module, name)
    if not (isinstance(target, type) and issubclass(target, Optimizer)):
        raise RegistryError(f"{label}: it is not a class of torch.optim.Optimizer")
    return partial(target, **values)


def taken_apart(
    makes: MakesOptimizer, parameters: Iterable[nn.Parameter]
) -> tuple[list[Any], type[Optimizer], dict[str, Any]]:
    """Parameters or param groups, class and options of the optimizer, for a strategy that makes optimizers itself.

    Raises Unsupported where the class has an option that its `defaults` do not tell.
    """
    parameters = list(parameters)
    if isinstance(makes, partial) and isinstance(makes.func, type) and not makes.args:
        return parameters, makes.func, makes.keywords
    # They have one element, as an optimizer may make its state at once, and all dimensions, as groups may go by these.
    stand_ins = [nn.Parameter(p.new_empty([1] * p.dim()), requires_grad=p.requires_grad) for p in parameters]
    real = {id(stand_in): p for stand_in, p in zip(stand_ins, parameters, strict=True)}
    made = makes(stand_ins)
    kind, options = type(made), parameters_of(type(made))
    if unknown := sorted(options - set(made.defaults) - {"params", "args", "kwargs"}):
        raise Unsupported(
            f"{kind.__name__}'s option {unknown[0]!r} is not among its defaults: "
            f"return functools.partial({kind.__name__}, ...) as the optimizer"
        )
    defaults = {name: value for name, value in made.defaults.items() if name in options}
    groups = [
        {name: value for name, value in group.items() if name in defaults and value is not defaults[name]}
        | {"params": [real[id(p)] for p in group["params"]]}
        for group in made.param_groups
    ]
    return groups, kind, defaults
