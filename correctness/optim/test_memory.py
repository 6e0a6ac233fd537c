"""Steps after the first allocate nothing that stays, whatever changes from step to step."""

from typing import Any

import pytest
import torch

from correctness.optim.training import leaves, saved, tensors
from shardmark.api import Implementation
from shardmark.meter.memory import meter

pytestmark = [pytest.mark.family("optimizer"), pytest.mark.usefixtures("poisoned")]

CHANGES = ("nothing", "arguments", "gradients", "clipping", "loading", "weights", "graphs")
STEPS = 5
"""Steps that are measured; three others come before."""


@pytest.mark.parametrize("changes", CHANGES)
def test_steps_after_the_first_keep_nothing_more(implementation: Implementation, changes: str, device: str) -> None:
    options: dict[str, Any] = {}
    if changes == "clipping":
        if not implementation.accepts("max_grad_norm"):
            pytest.skip(f"{implementation} has no option max_grad_norm")
        options["max_grad_norm"] = 1.0
    params = leaves(tensors(device, torch.float32, ((1000,), (30, 40), (300,))))
    optimizer = implementation.watched([{"params": params[:2]}, {"params": params[2:]}], **options)

    def step(i: int) -> None:
        group = optimizer.param_groups[i % 2]
        if changes in ("arguments", "clipping"):
            rate = 1 / (i + 2)
            group.update(lr=rate, betas=(0.5 + rate / 4, 0.9 + rate / 20), eps=1e-8 * rate, weight_decay=rate / 10)
        if changes == "loading" and i > 1:
            optimizer.load_state_dict(saved(optimizer))
        for k, p in enumerate(params):
            if changes == "weights":
                p.data = torch.full_like(p, i)
            has = changes != "gradients" or not 3 <= i < 7 or (i + k) % 3
            p.grad = torch.full_like(p, 1 + i) if has else None
            if changes == "graphs":  # as after `backward(create_graph=True)`
                p.grad = p.detach().requires_grad_().square()
        optimizer.step()
        optimizer.zero_grad()

    with meter(device) as memory:
        for i in range(3 + STEPS):
            step(i)
            memory.mark(str(i))
    more = memory.phases[str(2 + STEPS)] - memory.phases["2"]
    what = "" if changes == "nothing" else f" with other {changes} each time"
    assert more < STEPS, f"steps 4 to {3 + STEPS}{what} leave {more} more bytes behind, {more // STEPS} each"
