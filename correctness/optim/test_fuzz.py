"""Any training leads where the plain AdamW leads: Hypothesis chooses parameters, groups, gradients and what happens
between steps, and shrinks what fails."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from correctness.support.optimizing import assert_near, interpreted, saved
from impl.optim import AdamW
from shardmark.registry import Implementation

pytestmark = pytest.mark.family("optimizer")

LRS, DECAYS, EPSILONS = (0.0, 1e-3, 0.3), (0.0, 0.1, 1.0), (1e-8, 1e-3, 1.0)
BETAS = tuple((beta1, beta2) for beta1 in (0.0, 0.5, 0.9) for beta2 in (0.5, 0.95, 0.999))


@dataclass(frozen=True)
class Event:
    """A step with a gradient for each parameter, some 0 or None; before it, perhaps, another lr or a restart."""

    sizes: tuple[float | None, ...]
    """Of each parameter's gradient, used in turn."""
    lr: float | None
    restarts: bool
    same_tensors: bool
    """The gradients are written into the tensors that the last ones were in, where there are some."""


shapes = st.one_of(
    st.lists(st.integers(0, 5), max_size=3).map(tuple),
    st.tuples(st.integers(0, 10).map(lambda k: 2**k) | st.sampled_from((31, 33, 127, 129, 1023, 1025))),
)
arguments = st.fixed_dictionaries(
    {}, optional={
        "lr": st.sampled_from(LRS),
        "betas": st.sampled_from(BETAS),
        "eps": st.sampled_from(EPSILONS),
        "weight_decay": st.sampled_from(DECAYS),
    },
)  # fmt: skip
groups = st.lists(st.tuples(st.lists(shapes, min_size=1, max_size=3), arguments), min_size=1, max_size=3)
events = st.lists(
    st.builds(
        Event,
        sizes=st.lists(st.sampled_from((None, 0.0, 1e-3, 1.0, 1e3)), min_size=1, max_size=4).map(tuple),
        lr=st.none() | st.sampled_from(LRS),
        restarts=st.booleans(),
        same_tensors=st.booleans(),
    ),
    min_size=1,
    max_size=6,
)


def trained(target: Any, plan: list[Any], happens: list[Event], added: int, device: str) -> list[Tensor]:
    """The parameters afterwards; the last groups are added later, after so many steps."""
    generator = torch.Generator().manual_seed(0)

    def random(shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=generator).to(device)

    made = [{"params": [random(s).requires_grad_() for s in shapes], **own} for shapes, own in plan]
    optimizer = target([dict(made[0])])
    for i, event in enumerate(happens):
        if i == min(added, len(happens) - 1):
            for group in made[1:]:
                optimizer.add_param_group(dict(group))
        params = [p for group in optimizer.param_groups for p in group["params"]]
        if event.restarts:
            state = saved(optimizer)
            optimizer = target([{"params": group["params"]} for group in optimizer.param_groups])
            optimizer.load_state_dict(state)
        if event.lr is not None:
            optimizer.param_groups[-1]["lr"] = event.lr
        for k, p in enumerate(params):
            size = event.sizes[k % len(event.sizes)]
            grad = None if size is None else size * random(tuple(p.shape))
            if event.same_tensors and p.grad is not None and grad is not None:
                p.grad.copy_(grad)
            else:
                p.grad = grad
        optimizer.step()
    return [p.detach() for group in made for p in group["params"]]


def _leads_where_plain_leads(
    implementation: Implementation, plan: list[Any], happens: list[Event], added: int, device: str
) -> None:
    found, expected = (trained(x, plan, happens, added, device) for x in (implementation.target, AdamW))
    for i, (x, y) in enumerate(zip(found, expected, strict=True)):
        if y.numel():
            assert_near(x, y, 1e-9 * (1 + y.abs().max().item()), f"parameter {i} of shape {tuple(y.shape)}")


def _fuzzed(examples: int) -> Any:
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


@_fuzzed(25)
@given(plan=groups, happens=events, added=st.integers(0, 3))
def test_any_training_leads_where_the_plain_one_leads(
    implementation: Implementation, plan: list[Any], happens: list[Event], added: int, device: str
) -> None:
    if interpreted(implementation, device):
        pytest.skip("Triton's interpreter takes seconds for it; in the sweep")
    _leads_where_plain_leads(implementation, plan, happens, added, device)


@pytest.mark.sweep
def test_any_of_many_trainings_leads_there(implementation: Implementation, device: str) -> None:
    @_fuzzed(60 if interpreted(implementation, device) else 1000)
    @given(plan=groups, happens=events, added=st.integers(0, 3))
    def leads(plan: list[Any], happens: list[Event], added: int) -> None:
        _leads_where_plain_leads(implementation, plan, happens, added, device)

    leads()
