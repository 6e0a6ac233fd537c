"""Errors of wrapping, and of steps after which the ranks would differ."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from torch import nn

from correctness.data_parallel.averaging import wrap
from correctness.support.contracts import is_ours
from correctness.support.whole_batch import error_line
from shardmark.api import Implementation, family
from shardmark.plugin import WorldsBySize
from shardmark.ranks.world import RankError, World

Raised = tuple[str, str]
"""Name of the exception's class (or "nothing") and its text."""


def _wrapping(implementation: Implementation, module: nn.Module) -> Raised:
    """Return the error of wrapping, caught on the rank so that the world survives."""
    try:
        wrap(implementation, module)
    except Exception as error:
        return "ValueError" if isinstance(error, ValueError) else type(error).__name__, str(error)
    return "nothing", ""


def _assert_value_errors(implementation: Implementation, ranks: list[Raised], of: str) -> None:
    for rank, (kind, text) in enumerate(ranks):
        assert kind == "ValueError", f"wrapping {of} raises {kind} on rank {rank}, and not ValueError: {text}"
        assert "\n" not in text or not is_ours(implementation)


def wrap_frozen(implementation: Implementation, device: str) -> Raised:
    return _wrapping(implementation, nn.Linear(2, 2).requires_grad_(False).to(device))


@pytest.mark.should("a module with nothing to train is a ValueError")
@pytest.mark.family("data_parallel")
def test_a_module_with_nothing_to_train_is_refused(implementation: Implementation, world: World, device: str) -> None:
    ranks = world.run(wrap_frozen, implementation, device)
    _assert_value_errors(implementation, ranks, "a module with no trainable parameter")
    assert not is_ours(implementation) or all("no trainable parameters" in text for _, text in ranks)


def wrap_different(implementation: Implementation, device: str, how: str) -> Raised:
    last = dist.get_rank() == dist.get_world_size() - 1
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 5 if last and how == "shape" else 4)).to(device)
    if last and how == "dtype":
        module[0].bias = nn.Parameter(module[0].bias.detach().double())
    if last and how == "missing":
        module[1].bias = None
    if last and how == "frozen":
        module[1].weight.requires_grad_(False)
    if how == "several" and dist.get_rank() > 0:  # the last rank differs at an earlier parameter
        module[0 if last else 1].weight.requires_grad_(False)
    return _wrapping(implementation, module)


@pytest.mark.should("modules that differ between ranks are a ValueError on each, with the first parameter that does")
@pytest.mark.family("data_parallel")
@pytest.mark.parametrize(
    ("how", "first"),
    [
        ("shape", "1.weight"),
        ("dtype", "0.bias"),
        ("missing", "1.bias"),
        ("frozen", "1.weight"),
        ("several", "0.weight"),
    ],
)
def test_modules_that_differ_are_named_by_their_first_parameter(
    implementation: Implementation, world: World, how: str, first: str, device: str
) -> None:
    if world.size == 1:
        pytest.skip("one rank cannot differ from another")
    try:
        ranks = world.run(wrap_different, implementation, device, how)
    except RankError as error:
        if error.hung:
            pytest.fail(
                f"wrapping modules that differ first at {first!r} ({how}) hangs, and raises no ValueError: {error}"
            )
        raise
    _assert_value_errors(implementation, ranks, f"modules that differ first at {first!r} ({how})")
    for rank, (_, text) in enumerate(ranks):
        assert first in text, f"the error on rank {rank} does not name {first!r}, the first that differs: {text}"


def backward_twice(implementation: Implementation, in_no_sync: bool, device: str) -> str:
    model = wrap(implementation, nn.Linear(2, 2).to(device))
    model(torch.ones(1, 2, device=device)).sum().backward()
    with model.no_sync() if in_no_sync else nullcontext():
        return error_line(RuntimeError, model(torch.ones(1, 2, device=device)).sum().backward)


@pytest.mark.parametrize("in_no_sync", [False, True], ids=["synchronizing", "no_sync"])
@pytest.mark.parametrize("name", ["overlapped", "bucketed"])
def test_a_second_backward_before_synchronizing_is_an_error(
    name: str, in_no_sync: bool, world: World, device: str
) -> None:
    """An error inside `no_sync` too: backward would add to gradients whose all-reduce is in flight."""
    for line in world.run(backward_twice, family("data_parallel").implementations[name], in_no_sync, device):
        assert "backward ran twice before finish_gradient_synchronization()" in line


def sparse_gradient(implementation: Implementation, device: str) -> str:
    model = wrap(implementation, nn.Embedding(4, 2, sparse=True).to(device))
    return error_line(ValueError, model(torch.ones(1, dtype=torch.int64, device=device)).sum().backward)


@pytest.mark.parametrize("name", ["flat", "bucketed"])
def test_a_sparse_gradient_is_one_line_where_gradients_share_a_tensor(name: str, world: World, device: str) -> None:
    for line in world.run(sparse_gradient, family("data_parallel").implementations[name], device):
        assert "gradients must be dense, and that of a parameter of shape (4, 2) is torch.sparse_coo" in line


def step_without_synchronizing(implementation: Implementation, device: str) -> list[str]:
    """Return the optimizer step's errors for each way to leave gradients unaveraged."""
    model = wrap(implementation, nn.Linear(2, 2).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(1, 2, device=device)

    def backward() -> None:
        model(x).sum().backward()

    lines = []
    backward()
    lines.append(error_line(RuntimeError, optimizer.step))
    model.finish_gradient_synchronization()
    optimizer.step()  # the gradients are averaged now
    optimizer.zero_grad()
    with model.no_sync():
        backward()
        model.finish_gradient_synchronization()  # no effect here
    lines.append(error_line(RuntimeError, optimizer.step))
    optimizer.zero_grad()
    optimizer.step()  # the gradients are gone
    torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1).step()  # another model's optimizer
    backward()
    model.finish_gradient_synchronization()
    optimizer.step()
    return lines


@pytest.mark.parametrize("name", ["naive", "flat", "overlapped", "bucketed"])
def test_a_step_on_gradients_that_were_not_synchronized_is_an_error(name: str, world: World, device: str) -> None:
    for lines in world.run(step_without_synchronizing, family("data_parallel").implementations[name], device):
        assert len(lines) == 2
        for line in lines:
            assert "'weight'" in line and "call finish_gradient_synchronization()" in line


def steps(implementation: Implementation, device: str, more_on_rank_0: int) -> None:
    model = wrap(implementation, nn.Linear(2, 2).to(device))
    for _ in range(1 + (more_on_rank_0 if dist.get_rank() == 0 else 0)):
        model(torch.ones(1, 2, device=device)).sum().backward()
        model.finish_gradient_synchronization()


def test_a_different_number_of_steps_is_reported_with_the_stack(worlds: WorldsBySize, device: str) -> None:
    bucketed = family("data_parallel").implementations["bucketed"]
    worlds(2).run(steps, bucketed, device, 0)
    with pytest.raises(RankError, match=r"rank 0 of 2 had not answered after") as caught:
        worlds(2).run(steps, bucketed, device, 1, deadline=2)
    assert "finish_gradient_synchronization" in str(caught.value) and "rank 1 of 2 finished" in str(caught.value)
