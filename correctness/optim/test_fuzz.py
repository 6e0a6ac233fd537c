"""Any training leads where the plain AdamW leads: Hypothesis chooses parameters, groups, gradients and what happens
between steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from correctness.engine.examples import fuzzed
from correctness.optim.events import LAYOUTS, Event, plans, scripts
from correctness.optim.scripts import assert_leads_where_adamw_does
from correctness.optim.training import interpreted
from shardmark.api import Implementation

MANY = 500

DTYPES = st.lists(
    st.sampled_from((torch.bfloat16, torch.float16, torch.float32, torch.float64)), min_size=1, max_size=3
).map(lambda some: (torch.bfloat16, *some))
WIDTHS = (torch.bfloat16, torch.float32, torch.float64)
MOST = st.sampled_from((0.1, 1.0, 1e6))


def layouts(implementation: Implementation) -> tuple[str, ...]:
    """torch's fused AdamW takes gradients laid out as their parameters; on CPU it misreads others."""
    return LAYOUTS[:1] if implementation.name == "torch_fused" else LAYOUTS


def fewer_where_interpreted(implementation: Implementation, examples: int, device: str) -> int:
    if not interpreted(implementation, device):
        return examples
    if examples < MANY:
        pytest.skip("Triton's interpreter takes seconds for it; in the sweep")
    return examples // 15


@pytest.mark.examples(12, 80, 1000)
@pytest.mark.family("optimizer")
def test_any_training_leads_where_the_plain_one_leads(
    implementation: Implementation, examples: int, device: str
) -> None:
    some = layouts(implementation)

    @fuzzed(fewer_where_interpreted(implementation, examples, device))
    @given(plan=plans, script=scripts(layouts=some), added=st.integers(0, 3), layout=st.sampled_from(some))
    def leads(plan: list[Any], script: list[Event], added: int, layout: str) -> None:
        assert_leads_where_adamw_does(implementation.target, plan, script, added, device, layout=layout)

    leads()


@pytest.mark.examples(16, 50, 500)
@pytest.mark.family("optimizer", option="max_grad_norm")
def test_any_clipped_training_leads_where_clipping_and_a_step_lead(
    implementation: Implementation, examples: int, device: str
) -> None:
    some = layouts(implementation)

    @fuzzed(fewer_where_interpreted(implementation, examples, device))
    @given(plan=plans, script=scripts(not_finite=True, layouts=some), added=st.integers(0, 3), most=MOST)
    def leads(plan: list[Any], script: list[Event], added: int, most: float) -> None:
        assert_leads_where_adamw_does(implementation.target, plan, script, added, device, max_grad_norm=most)

    leads()


@pytest.mark.examples(16, 50, 500)
@pytest.mark.family("optimizer", option="master_weights")
def test_any_training_of_master_weights_is_float64_training_rounded(
    implementation: Implementation, examples: int, device: str
) -> None:
    clips = implementation.accepts("max_grad_norm")

    some = layouts(implementation)

    @fuzzed(fewer_where_interpreted(implementation, examples, device))
    @given(plan=plans, script=scripts(layouts=some), added=st.integers(0, 3), dtypes=DTYPES, most=st.none() | MOST)
    def leads(plan: list[Any], script: list[Event], added: int, dtypes: Any, most: float | None) -> None:
        options = {"max_grad_norm": most} if clips and most is not None else {}
        assert_leads_where_adamw_does(
            implementation.target, plan, script, added, device, dtypes, master_weights=True, **options
        )

    leads()


@pytest.mark.examples(10, 30, 300)
@pytest.mark.family("optimizer")
def test_any_training_in_bfloat16_is_that_but_for_its_rounding(
    implementation: Implementation, examples: int, device: str
) -> None:
    """Without master weights: step counts are right, what has no gradient stays, and values are near float64's."""
    some = layouts(implementation)

    @fuzzed(fewer_where_interpreted(implementation, examples, device))
    @given(plan=plans, script=scripts(layouts=some), added=st.integers(0, 3), dtypes=st.permutations(WIDTHS))
    def leads(plan: list[Any], script: list[Event], added: int, dtypes: Any) -> None:
        assert_leads_where_adamw_does(implementation.target, plan, script, added, device, tuple(dtypes), rtol=0.2)

    leads()
