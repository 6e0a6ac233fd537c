"""An implementation unwatched: where it cannot see that it is judged, nor touch what judges it.

    @pytest.mark.judged
    def test_is_right_unwatched(implementation):
        assert_right_unwatched(implementation, draw, perform, expected)

`draw(generator)` returns the inputs, made of tensors, numbers, lists and dicts; `perform(target, given, rank)` calls
the implementation on them and returns tensors by name; `expected(given, ranks)` returns those that are right, of which
those may be refused for which `may_lack(given, name)`, where there is one, is true. `perform` runs in processes of its
own, one a rank: as source, without pytest or any module of the tests. `expected`, and the comparison, run in another
one, in which the implementation is never imported.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.support.paths import ROOT
from shardmark.api import Implementation, note_unasked

CLOSE = 1e-3
"""Largest error, as a share of a result's largest element: rounding in float32 is far below, any cheat far above."""
FLOOR = 1e-5
"""Largest error where the terms of a result cancel, as a gradient's with one key do: rounding of numbers of about 1."""

PROGRAM = """
from __future__ import annotations

import importlib, importlib.util, sys
from pathlib import Path
import torch
import torch.distributed as dist

{source}

def target(source, attribute):
    if not source.endswith(".py"):
        return getattr(importlib.import_module(source), attribute)
    sys.path.append(str(Path(source).parent))
    spec = importlib.util.spec_from_file_location(Path(source).stem, source)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return getattr(module, attribute)

folder, source, attribute, rank, ranks = *sys.argv[1:4], int(sys.argv[4]), int(sys.argv[5])
torch.set_num_threads(1)
if ranks > 1:
    dist.init_process_group("gloo", init_method=f"file://{{folder}}/store", rank=rank, world_size=ranks)
found = perform(target(source, attribute), torch.load(f"{{folder}}/given.pt"), rank)
torch.save(found, f"{{folder}}/found{{rank}}.pt")
"""


def assert_right_unwatched(
    implementation: Implementation,
    draw: Callable[[torch.Generator], Any],
    perform: Callable[[Any, Any, int], dict[str, Tensor]],
    expected: Callable[[Any, int], dict[str, Tensor]],
    ranks: int = 1,
) -> None:
    """Assert that it is right there too. Skip where it cannot be imported anew, as an attribute made by a test."""
    __tracebackhide__ = True
    source, _, attribute = implementation.spec.rpartition(":")
    if not source:
        pytest.skip("an implementation of the suite is not imported alone")
    assert sys.modules[perform.__module__].draw is draw and perform.__module__ == expected.__module__
    command = [
        sys.executable,
        "-m",
        __name__,
        perform.__module__,
        source,
        attribute,
        str(torch.initial_seed()),
        str(ranks),
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    lines = [line for line in ended.stdout.splitlines() if line.startswith("{")]
    if not lines:
        pytest.fail(f"in a process of its own nothing is found:\n{ended.stderr[-2000:]}", pytrace=False)
    said = json.loads(lines[-1])
    if "unsupported" in said:
        note_unasked(said["unsupported"])
        pytest.skip(said["unsupported"])
    if said["problem"]:
        pytest.fail(f"in a process of its own, without pytest: {said['problem']}", pytrace=False)


def _witness(module: str, source: str, attribute: str, seed: int, ranks: int) -> dict[str, str]:
    """Draw, have it performed, and compare."""
    of = importlib.import_module(module)
    given = of.draw(torch.Generator().manual_seed(seed))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(given, f"{folder}/given.pt")
        program = PROGRAM.format(source=inspect.getsource(of.perform))
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        started = [
            subprocess.Popen(
                [sys.executable, "-c", program, folder, source, attribute, str(rank), str(ranks)],
                cwd=folder,
                env=environment,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(ranks)
        ]
        said = [each.communicate()[1] for each in started]
        expected, may_lack = of.expected(given, ranks), getattr(of, "may_lack", lambda given, name: False)
        for rank in range(ranks):
            path = Path(folder, f"found{rank}.pt")
            if not path.exists():
                last = next(
                    (line for line in reversed(said[rank].splitlines()) if line.strip()), "it ends without a word"
                )
                if "shardmark.api.refusals.Unsupported" in last:
                    return {"unsupported": last}
                return {"problem": f"rank {rank} of {ranks}: {last}"}
            try:
                found = torch.load(path)  # plain tensors alone
            except Exception as error:
                return {"problem": f"it returns something that is no plain tensor: {error}".splitlines()[0]}
            asked = {name: x for name, x in expected.items() if name in found or not may_lack(given, name)}
            if problem := _problem(found, asked):
                return {"problem": f"rank {rank} of {ranks}: {problem}" if ranks > 1 else problem}
    return {"problem": ""}


def _problem(found: dict[str, Tensor], expected: dict[str, Tensor]) -> str:
    for name, wanted in expected.items():
        value = found.get(name)
        if value is None or value.shape != wanted.shape:
            return f"{name} is {None if value is None else tuple(value.shape)}, expected {tuple(wanted.shape)}"
        error, scale = (value.double() - wanted.double()).abs(), wanted.double().abs().max().item()
        if not (error <= CLOSE * scale + FLOOR).all():
            i = int(error.flatten().nan_to_num(torch.inf).argmax())
            return f"{name}: found {value.flatten()[i].item():.6g}, expected {wanted.flatten()[i].item():.6g} at [{i}]"
    return ""


def main(arguments: Sequence[str]) -> None:
    module, source, attribute, seed, ranks = arguments
    print(json.dumps(_witness(module, source, attribute, int(seed), int(ranks))))


if __name__ == "__main__":
    main(sys.argv[1:])
