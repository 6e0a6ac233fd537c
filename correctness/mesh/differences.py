"""Differences on a mesh, in words: which parameter, by which factor, and the axis of that size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from math import isclose, prod
from typing import Any

import torch
from torch import Tensor

from correctness.mesh.training import Trace
from shardmark.api import Mesh

WITHIN = 1e-12
"""Relative to the largest value of a tensor: rounding in float64, over 20 steps of small numbers."""
LATER = 100.0
"""Later steps may differ by this many times as much, as each step's rounding enters the next."""


def differences(ranks: Sequence[Trace], expected: Trace, mesh: Mesh, within: float = WITHIN) -> Iterator[str]:
    """A line for each thing that differs from one process, the one nearest to the cause first."""
    found = ranks[0]
    for step in expected.parameters:
        allowed = within * (LATER if step else 1)
        yield from _between_ranks(ranks, "gradients", step, mesh)
        if not isclose(found.losses[step], expected.losses[step], rel_tol=allowed):
            yield _number(f"the loss of step {step}", found.losses[step], expected.losses[step], mesh)
        norms = found.norms[step], expected.norms[step]
        own, right = found.gradients.get(step, {}), expected.gradients.get(step, {})
        clipped = expected.scale(norms[0]) / expected.scale(norms[1])
        gradients = [*_tensors(own, right, step, "gradients", allowed, mesh, clipped)]
        if gradients and isclose(*norms, rel_tol=allowed) and (factor := _factor_of_all(own, right, allowed)):
            clip = f"clipping to max_norm={expected.max_norm:g}"
            yield f"all gradients of step {step} are {factor:.6g} times what {clip} leaves, by the right norm"
        yield from gradients
        if not isclose(*norms, rel_tol=allowed):
            counted = _counted(*norms, right, expected.scale(norms[1]), mesh)
            yield _number(f"the norm of step {step}", *norms, mesh) + counted
        for rank, other in enumerate(ranks):
            mine, first = ((each.losses[step], each.norms[step]) for each in (other, found))
            if mine != first:
                yield f"loss and norm of step {step} are {mine} on rank {rank}, and {first} on rank 0"
        if not gradients:
            yield from _tensors(found.parameters[step], expected.parameters[step], step, "parameters", allowed, mesh)
    allowed = within * LATER
    for step, (loss, norm) in enumerate(zip(expected.losses, expected.norms, strict=True)):
        if step not in expected.parameters:
            if not isclose(found.losses[step], loss, rel_tol=allowed):
                yield _number(f"the loss of step {step}", found.losses[step], loss, mesh)
            if not isclose(found.norms[step], norm, rel_tol=allowed):
                yield _number(f"the norm of step {step}", found.norms[step], norm, mesh)
    yield from replicas(ranks, mesh)
    for step in expected.parameters:
        yield from _between_ranks(ranks, "parameters", step, mesh)


def resumption_differs(rank: int, resumed: Trace, went_on: Trace) -> Iterator[str]:
    """A line for each difference between training that was saved, loaded and resumed, and training that went on."""
    for index, (own, there) in enumerate(zip(resumed.losses, went_on.losses, strict=True)):
        if not isclose(own, there, rel_tol=WITHIN):
            yield f"rank {rank}: {index} steps after what was saved, the loss is {own:.8g}; without a stop {there:.8g}"
    for name, right in went_on.parameters[0].items():
        if not _near(resumed.parameters[0][name], right, WITHIN):
            apart = (resumed.parameters[0][name] - right).abs().max().item()
            yield f"rank {rank}: {name} is off by {apart:.3g} {len(went_on.losses)} steps after what was saved"


def _between_ranks(ranks: Sequence[Trace], what: str, step: int, mesh: Mesh) -> Iterator[str]:
    """The first tensor that a rank gives with other bits than rank 0 does, though each gives the whole of it."""
    first = ranks[0].digests.get((what, step), {})
    for name in first:
        for rank, other in enumerate(ranks):
            if other.digests[what, step].get(name) != first[name]:
                yield f"{what} of {name} differ along {_axes(mesh, 0, rank)} after step {step}, on ranks 0 and {rank}"
                return


def _axes(mesh: Mesh, *ranks: int) -> str:
    return ", ".join(mesh.axes_of(ranks))


def replicas(ranks: Sequence[Trace], mesh: Mesh) -> Iterator[str]:
    """Parts of parameters that ranks have in common, and which are not bitwise equal; a stage has some of them."""
    for name in dict.fromkeys(name for trace in ranks for name in trace.local):
        first: dict[Any, tuple[int, str]] = {}
        for rank, trace in enumerate(ranks):
            if name not in trace.local:
                continue
            part, digest = trace.local[name]
            at, there = first.setdefault(part, (rank, digest))
            if digest != there:
                yield f"replicas of {name} differ along {_axes(mesh, at, rank)}: ranks {at} and {rank} have other bits"
                break


def _tensors(
    found: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    step: int,
    what: str,
    allowed: float,
    mesh: Mesh,
    clipped: float = 1.0,
) -> Iterator[str]:
    """A line for each tensor that differs, those that differ most first. Gradients that are `clipped` times as large,
    by a wrong norm, are left out: the norm is reported once."""
    lines: list[tuple[float, str]] = []
    for name, right in expected.items():
        if name not in found:
            if what == "parameters" or right.any():
                lines.append((torch.inf, f"there are no {what} of {name} at step {step}"))
        elif found[name].shape != right.shape:
            shapes = tuple(found[name].shape), tuple(right.shape)
            lines.append((torch.inf, f"{what} of {name} have the shape {shapes[0]}, not {shapes[1]}"))
        elif not _near(found[name], right, allowed) and not (
            clipped != 1.0 and _near(found[name] / clipped, right, 10 * allowed)
        ):
            own = found[name] / clipped
            lines.append(
                (_apart(own, right), f"{what} of {name} {_difference(own, right, allowed, mesh)} at step {step}")
            )
    for name in found:
        if name not in expected and (what == "parameters" or found[name].any()):
            lines.append((torch.inf, f"there are {what} of {name} at step {step}, and none in one process"))
    yield from (line for _, line in sorted(lines, key=lambda each: -each[0]))


def _difference(own: Tensor, right: Tensor, allowed: float, mesh: Mesh) -> str:
    square = right.flatten().dot(right.flatten()).item()
    factor = own.flatten().dot(right.flatten()).item() / square if square else 0.0
    if not own.any():
        return "are zeros"
    if factor and _near(own, factor * right, 1e3 * allowed):
        return f"are {factor:.6g} times what they should be{_size(factor, mesh)},"
    at = int((own - right).abs().argmax())
    index = tuple(int(each) for each in torch.unravel_index(torch.tensor(at), right.shape))
    return f"are {own.flatten()[at].item():.8g}, not {right.flatten()[at].item():.8g}, at {index}"


def _factor_of_all(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], allowed: float) -> float | None:
    """The factor by which all tensors differ, if one explains them."""
    largest = max(expected, key=lambda name: expected[name].abs().max().item(), default=None)
    if largest is None or set(found) != set(expected):
        return None
    at = expected[largest].abs().argmax()
    factor = (found[largest].flatten()[at] / expected[largest].flatten()[at]).item()
    alike = all(_near(found[name], factor * right, 10 * allowed) for name, right in expected.items())
    return factor if alike else None


def _apart(own: Tensor, right: Tensor) -> float:
    return ((own - right).norm() / right.norm().clamp(min=1e-12)).item()


def _near(found: Tensor, right: Tensor, allowed: float) -> bool:
    scale = right.abs().max().clamp(min=1e-3).item() if right.numel() else 1.0
    return bool(((found - right).abs() <= allowed * scale).all())


def _number(what: str, found: float, right: float, mesh: Mesh) -> str:
    factor = found / right if right else float("nan")
    return f"{what} is {found:.8g}, in one process {right:.8g}: {factor:.4g} times as much{_size(factor, mesh)}"


def _size(factor: float, mesh: Mesh) -> str:
    """The axes whose sizes multiply to the factor, to its inverse, or to a power of them: all that do."""
    sizes = {name: size for name, size in mesh.sizes.items() if size > 1}
    several = [names for count in range(1, len(sizes) + 1) for names in combinations(sizes, count)]
    for power, said in ((1, "the size"), (0.5, "the square root of the size"), (2, "the square of the size")):
        for sign, inverse in ((1, ""), (-1, "one over ")):
            alike = [
                " and ".join(names)
                for names in several
                if isclose(factor, prod(sizes[name] for name in names) ** (sign * power), rel_tol=1e-6)
            ]
            if alike:
                return f": {inverse}{said} of {' or of '.join(alike)}"
    return ""


ROLES = {
    "experts": ".experts.",
    "norms": "norm.",
    "the embedding": "tok_embeddings",
    "the output": "output",
    "attention": ".attention.",
    "feed-forward networks": ".feed_forward.",
    "routers": ".router.",
}
"""Parameters that code often treats alike, by a part of their names."""


def _counted(found: float, right: float, gradients: Mapping[str, Tensor], scale: float, mesh: Mesh) -> str:
    """Which parameters the norm counts several times, or not at all, if that alone explains it. Clipping has scaled
    the gradients by `scale`."""
    squares = {name: (gradient.double().norm().item() / scale) ** 2 for name, gradient in gradients.items()}
    for role, part in ROLES.items():
        share = sum(square for name, square in squares.items() if part in name)
        for name, size in [("", 0), *mesh.sizes.items()]:
            if share and size != 1 and isclose(found**2, right**2 + (size - 1) * share, rel_tol=1e-5):
                return f": it counts {role} {size} times, the size of {name}" if size else f": it leaves out {role}"
    return ""
