"""Random histories of calls of layers against eager: results are right, and nothing else changes."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from correctness.engine.calls import (
    BACKWARDS,
    MODES,
    RunningCall,
    hold_calls,
    leaves_of,
    nearly_twice,
    of_equal_tensors,
    play,
)
from correctness.engine.examples import autocast_takes
from correctness.layers.accuracy import TIMES, assert_accurate
from correctness.layers.layouts import LAYOUTS, OF_GRADIENTS, laid_out
from correctness.layers.operations import BROADCAST, Inputs, call, gradients, random_inputs
from impl.layers import OPERATIONS
from shardmark.api import Implementation

pytestmark = [pytest.mark.family("layers"), pytest.mark.usefixtures("poisoned")]

CONTIGUOUS = "contiguous"
DTYPES = torch.float64, torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Call:
    """One random call: its sizes, values, layouts and dtypes, in which mode it is made, and how its backward runs."""

    operation: str
    rows: int
    dim: int
    lead: tuple[int, ...]
    dtype: torch.dtype
    wide_weight: bool
    """Weight and tables are float32 beside half precision."""
    scale: float
    """Factor of the first argument, beside `size`."""
    size: float
    """Factor of gradients, and of arguments but weights and tables; float16 has 1."""
    eps: float
    layouts: tuple[str, ...]
    """Layouts of the arguments."""
    grads: tuple[str, ...]
    """Layouts of the gradients of the results."""
    mode: str
    needs: int
    """The arguments that require gradients, one a bit; 0 is all."""
    backward: str
    checkpointed: bool
    later: bool
    seed: int

    def inputs(self, device: str) -> Inputs:
        torch.manual_seed(self.seed)
        drawn = random_inputs(self.operation, self.rows, self.dim, device, lead=self.lead)
        first = next(iter(drawn.tensors))
        held = self.dtype != torch.float16  # which cannot hold these sizes
        sizes = {name: self.size if held and name not in BROADCAST else 1.0 for name in drawn.tensors}
        tensors = {name: sizes[name] * x for name, x in drawn.tensors.items()}
        tensors[first] = self.scale * tensors[first]
        drawn = replace(drawn, grads={name: (self.size if held else 1.0) * x for name, x in drawn.grads.items()})
        half = self.dtype.itemsize == 2 and self.wide_weight
        cast = replace(drawn, tensors=tensors, eps=self.eps).to(self.dtype, torch.float32 if half else None)
        empty = not all(x.numel() for x in cast.tensors.values())
        return cast if empty else laid_out(cast, self.layouts, self.grads)

    @property
    def is_possible(self) -> bool:
        return autocast_takes(self.mode, self.dtype)

    def needed(self, inputs: Inputs) -> list[str]:
        return [name for i, name in enumerate(inputs.learned) if self.needs >> i & 1] or inputs.learned

    def __str__(self) -> str:
        """Describe the call without its usual settings."""
        weight = " with a weight or tables of float32" if self.wide_weight and self.dtype.itemsize == 2 else ""
        words = [
            f"{self.operation} of {self.rows} rows, dim {self.dim}, before them {self.lead}, {self.dtype}{weight}",
            f"scale {self.scale}, size {self.size:g}, eps {self.eps}",
            *(f"{of} {'/'.join(layouts)}" for of, layouts in self._unusual()),
            f"{self.mode}{', checkpointed' * self.checkpointed}",
        ]
        return ", ".join(words)

    def _unusual(self) -> list[tuple[str, tuple[str, ...]]]:
        given = {"layouts": self.layouts, "gradients": self.grads}
        return [(of, layouts) for of, layouts in given.items() if set(layouts) != {CONTIGUOUS}]


layouts = st.just(CONTIGUOUS) | st.sampled_from(list(LAYOUTS))
of_gradients = st.just(CONTIGUOUS) | st.sampled_from(list(OF_GRADIENTS))

CALLS = st.builds(
    Call,
    operation=st.sampled_from(list(OPERATIONS)),
    rows=st.integers(0, 9) | st.sampled_from([16, 17, 33]),
    dim=st.integers(1, 40) | st.sampled_from([63, 64, 65, 127, 129, 257, 1025]),
    lead=st.sampled_from([(), (), (2,), (2, 3), (1,), (2, 1, 1, 2)]),
    dtype=st.sampled_from(DTYPES),
    wide_weight=st.booleans(),
    scale=st.sampled_from([1.0, 1.0, 0.01, 100.0]),
    size=st.just(1.0) | st.sampled_from([1e-8, 1e6]),
    eps=st.sampled_from([1e-5, 1e-6, 1e-2, 0.0]),
    layouts=st.tuples(*[layouts] * 4) | layouts.map(lambda how: (how,) * 4),
    grads=st.tuples(of_gradients, of_gradients),
    mode=st.just("gradients") | st.sampled_from(list(MODES)),
    needs=st.just(0) | st.integers(0, 7),
    backward=st.sampled_from(BACKWARDS),
    checkpointed=st.sampled_from([False, False, False, True]),
    later=st.booleans(),
    seed=st.integers(0, 2**20),
).filter(lambda call: call.is_possible)

HISTORIES = st.lists(CALLS, min_size=1, max_size=3) | nearly_twice(
    CALLS, "dtype", "wide_weight", "eps", "rows", "needs"
)


class Running(RunningCall):
    def __init__(self, layers: Any, asked: Call, calls: list[Any], device: str) -> None:
        """Make new inputs, or use the tensors of the last of `calls` if equal."""
        self.inputs = asked.inputs(device)
        last = of_equal_tensors(asked, self.inputs.tensors | self.inputs.grads, calls)
        if last:
            self.inputs = replace(self.inputs, tensors=last.inputs.tensors, grads=last.inputs.grads)
        super().__init__(asked, self.inputs.tensors | self.inputs.grads)
        self.needed = needed = [] if self.needs_nothing else asked.needed(self.inputs)
        self.leaves = leaves_of(asked, self.inputs.tensors, needed, last)
        with MODES[asked.mode](device):
            results = self.called(
                lambda *x: tuple(call(layers, self.inputs, dict(zip(self.leaves, x, strict=True))).values()),
                *self.leaves.values(),
            )
        self.found = dict(zip(self.inputs.grads, results, strict=True))
        tracked = any(x.requires_grad for x in self.found.values())
        assert tracked == self.waits, f"of {asked}: a result {'requires' if tracked else 'does not require'} a gradient"
        self._take({name: x.detach() for name, x in self.found.items()})
        if not self.waits or asked.backward == "never":
            self.waits = False
            del self.found

    def _take(self, found: dict[str, Tensor], inputs: Inputs | None = None) -> None:
        """Check the results, and keep copies that must stay equal."""
        assert_accurate(found, inputs or self.inputs, TIMES, f"of {self.call}: ")
        self.results |= found
        self.kept = {name: x.clone() for name, x in self.results.items()}

    def backward(self) -> None:
        """Run backward as the call asks; a second backward may raise an error."""
        if self.call.backward == "backward":
            used = [name for name, x in self.found.items() if x.requires_grad]
            torch.autograd.backward([self.found[name] for name in used], [self.inputs.grads[name] for name in used])
            for name, x in self.leaves.items():
                assert (x.grad is not None) == x.requires_grad, f"of {self.call}: the gradient of {name} is {x.grad}"
            self._take({f"grad_{name}": x.grad for name, x in self.leaves.items() if x.grad is not None})
        else:
            twice, found, drawn = self.call.backward == "twice", dict[str, Tensor](), copy.deepcopy(self.inputs)
            with self.mode_of_backward(), self.after_a_change(*self.leaves.values(), *self.found.values()):
                found = self.run(lambda: gradients(self.found, self.leaves, self.inputs, retain_graph=twice))
            self._take(found, drawn)
            if twice:
                for x in found.values():
                    if 0 not in x.stride():  # or it is expanded
                        x.zero_()
                self._take({})
                others = replace(self.inputs, grads={name: -2 * x for name, x in self.inputs.grads.items()})
                try:
                    again = gradients(self.found, self.leaves, others)
                except RuntimeError:
                    again = {}
                self._take(again, others)
        self.waits = False
        del self.found


@pytest.mark.examples(12, 100, 1000)
def test_any_history_of_calls_is_as_accurate_as_eager_and_changes_nothing_else(
    implementation: Implementation, examples: int, device: str
) -> None:
    def run(events: list[Call]) -> list[Any]:
        return play(events, lambda *asked: Running(implementation.watched, *asked, device), torch.Tensor.zero_)

    hold_calls(HISTORIES, run, implementation, examples, device)
