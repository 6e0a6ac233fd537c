"""Modules with exactly known gradients, to check averages; failures name what was found."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from shardmark.api import Implementation, NotAsked

Own = Callable[[int], list[Tensor | None]]
"""`own(rank)` lists that rank's gradients before averaging; None where its loss does not reach the parameter."""


class Products(nn.Module):
    """The sum of parameters times given weights: each weight is its parameter's gradient, to the bit."""

    def __init__(self, *values: Tensor) -> None:
        super().__init__()
        self.p = nn.ParameterList(nn.Parameter(value) for value in values)

    def forward(self, weights: Sequence[Tensor | None], order: Sequence[int] | None = None) -> Tensor:
        """Loss () in float64; `order` lists the parameters in the order of use."""
        used = [i for i in order or range(len(weights)) if weights[i] is not None]
        return sum(((self.p[i] * weights[i]).double().sum() for i in used), torch.zeros((), dtype=torch.float64))


def wrap(implementation: Implementation, module: nn.Module, **options: Any) -> Any:
    """Wrap the module with those options that the implementation accepts."""
    return implementation.watched(module, **{k: v for k, v in options.items() if implementation.accepts(k)})


def bucket_sizes(implementation: Implementation) -> list[dict[str, float]]:
    """Options for a single bucket and for one bucket per gradient; none for a wrapper without buckets."""
    return [{}, {"bucket_mb": 1e-5}] if implementation.accepts("bucket_mb") else [{}]


def is_torchs(model: Any) -> bool:
    """Return True for torch's DDP, or a wrapper around it, as frameworks have."""
    held = [each for each in (model, *vars(model).values()) if isinstance(each, nn.Module)]
    return any(isinstance(part, DistributedDataParallel) for each in held for part in each.modules())


def needs_backward_on_every_rank(model: Any) -> None:
    """Raise NotAsked for torch's DDP: it communicates in backward, so each rank must call it."""
    if is_torchs(model):
        raise NotAsked("torch's DistributedDataParallel communicates in backward, so every rank must have one")


def values(rank: int, *like: Tensor, step: int = 0) -> list[Tensor]:
    """Random numbers in the shapes and dtypes of `like`, seeded by rank and step: any rank can compute another's."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return [torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype) for x in like]


def backward(model: Any, weights: Sequence[Tensor | None], device: str, **kwargs: Any) -> None:
    """Run backward of `Products`, unless this rank's loss reaches no parameter."""
    if any(weight is not None for weight in weights):
        model([weight if weight is None else weight.to(device) for weight in weights], **kwargs).backward()


def group_ranks(group: dist.ProcessGroup | None) -> list[int]:
    """Global ranks in a process group, by default the world."""
    return dist.get_process_group_ranks(group or dist.group.WORLD)


def wrong_averages(model: Any, own: Own, when: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """Describe each of this rank's gradients that is not the average over the ranks, one line each."""
    terms = [own(rank) for rank in group_ranks(group)]
    here = dist.get_rank(group)
    lines = []
    for (name, p), *of_ranks in zip(model.module.named_parameters(), *terms, strict=True):
        if wrong := _wrong_average(p, of_ranks, here):
            kind = f"{str(p.dtype).removeprefix('torch.')} of shape {tuple(p.shape)}"
            lines.append(f"{when}: the gradient of {name!r}, {kind}, {wrong}")
    return lines


def _wrong_average(p: nn.Parameter, of_ranks: Sequence[Tensor | None], here: int) -> str | None:
    ranks, found = len(of_ranks), p.grad
    terms = torch.stack([torch.zeros(p.shape) if term is None else term.cpu() for term in of_ranks]).double()
    if found is None:
        nobody = all(term is None for term in of_ranks)
        return None if nobody else "is None, and not the average over the ranks"
    if found.shape != p.shape or found.dtype != p.dtype:
        return f"has another shape or dtype: {tuple(found.shape)} of {found.dtype}"
    found, mean = found.detach().cpu().double(), terms.mean(0)
    # A rounded 1/n multiplies each of n terms, or their sum, and each of n - 1 additions is rounded: Higham, Accuracy
    # and Stability, 4.2. An underflow loses at most the dtype's smallest number per term.
    number = torch.finfo(p.dtype)
    # In float64 the expected mean is rounded as often.
    roundings = (ranks + 1) * (2 if p.dtype == torch.float64 else 1)
    unit, smallest = roundings * number.eps / 2, number.smallest_normal * number.eps
    bound = unit / (1 - unit) * terms.abs().mean(0) + ranks * smallest
    bad = ~(((found - mean).abs() <= bound) | (found == mean) | (found.isnan() & mean.isnan()))
    if not bad.any():
        return None
    where = tuple(bad.nonzero()[0].tolist())
    numbers = f"found {found[where].item():.9g}, expected {mean[where].item():.9g} at {list(where)}"
    return (
        f"is not the average over the ranks: {likeness(found, mean, terms, here)}{numbers}, "
        f"and {int(bad.sum())} of {bad.numel()} elements are wrong"
    )


def likeness(found: Tensor, mean: Tensor, terms: Tensor, here: int) -> str:
    """Name a known mistake that `found` equals: zero, this rank's own, the sum, another rank's, a multiple."""

    def equal(other: Tensor) -> bool:
        return torch.allclose(found, other, rtol=1e-6, atol=0)

    if not found.any():
        return "it is zero; "
    if equal(terms[here]):
        return "it is this rank's own; "
    if equal(terms.sum(0)):
        return "it is the sum over the ranks; "
    for rank, term in enumerate(terms):
        if equal(term):
            return f"it is rank {rank}'s own; "
    ratio = (found.flatten() @ mean.flatten() / (mean.flatten() @ mean.flatten())).item()
    if equal(ratio * mean):
        return f"it is {ratio:.4g} times the average; "
    return ""
