"""A training with a sharded optimizer, or an unsharded one: the parameters and gradients that a history draws."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from correctness.data_parallel.random_modules import laid_out
from correctness.support.exact import exact

Shape = tuple[int, ...]
Options = dict[str, Any]


@dataclass(frozen=True)
class Group:
    """A param group: the shapes of its parameters, its own options, and the indices of those that are frozen."""

    shapes: Sequence[Shape]
    options: Options = field(default_factory=dict)
    frozen: tuple[int, ...] = ()
    layout: str = "contiguous"
    """How parameters lie in memory, as `laid_out` names it."""
    integers: bool = False
    """Frozen parameters are int8, as quantized weights are, and stay frozen."""

    def __str__(self) -> str:
        said = [f"parameters {', '.join(map(str, self.shapes))}", listed(self.options)]
        said += [f"frozen {list(self.frozen)}"] if self.frozen else []
        said[-1] += " in int8" * bool(self.frozen and self.integers)
        return f"({' with '.join(filter(None, said))}{f', {self.layout}' * (self.layout != 'contiguous')})"


@dataclass(frozen=True)
class History:
    groups: Sequence[Group]
    events: Sequence[Any]
    optimizer: type[torch.optim.Optimizer] = torch.optim.Adam
    defaults: Options = field(default_factory=lambda: {"lr": 0.1})
    dtypes: Sequence[torch.dtype] = (torch.float64,)
    """dtypes of the parameters, cycled; float64 stands for that of exact checks."""
    seed: int = 0
    in_groups: bool = False
    """Even and odd ranks train side by side: separate process groups, separate parameters."""
    averages: bool = False
    """Where it can, the optimizer averages gradients, which are each rank's own."""

    def __str__(self) -> str:
        where = ", by even and odd ranks in process groups of their own" if self.in_groups else ""
        where += ", with average_gradients" * self.averages
        dtypes = ", ".join(str(dtype).removeprefix("torch.") for dtype in self.dtypes)
        groups = ", ".join(map(str, self.groups))
        return f"{self.optimizer.__name__} with {listed(self.defaults)} of groups {groups} in {dtypes}{where}"


def listed(options: Options) -> str:
    return " and ".join(f"{name}={value}" for name, value in options.items())


Make = Callable[..., torch.optim.Optimizer]


@dataclass(frozen=True)
class Checkpoint:
    parameters: list[Tensor]
    state: dict[str, Any]


def unsharded(params: Any, optimizer_cls: type[torch.optim.Optimizer], **defaults: Any) -> torch.optim.Optimizer:
    return optimizer_cls(params, **defaults)


class Training:
    """Parameters and an optimizer. Trainings of one history draw the same parameters and gradients."""

    def __init__(
        self,
        make: Make,
        history: History,
        device: str,
        start: Checkpoint | None = None,
        place: tuple[int, int] | None = None,
    ) -> None:
        self.make, self.history, self.device = make, history, device
        self.place = place
        """With `average_gradients`: this rank and how many there are. By its place its gradients differ from the
        average, in a drawn noise."""
        self.draw = torch.Generator().manual_seed(history.seed)
        self.parameters: list[nn.Parameter] = []
        self.group_of: list[int] = []
        """Index of each parameter's param group."""
        self.updated: set[int] = set()
        """Parameters that had a gradient in some step the state knows; the others may have no state yet."""
        self.updated_when_saved: set[int] = set()
        self.saved: dict[str, Any] = {}
        """The last `state_dict()`."""
        self.state: dict[str, Any] | None = None
        """The `state_dict()` to compare after this event."""
        groups = [self.new(group) for group in history.groups]
        self.optimizer = make(groups, history.optimizer, **history.defaults)
        if start is not None:
            with torch.no_grad():
                for p, value in zip(self.parameters, start.parameters, strict=True):
                    p.copy_(value)
            self.optimizer.load_state_dict(deepcopy(start.state))
        self.held = [*self.optimizer.param_groups]
        """Groups, as callers hold them who change their options; loading makes new ones."""

    def new(self, group: Group) -> dict[str, Any]:
        """Make a param group and draw its parameters."""
        params = []
        for i, shape in enumerate(group.shapes):
            dtype = self.history.dtypes[(len(self.parameters) + i) % len(self.history.dtypes)]
            dtype = exact() if dtype == torch.float64 else dtype
            values = torch.randn(shape, generator=self.draw, dtype=torch.float64).to(self.device, dtype)
            values = (40 * values).clamp(-127, 127).to(torch.int8) if group.integers and i in group.frozen else values
            params.append(nn.Parameter(laid_out(values, group.layout), requires_grad=i not in group.frozen))
        self.group_of += [max(self.group_of, default=-1) + 1] * len(params)
        self.parameters += params
        return {"params": params, **group.options}

    def anew(self) -> torch.optim.Optimizer:
        """Make a new optimizer for the same parameters, with another learning rate and no group options."""
        bare = [{"params": list(group["params"])} for group in self.optimizer.param_groups]
        return self.make(bare, self.history.optimizer, **self.history.defaults | {"lr": 7.0})

    def set_gradients(
        self,
        without: tuple[int, ...],
        freezes: tuple[int, ...],
        transposed: bool,
        lacked: tuple[int, ...] = (),
        early: tuple[int, ...] = (),
        in_place: bool = False,
    ) -> None:
        """Draw a gradient for each parameter but those `without`; freeze the parameters `freezes` afterwards. Where
        gradients are each rank's own, the first of several ranks has none of the parameters `lacked`, and those of
        `early` come in a pass of their own, in `no_sync`; those with an even index come in both. With `in_place`
        a gradient is written into the one that is there."""
        losses = [torch.zeros((), dtype=torch.float64, device=self.device) for _ in range(2)]
        for i, p in enumerate(self.parameters):
            grad = torch.randn(p.shape, generator=self.draw, dtype=torch.float64).to(p)
            noise = torch.randn(p.shape, generator=self.draw, dtype=torch.float64) if self.history.averages else grad
            grad = laid_out(grad, "transposed") if transposed else grad.contiguous()
            kept = p.grad if in_place else None
            p.grad = grad if p.requires_grad and i not in without else None
            if kept is not None and p.grad is not None:
                p.grad = kept.copy_(grad)
            if self.place is not None and p.grad is not None:
                rank, ranks = self.place
                own = grad + (rank - (ranks - 1) / 2) * noise.to(p)
                if ranks > 1 and i in lacked:
                    own = grad * ranks / (ranks - 1) if rank else None
                of_each = (1.0, 0.0) if i not in early else (0.0, 1.0) if i % 2 else (0.25, 0.75)
                for which, share in enumerate(of_each):
                    if own is not None and share:
                        losses[which] = losses[which] + share * (p * own).sum()
                p.grad = None
            if i in freezes:
                p.requires_grad_(False)
        last, first = losses
        if first.requires_grad:
            with self.optimizer.no_sync():  # type: ignore[attr-defined]
                first.backward()
        if last.requires_grad:
            last.backward()
        if self.place is not None:
            self.optimizer.finish_gradient_synchronization()  # type: ignore[attr-defined]

    def values(self) -> list[Tensor]:
        return [p.detach().cpu().clone() for p in self.parameters]
