"""Is it right: on one rank, and averaged over several?"""

import pytest
import torch
import torch.distributed as dist
from training import at_once, make_model


def gradients(step):
    """Gradients after one step of a model; model and rows are the same in each call."""
    torch.manual_seed(0)
    model, x = make_model(8).double(), torch.randn(12, 8, dtype=torch.float64)
    step(model, x)
    return [p.grad for p in model.parameters()]


@pytest.mark.family("step")
def test_gradients_are_those_of_all_rows_at_once(implementation):
    torch.testing.assert_close(gradients(implementation.target), gradients(at_once))


def averaged_over_ranks():
    """Runs on every rank: a gradient of each rank's own rows, averaged."""
    model = make_model(8)
    at_once(model, torch.full((2, 8), float(dist.get_rank())))
    gradient = next(model.parameters()).grad
    dist.all_reduce(gradient, op=dist.ReduceOp.SUM)
    return gradient / dist.get_world_size()


def test_ranks_agree(world):
    first, *others = world.run(averaged_over_ranks)
    for other in others:
        assert torch.equal(first, other)
