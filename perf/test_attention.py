"""What does attention cost, in time and in memory, by length, and how near to the hardware's limit does it come?"""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from impl.accounting.attention import work
from impl.attention import sdpa, sdpa_backend
from shardmark import cases, registry
from shardmark.budget import MEMORY_SLACK
from shardmark.cases import AttentionCase, Grid
from shardmark.measure import Measure
from shardmark.plan import Mark
from shardmark.registry import Implementation, Race
from shardmark.rows import Row

pytestmark = pytest.mark.family("attention")


class AttentionPass:
    """Attention over fresh random q, k, v: the pass that the case names."""

    def __init__(self, implementation: Implementation, case: AttentionCase, device: str) -> None:
        self.attention = implementation.adapted
        self.case = case
        self.q, self.k, self.v = (
            torch.randn(case.shape, device=device, dtype=case.torch_dtype).requires_grad_() for _ in range(3)
        )
        self.backend = self._backend(implementation)
        self.grad_out = None if case.mode == "forward" else torch.randn_like(self.q, requires_grad=False)
        self.out: torch.Tensor | None = None

    def prepare(self) -> None:
        """Let go of the last step's results; run forward where only backward is measured."""
        self.out = None
        for x in (self.q, self.k, self.v):
            x.grad = None
        if self.case.mode == "backward":
            self.out = self.attention(self.q, self.k, self.v, is_causal=self.case.is_causal)

    def step(self, mark: Mark) -> None:
        """The pass."""
        if self.case.mode != "backward":
            self.out = self.attention(self.q, self.k, self.v, is_causal=self.case.is_causal)
            mark("forward")
        if self.case.mode != "forward":
            assert self.out is not None
            self.out.backward(self.grad_out)
            mark("backward")

    def _backend(self, implementation: Implementation) -> str:
        """The kernel that runs: SDPA's choice, else what the implementation is called."""
        if implementation.target is sdpa:
            return sdpa_backend(self.q, self.k, self.v, self.case.is_causal)
        return implementation.name


SLACK = {"flash_triton": 1.01}
"""Nothing but inputs, outputs, gradients and one or two values a row: there is little to be vague about."""


def _measure(measure: Measure, implementation: Implementation, case: AttentionCase, time: Race | None = None) -> Row:
    amount = work(case)
    return measure(
        AttentionPass,
        implementation,
        case,
        work=amount,
        slack=SLACK.get(implementation.name, MEMORY_SLACK),
        rates=lambda seconds: {"flops_per_second": amount.flops / seconds},
        time=time,
    )


@pytest.mark.question("What does attention cost as the sequence grows?")
@pytest.mark.cases(cases.ATTENTION_MEMORY)
def test_memory_by_length(implementation: Implementation, case: AttentionCase, measure: Measure) -> None:
    _measure(measure, implementation, case)


@pytest.mark.question("What does causal attention cost, forward, backward and both?")
@pytest.mark.cases(cases.ATTENTION_LENGTHS)
def test_time_by_length(implementation: Implementation, case: AttentionCase, measure: Measure) -> None:
    _measure(measure, implementation, case)


@pytest.mark.question("How near to the hardware's limit is attention with heads?")
@pytest.mark.cases(cases.ATTENTION_HEADS)
def test_throughput(implementation: Implementation, case: AttentionCase, measure: Measure) -> None:
    _measure(measure, implementation, case)


@dataclass(frozen=True)
class Goal:
    """`implementation` takes at most `ratio` times what `peer` takes for the case."""

    implementation: str
    peer: str
    ratio: float
    case: AttentionCase

    def __str__(self) -> str:
        return f"{self.implementation}-{self.peer}-{self.case}"


_HEADS = [case for case in cases.ATTENTION_HEADS.paper if case.seq >= 4096]
_FORWARD, _BACKWARD = ([case for case in _HEADS if case.mode == mode] for mode in ("forward", "backward"))

GOALS = Grid(
    smoke=[],
    laptop=[],
    paper=[
        *(Goal("flash_triton", "sdpa_cudnn", 1 / 0.9, case) for case in _FORWARD),
        *(Goal("flash_triton", "sdpa_flash", 1 / 1.3, case) for case in _FORWARD),
        *(Goal("flash_triton", "sdpa_cudnn", 1 / 0.8, case) for case in _BACKWARD),
        *(Goal("flash_triton", "sdpa_flash", 1 / 1.1, case) for case in _BACKWARD),
        *(Goal("flash_triton", "eager", 1 / 20, replace(case, mode="both")) for case in _FORWARD if case.seq == 16384),
        *(Goal("flash_triton", "flex", 1 / 2, replace(case, dtype="float32")) for case in _BACKWARD),
    ],
)


@pytest.mark.question("Does attention reach its goals?")
@pytest.mark.cases(GOALS)
def test_goals(case: Goal, device: str, measure: Measure) -> None:
    implementation = registry.resolve("attention", case.implementation)
    if reason := implementation.missing(device, to_measure=True):
        pytest.skip(f"{implementation}: {reason}")
    row = _measure(measure, implementation, case.case, Race(case.peer, goal=case.ratio))
    if row["time"]["ratio"] is None:
        pytest.skip(f"not judged: {case.peer} does not run here, or there is no room for both")
