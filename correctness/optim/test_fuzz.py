"""Any training leads where the plain AdamW leads: Hypothesis chooses parameters, groups, gradients and what happens
between steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from correctness.support.optimizing import interpreted
from correctness.support.training_scripts import Event, assert_leads_where_adamw_does, plans, scripts
from shardmark.registry import Implementation

CLIPPING = pytest.mark.family("optimizer", option="max_grad_norm")
MASTER = pytest.mark.family("optimizer", option="master_weights")

DTYPES = st.lists(
    st.sampled_from((torch.bfloat16, torch.float16, torch.float32, torch.float64)), min_size=1, max_size=3
).map(lambda some: (torch.bfloat16, *some))
MOST = st.sampled_from((0.1, 1.0, 1e6))


def _fuzzed(examples: int) -> Any:
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        report_multiple_bugs=False,
        # A failure names its event; to look for a smaller one takes minutes, which only the sweep has.
        phases=(Phase.generate, Phase.shrink) if examples > 30 else (Phase.generate,),
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


def _plain(implementation: Implementation, device: str, examples: int) -> Callable[[], None]:
    @_fuzzed(examples)
    @given(plan=plans, script=scripts(), added=st.integers(0, 3))
    def leads(plan: list[Any], script: list[Event], added: int) -> None:
        assert_leads_where_adamw_does(implementation.target, plan, script, added, device)

    return leads


def _clipped(implementation: Implementation, device: str, examples: int) -> Callable[[], None]:
    @_fuzzed(examples)
    @given(plan=plans, script=scripts(not_finite=True), added=st.integers(0, 3), most=MOST)
    def leads(plan: list[Any], script: list[Event], added: int, most: float) -> None:
        assert_leads_where_adamw_does(implementation.target, plan, script, added, device, max_grad_norm=most)

    return leads


def _with_master_weights(implementation: Implementation, device: str, examples: int) -> Callable[[], None]:
    clips = implementation.accepts("max_grad_norm")

    @_fuzzed(examples)
    @given(plan=plans, script=scripts(), added=st.integers(0, 3), dtypes=DTYPES, most=st.none() | MOST)
    def leads(plan: list[Any], script: list[Event], added: int, dtypes: Any, most: float | None) -> None:
        options = {"max_grad_norm": most} if clips and most is not None else {}
        assert_leads_where_adamw_does(
            implementation.target, plan, script, added, device, dtypes, master_weights=True, **options
        )

    return leads


def _examples(implementation: Implementation, device: str, examples: int) -> int:
    if interpreted(implementation, device):
        pytest.skip("Triton's interpreter takes seconds for it; in the sweep")
    return examples


@pytest.mark.family("optimizer")
def test_any_training_leads_where_the_plain_one_leads(implementation: Implementation, device: str) -> None:
    _plain(implementation, device, _examples(implementation, device, 25))()


@CLIPPING
def test_any_clipped_training_leads_where_clipping_and_a_step_lead(implementation: Implementation, device: str) -> None:
    _clipped(implementation, device, _examples(implementation, device, 20))()


@MASTER
def test_any_training_of_master_weights_is_float64_training_rounded(
    implementation: Implementation, device: str
) -> None:
    _with_master_weights(implementation, device, _examples(implementation, device, 20))()


@pytest.mark.sweep
@pytest.mark.family("optimizer")
def test_any_of_many_trainings_leads_there(implementation: Implementation, device: str) -> None:
    _plain(implementation, device, 60 if interpreted(implementation, device) else 1000)()


@pytest.mark.sweep
@CLIPPING
def test_any_of_many_clipped_trainings_leads_there(implementation: Implementation, device: str) -> None:
    _clipped(implementation, device, 40 if interpreted(implementation, device) else 500)()


@pytest.mark.sweep
@MASTER
def test_any_of_many_trainings_of_master_weights_leads_there(implementation: Implementation, device: str) -> None:
    _with_master_weights(implementation, device, 40 if interpreted(implementation, device) else 500)()
