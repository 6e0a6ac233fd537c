"""A user's own model, of `--model FILE:ATTR`: a function that makes a module, a batch and a loss function.

    def make():
        model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
        batch = torch.randn(32, 64), torch.randint(10, (32,))
        return model, batch, lambda model, x, y: cross_entropy(model(x), y)

Each rank calls the function with PyTorch's generator seeded for that rank, so each has a batch of its own; the weights
are the first rank's. `loss(model, *batch)` gets the model as a strategy has wrapped it. The function may return the
model's blocks as a fourth value, where `find_blocks` would find others; or a dict of all that, by the names of VALUES,
which may have an optimizer too: a function that makes one of a list of parameters.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from shardmark.api.finding import RegistryError, find
from shardmark.api.recipe import ADAMW, PLAIN, MakesOptimizer, Recipe
from shardmark.api.registry import Unsupported
from shardmark.api.work import Work

Loss = Callable[..., Tensor]

VALUES = ("model", "batch", "loss", "blocks", "optimizer")
"""Names of what the user's function returns; the last two may be left out."""


@dataclass(frozen=True)
class OwnModel:
    """The facts of a user's own model, of `--model`, that a case needs."""

    spec: str
    """FILE:ATTR with an absolute path, by which another process makes the model again."""
    name: str
    dtype: str
    """The dtype of its parameters."""
    parameters: int = 0
    flops: int = 0
    """FLOPs of a forward and a backward pass over one rank's batch; 0 where they cannot be counted."""
    optimizer: str = "AdamW"
    """The name of its optimizer's class."""
    recipe: Recipe = PLAIN
    checkpoints: bool = False
    """Whether its own forward runs parts under `torch.utils.checkpoint`."""


@dataclass(frozen=True)
class OwnModelCase:
    """One training step on each of `ranks`. `model` is the user's FILE:ATTR, `dtype` the dtype of its parameters,
    `parameters` their count, and `flops` the FLOPs of a forward and a backward pass over one batch on one rank."""

    model: str
    name: str
    dtype: str
    parameters: int
    flops: int
    ranks: int = 1
    mode: str = "step"
    bucket_mb: int | None = None
    batch: int | None = None
    """Rows of each tensor of the batch; None: as many as the user's batch has."""
    context: int | None = None
    """Size of their second dimension; None: the size in the user's batch."""
    checkpointed: bool = False
    """Whether each block's activations are recomputed, under whatever else the strategy does."""
    offload: bool = False
    """Whether shards are in the host's memory, where the strategy has that option."""
    optimizer: str = "AdamW"
    """The name of the optimizer's class."""
    recipe: Recipe = PLAIN
    checkpoints: bool = False
    """Whether the model checkpoints parts of itself; then no strategy checkpoints its blocks again."""
    mesh: str = ""
    """The mesh that it is trained on, as `--mesh` has it; empty: `ranks` ranks without axes."""

    @classmethod
    def of(cls, own: OwnModel) -> OwnModelCase:
        """The case of the user's own batch on one rank."""
        of_model = {name: getattr(own, name) for name in ("optimizer", "recipe", "checkpoints")}
        return cls(own.spec, own.name, own.dtype, own.parameters, own.flops, **of_model)

    def __str__(self) -> str:
        optimizer = "" if self.optimizer == "AdamW" else f"-{self.optimizer}"
        mesh = f"-{self.mesh}" if self.mesh else ""
        return f"{self.name}-{self.dtype}-{self.mode}{optimizer}{self.recipe}{mesh}"

    @property
    def words(self) -> str:
        """The case as sentences have it."""
        return f"with {self.name} in {self.dtype}"

    @property
    def compute_dtype(self) -> str:
        """The dtype of its products."""
        return self.recipe.compute_dtype or self.dtype

    @property
    def work(self) -> Work:
        """Work of one rank. For each micro-batch a parameter is read twice, and its gradient written (and read, from
        the second one on). AdamW moves 28 bytes of each; any optimizer moves 12."""
        passes, update = self.recipe.micro_batches, 28 if self.optimizer == "AdamW" else 12
        moved = passes * 12 + (passes - 1) * 4 + update
        return Work(flops=passes * self.flops, bytes_moved=moved * self.parameters, model_flops=passes * self.flops)


@dataclass
class Made:
    """A module, its batch and its loss: a step computes `loss(module, *batch)`."""

    module: nn.Module
    batch: tuple[Any, ...]
    loss: Loss
    blocks: nn.ModuleList
    """The repeated modules, such as a transformer's blocks, in their order; may be empty."""
    optimizer: MakesOptimizer = ADAMW


def make(spec: str, device: str) -> Made:
    """Call the user's function; move its model and batch to `device`."""
    label = f"--model {spec}"
    target, _ = found(label, spec)
    if not callable(target):
        raise RegistryError(f"{label}: it is of type {type(target).__name__}, and not a function that makes a model")
    with torch.device(device), _InPlaceOfAGPU(device):
        made = _checked(label, target())
    made.module.to(device)
    made.batch = tree_map_only(Tensor, lambda tensor: tensor.to(device), made.batch)
    return made


class _InPlaceOfAGPU(TorchFunctionMode):
    """Makes on another device what the user's function makes on a GPU: `model.cuda()`, `device="cuda"`, `x.to(0)`."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.device = torch.device(device)

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function is Tensor.cuda:
            function, args, kwargs = Tensor.to, (args[0], self.device), {}
        elif function is Tensor.to and len(args) > 1 and type(args[1]) is int:
            args = (args[0], self.device, *args[2:])
        elif function is not torch.device:
            args = tuple(map(self._here, args))
            kwargs = {name: self._here(value) for name, value in kwargs.items()}
        if type(kwargs.get("device")) is int:
            kwargs["device"] = self.device
        return function(*args, **kwargs)

    def _here(self, value: Any) -> Any:
        named = isinstance(value, str) and value.partition(":")[0] == "cuda"
        is_gpu = named or (isinstance(value, torch.device) and value.type == "cuda")
        return self.device if is_gpu else value


def found(label: str, spec: str) -> tuple[Any, str]:
    source, _, attribute = spec.rpartition(":")
    if not (source and attribute):
        raise RegistryError(f"{label}: it is given as file.py:attribute or module:attribute")
    return find(label, source, attribute)


def _checked(label: str, returned: Any) -> Made:
    """Check the function's return value."""
    values = _by_name(label, returned)
    module, batch, loss = (values[name] for name in VALUES[:3])
    optimizer = values.get("optimizer", ADAMW)
    for what, value, right, wanted in (
        ("model", module, isinstance(module, nn.Module), "an nn.Module"),
        ("batch", batch, isinstance(batch, tuple | list), "a tuple of what the loss is given beside the model"),
        ("loss", loss, callable(loss), "a function of the model and the batch"),
        (
            "optimizer",
            optimizer,
            callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer),
            "a function that makes one of a list of parameters",
        ),
    ):
        if not right:
            raise RegistryError(f"{label}: the {what} that it returns is {wanted}, not {type(value).__name__}")
    if not any(p.requires_grad for p in module.parameters()):
        raise RegistryError(f"{label}: its {type(module).__name__} has no parameter to train")
    if any(p.is_meta for p in module.parameters()):
        raise RegistryError(f"{label}: its parameters are on meta, without values: make them on the default device")
    blocks = _as_list(label, module, values["blocks"]) if "blocks" in values else find_blocks(module)
    return Made(module, tuple(batch), loss, blocks, optimizer)


def _by_name(label: str, returned: Any) -> dict[str, Any]:
    """The returned values by their names, of VALUES."""
    if isinstance(returned, dict):
        if set(VALUES[:3]) <= set(returned) <= set(VALUES):
            return returned
        found = f"a dict of {', '.join(map(str, returned))}"
        raise RegistryError(
            f"{label}: it returns a dict of model, batch, loss and perhaps blocks, optimizer, not {found}"
        )
    if not isinstance(returned, tuple) or len(returned) not in (3, 4):
        found = f"{len(returned)} values" if isinstance(returned, tuple) else type(returned).__name__
        raise RegistryError(f"{label}: it returns (model, batch, loss), and perhaps the model's blocks, not {found}")
    return dict(zip(VALUES, returned, strict=False))


def _as_list(label: str, module: nn.Module, blocks: Any) -> nn.ModuleList:
    blocks = list(blocks) if isinstance(blocks, Iterable) and not isinstance(blocks, nn.ModuleList) else blocks
    if not isinstance(blocks, Iterable) or not {id(block) for block in blocks} <= {
        id(each) for each in module.modules()
    }:
        raise RegistryError(f"{label}: the fourth value that it returns is the model's blocks, a list of its modules")
    return blocks if isinstance(blocks, nn.ModuleList) else nn.ModuleList(blocks)


def find_blocks(module: nn.Module) -> nn.ModuleList:
    """A transformer's blocks: the modules of one class that repeat in the outermost ModuleList, Sequential or
    ModuleDict whose keys are numbers. Modules without children, such as linears, do not count."""
    lists = list(_repeated(module))
    return lists[0] if len(lists) == 1 else nn.ModuleList(block for blocks in lists for block in blocks)


def _repeated(module: nn.Module) -> Iterator[nn.ModuleList]:
    children = list(module.children())
    numbered = isinstance(module, nn.ModuleDict) and all(map(str.isdecimal, module))  # as torchtitan's layers are
    if numbered or isinstance(module, nn.ModuleList | nn.Sequential):
        kinds = Counter(type(child) for child in children if any(True for _ in child.children()))
        if blocks := [child for child in children if kinds[type(child)] > 1]:
            yield module if isinstance(module, nn.ModuleList) and blocks == children else nn.ModuleList(blocks)
            return
    for child in children:
        yield from _repeated(child)


def size_of(batch: tuple[Any, ...], dim: int) -> int:
    """The size of dimension `dim`, equal in all tensors that have it; Unsupported where sizes differ or no tensor has
    it."""
    lengths = {tensor.size(dim) for tensor in tree_leaves(batch) if isinstance(tensor, Tensor) and tensor.dim() > dim}
    if len(lengths) != 1:
        which = ("first", "second")[dim]
        raise Unsupported(f"its batch has no one length: the {which} dimensions of its tensors are {sorted(lengths)}")
    return lengths.pop()


def resized(batch: tuple[Any, ...], dim: int, size: int) -> tuple[Any, ...]:
    """The batch with `size` entries in dimension `dim`: the first entries, or all of them repeated."""
    before = size_of(batch, dim)

    def of(tensor: Tensor) -> Tensor:
        if tensor.dim() <= dim:
            return tensor
        copies = [-(-size // before) if each == dim else 1 for each in range(tensor.dim())]
        return tensor.repeat(copies).narrow(dim, 0, size).clone()

    return tree_map_only(Tensor, of, batch)
