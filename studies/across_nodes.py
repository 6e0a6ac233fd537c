"""Up to how many tokens per device does tensor parallelism pay, in a node and across nodes? It writes
docs/across-nodes.md: python -m studies.across_nodes

Layouts of the same devices for the same batch are predicted: a degree of tensor parallelism, and FSDP over the rest.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, log
from pathlib import Path

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from impl.tensor_parallel.cases import TensorParallelCase
from impl.tensor_parallel.workload import TensorParallelStep
from shardmark.api import Implementation, find_blocks, registry
from shardmark.meter.hardware import Hardware, hardware
from shardmark.meter.plan import Plan
from shardmark.predict.simulation.predict import predict

PAGE = Path(__file__).parents[1] / "docs" / "across-nodes.md"
CONTEXTS = (128, 256, 512, 1024, 2048, 4096)
INTRODUCTION = """\
# Tensor parallelism in a node and across nodes

`python -m studies.across_nodes` predicts a training step of eight layers of Llama 3 8B, with its vocabulary, in
bfloat16 with AdamW, on {devices} devices of {name}: `sequence` of [tensor parallelism](tensor-parallel.md) over `tp`,
and FSDP2 over `shard` around it. Each layout trains the same {devices} rows, so that ranks of `tp` share more of them.
Times are ms a step. [Published steps](published-steps.md) say how good such predictions are."""


class Layout(TensorParallelStep):
    """A step of both axes; `case.batch` rows for each group of ranks that has rows of its own."""

    def parallelize(self, implementation: Implementation) -> Callable[[nn.Module, DeviceMesh], nn.Module]:
        def both(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
            parallel: nn.Module = implementation.adapted(model, mesh["tp"])
            for module in [*find_blocks(parallel), parallel] if mesh["shard"].size() > 1 else ():
                fully_shard(module, mesh=mesh["shard"])
            return parallel

        return both


@dataclass(frozen=True)
class Step:
    """A predicted step of one layout."""

    degree: int
    tokens: int
    """Tokens of the whole batch over the number of devices."""
    peak: int
    seconds: dict[int, float]
    """By the number of devices in a node."""


def predicted(model: str, devices: int, degree: int, context: int, nodes: Sequence[Hardware]) -> Step:
    """A step on nodes of each of those numbers of devices, of rows of `context` tokens, as many as devices."""
    mesh = f"shard={devices // degree},tp={degree}"
    case = TensorParallelCase(model, degree, context, mesh, dtype="bfloat16")
    plan = Plan(Layout, registry.resolve("tensor_parallel", "sequence"), None, case, "cpu", devices)
    with warnings.catch_warnings(action="ignore"):  # the collectives' older names
        found = predict(plan, on=nodes[0], alike=nodes[1:])
    seconds = {each.devices_per_node: found.steps[each.name].seconds for each in nodes}
    return Step(degree, context, found.memory.peak, seconds)


def of_sizes(known: Hardware, sizes: Sequence[int]) -> list[Hardware]:
    """The hardware in nodes of those numbers of devices."""
    return [replace(known, name=f"{known.name}, {size} a node", devices_per_node=size) for size in sizes]


def pays_until(alone: Sequence[tuple[int, float]], parallel: Sequence[tuple[int, float]]) -> float:
    """The number of tokens at which `alone` is first as fast, from (tokens, seconds) of both in the order of tokens; 0
    where it is at the smallest number, infinite where it never is. Between two numbers the logarithm of the ratio is
    interpolated in that of the tokens."""
    points = [(tokens, log(mine / other)) for (tokens, mine), (_, other) in zip(parallel, alone, strict=True)]
    if points[0][1] >= 0:
        return 0.0
    for (before, left), (after, right) in pairwise(points):
        if right >= 0:
            return exp(log(before) + (log(after) - log(before)) * -left / (right - left))
    return float("inf")


def in_words(tokens: float, least: int, most: int) -> str:
    if tokens == 0:
        return f"not at {least:,}"
    return f"above {most:,}" if tokens > most else f"{tokens:,.0f}"


def page(steps: Sequence[Step], known: Hardware, devices: int) -> str:
    sizes, degrees = list(steps[0].seconds), sorted({step.degree for step in steps})
    contexts = sorted({step.tokens for step in steps})
    by = {(step.degree, step.tokens): step for step in steps}
    lines = INTRODUCTION.format(devices=devices, name=known.name).splitlines()
    lines += ["", "## Up to how many tokens per device it pays", ""]
    lines += [f"Up to here the layout's step is shorter than that of FSDP alone, `shard={devices}`.", ""]
    lines += ["| | " + " | ".join(_nodes(devices, size) for size in sizes) + " |", "|---" * (len(sizes) + 1) + "|"]
    for degree in degrees[1:]:
        ends = []
        for size in sizes:
            alone, parallel = ([(n, by[d, n].seconds[size]) for n in contexts] for d in (degrees[0], degree))
            ends.append(in_words(pays_until(alone, parallel), contexts[0], contexts[-1]))
        lines.append(f"| `{_layout(devices, degree)}` | " + " | ".join(ends) + " |")
    for size in sizes:
        lines += ["", f"## {_nodes(devices, size).capitalize()}", ""]
        lines += ["| tokens per device | " + " | ".join(f"`{_layout(devices, each)}`" for each in degrees) + " |"]
        lines += ["|---" * (len(degrees) + 1) + "|"]
        lines += [_times([by[degree, tokens] for degree in degrees], size) for tokens in contexts]
    lines += ["", "## Memory", "", "Peak of a rank in GiB, wherever the others are.", ""]
    lines += ["| tokens per device | " + " | ".join(f"`{_layout(devices, each)}`" for each in degrees) + " |"]
    lines += ["|---" * (len(degrees) + 1) + "|"]
    for tokens in contexts:
        lines.append(f"| {tokens:,} | " + " | ".join(f"{by[each, tokens].peak / 2**30:.1f}" for each in degrees) + " |")
    return "\n".join(lines) + "\n"


def _times(steps: Sequence[Step], size: int) -> str:
    """The line of a table; the shortest is bold."""
    least = min(step.seconds[size] for step in steps)
    cells = [f"{1e3 * step.seconds[size]:,.0f}" for step in steps]
    marked = [f"**{cell}**" if step.seconds[size] == least else cell for step, cell in zip(steps, cells, strict=True)]
    return f"| {steps[0].tokens:,} | " + " | ".join(marked) + " |"


def _layout(devices: int, degree: int) -> str:
    parts = {"shard": devices // degree, "tp": degree}
    return ",".join(f"{name}={size}" for name, size in parts.items() if size > 1)


def _nodes(devices: int, size: int) -> str:
    return "one node" if size == devices else f"{devices // size} nodes of {size}"


def steps_of(
    model: str, known: Hardware, devices: int, sizes: Sequence[int], contexts: Sequence[int]
) -> Iterator[Step]:
    """Steps of each layout and context, in their order."""
    nodes = of_sizes(known, sizes)
    degree = 1
    while degree <= devices:
        for context in contexts:
            yield predicted(model, devices, degree, context, nodes)
        degree *= 2


def main() -> None:
    """Print each step as it is known, and write the page."""
    parser = argparse.ArgumentParser("python -m studies.across_nodes", description=__doc__)
    parser.add_argument("--hardware", default="h100-80gb", help="(default h100-80gb, for which the page is)")
    parser.add_argument("--page", type=Path, default=PAGE, help="file to write (default docs/across-nodes.md)")
    options = parser.parse_args()
    known, devices = hardware(options.hardware), 8
    steps = []
    for step in steps_of("large", known, devices, (8, 4, 2, 1), CONTEXTS):
        steps.append(step)
        print(f"tp={step.degree} at {step.tokens:,} tokens: {step.seconds}", flush=True)
    options.page.write_text(page(steps, known, devices))


if __name__ == "__main__":
    sys.exit(main())
