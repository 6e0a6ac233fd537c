"""User errors around our sharded optimizer: each gives a one-line error on every rank and changes nothing."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Adam

from correctness.sharded_optimizer.sharding import parameters, raised, set_gradients
from impl.optim import AdamW, TorchFused
from impl.sharded_optimizer import ShardedOptimizer
from shardmark.ranks.world import World


def faults(device: str) -> dict[str, str]:
    """Return what each user error raises on this rank."""
    rank, last = dist.get_rank(), dist.get_rank() == dist.get_world_size() - 1
    p, q = parameters(device, (4,), (2, 2))
    p.grad = torch.full_like(p, rank + 1.0)
    found = {"not averaged": raised(ShardedOptimizer([p], Adam).step)}
    p.grad = torch.full_like(p, 1.0 if rank else -1.0)
    found["mirrored"] = raised(ShardedOptimizer([p], Adam).step)
    q.grad = torch.zeros_like(q)
    q.grad[int(last)] = 1.0
    found["of another token"] = raised(ShardedOptimizer([q], Adam).step)
    q.grad = None
    p.grad = None if last else torch.ones_like(p)
    found["missing on one"] = raised(ShardedOptimizer([p], Adam).step)
    p.grad = None

    for what, mine in {"shape": parameters(device, (5,))[0], "number": None}.items():
        params = [q, p] if not last else [q, mine] if mine is not None else [q]
        found[what] = raised(lambda params=params: ShardedOptimizer(params, Adam))

    embedding = nn.Embedding(4, 2, sparse=True).to(device)
    optimizer = ShardedOptimizer(embedding.parameters(), Adam, average_gradients=True)
    tokens = torch.ones(1, dtype=torch.int64, device=device)
    found["sparse"] = raised(lambda: embedding(tokens).sum().backward())

    optimizer = ShardedOptimizer([q], Adam, average_gradients=True)
    found["twice"] = raised(lambda: [q.sum().backward() for _ in range(2)])
    with optimizer.no_sync():
        found["twice, then in no_sync"] = raised(q.sum().backward)
    optimizer.zero_grad()
    found["thrown away"] = raised(lambda: q.sum().backward())
    optimizer.step()

    model = nn.Linear(2, 2).to(device)
    optimizer = ShardedOptimizer(model.parameters(), Adam)
    model.double()
    found["moved"] = raised(optimizer.step)
    return found


def test_faults_are_one_line_on_every_rank(pair: World, device: str) -> None:
    says = {
        "not averaged": "RuntimeError: the ranks' gradients differ (rank 0 has 1 of norm 2; rank 1 has 1 of norm 4): "
        "average them before step(), or make the optimizer with average_gradients=True",
        "mirrored": "RuntimeError: the ranks' gradients differ (rank 0 has 1 of norm 2; rank 1 has 1 of norm 2, in "
        "other directions): average them before step(), or make the optimizer with average_gradients=True",
        "of another token": "RuntimeError: the ranks' gradients differ (rank 0 has 1 of norm 1.41421; rank 1",
        "missing on one": "RuntimeError: the ranks' gradients differ (rank 0 has 1 of norm 2; rank 1 has 0 of norm 0)",
        "shape": "ValueError: the ranks' parameters differ at index 1: (4,) of torch.float64, trainable on rank 0, "
        "(5,) of torch.float64, trainable on rank 1",
        "number": "ValueError: the ranks' parameters differ: 2 parameters on rank 0, 1 on rank 1",
        "sparse": "ValueError: gradients must be dense, and that of a parameter of shape (4, 2) is torch.sparse_coo",
        "twice": "RuntimeError: backward ran twice before step(); run all but the last in no_sync()",
        "twice, then in no_sync": "RuntimeError: backward ran twice before step(); run all but the last in no_sync()",
        "thrown away": "nothing",
        "moved": "RuntimeError: a parameter of shape (2,) is no longer where the optimizer keeps it",
    }
    for found in pair.run(faults, device):
        assert list(found) == list(says)
        for fault, line in found.items():
            assert line.startswith(says[fault]) and "\n" not in line, fault


def load_wrong(device: str) -> tuple[list[str], bool]:
    """Load another model's state; return what that raises and whether the optimizer is unchanged."""
    params = parameters(device, (4,), (2, 3))
    optimizer = ShardedOptimizer(params, Adam, lr=0.5)
    set_gradients(params, 0)
    optimizer.step()
    good = optimizer.state_dict()
    others = [
        *(
            good | {"state": good["state"] | {1: good["state"][1] | {"exp_avg": torch.ones(shape)}}}
            for shape in ((3, 2), (1,), (1, 1), ())
        ),
        good | {"param_groups": [good["param_groups"][0] | {"params": [0], "lr": 0.1}]},
        {"model": {}},
    ]
    lines = [raised(lambda other=other: optimizer.load_state_dict(other)) for other in others]
    after = optimizer.state_dict()
    same = all(torch.equal(after["state"][i][name], value) for i in (0, 1) for name, value in good["state"][i].items())
    return lines, same and after["param_groups"] == good["param_groups"]


def test_another_models_state_is_one_line_and_nothing_is_loaded(world: World, device: str) -> None:
    for lines, unchanged in world.run(load_wrong, device):
        another = "ValueError: the state is of another model: "
        *of_shape, groups, other = lines
        assert of_shape == [
            another + f"'exp_avg' of parameter 1 has shape {shape}, and the parameter (2, 3)"
            for shape in ((3, 2), (1,), (1, 1), ())
        ]
        assert groups == another + "its groups have [1] parameters, the optimizer's [2]"
        assert other == "ValueError: this is no optimizer's state: it has no 'state', but ['model']"
        assert unchanged


@pytest.mark.parametrize(
    ("optimizer", "options", "says"),
    [
        (torch.optim.Adafactor, {}, "Adafactor needs more than one rank's elements"),
        (torch.optim.LBFGS, {}, "LBFGS needs more"),
        (TorchFused, {"bucket_mb": 0}, "bucket_mb is a positive number of megabytes, not 0"),
        (AdamW, {"max_grad_norm": 1.0}, "max_grad_norm needs more"),
    ],
)
def test_what_cannot_be_sharded_is_an_error(
    optimizer: type[torch.optim.Optimizer], options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        ShardedOptimizer([nn.Parameter(torch.ones(1))], optimizer, **options)
