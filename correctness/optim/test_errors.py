"""Arguments, parameters and gradients that an optimizer refuses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.optim.training import assert_near, train
from impl.optim import AdamW
from shardmark.api.finding import RegistryError
from shardmark.api.registry import Implementation, check_contract, resolve

pytestmark = pytest.mark.family("optimizer")


def _parameter(**options: Any) -> list[Tensor]:
    return [torch.ones(3, requires_grad=True, **options)]


ONE_LINE = r"\A[^\n]+\Z"

BAD: dict[str, dict[str, Any]] = {
    "lr": {"lr": -1.0},
    "eps": {"eps": -1.0},
    "weight_decay": {"weight_decay": -1.0},
    "beta1": {"betas": (1.0, 0.9)},
    "beta2": {"betas": (0.9, -0.1)},
}


@pytest.mark.should("lr, eps, weight_decay and betas out of range are a ValueError")
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments_are_a_value_error(implementation: Implementation, name: str, device: str) -> None:
    with pytest.raises(ValueError, match=ONE_LINE):
        implementation.watched(_parameter(device=device), **BAD[name])


@pytest.mark.should("no parameters are a ValueError")
def test_no_parameters_are_a_value_error(implementation: Implementation, device: str) -> None:
    with pytest.raises(ValueError, match=ONE_LINE):
        implementation.watched([])


def test_a_sparse_gradient_is_an_error_or_what_it_stands_for(implementation: Implementation, device: str) -> None:
    start = torch.ones(3, device=device, dtype=torch.float64)
    grad = torch.tensor([1.0, 0.0, 2.0], device=device, dtype=torch.float64)
    twice = torch.tensor([[0, 2, 2]], device=device), grad[[0, 0, 0]]  # as for a token that occurs twice in a batch
    p = start.clone().requires_grad_()
    try:
        optimizer = implementation.watched([p])
        repeated = torch.sparse_coo_tensor(*twice, size=(3,), check_invariants=True)
        for sparse in (grad.to_sparse(), repeated, (0 * grad).to_sparse()):  # the last has no entries, and is zero
            p.grad = sparse
            optimizer.step()
    except Exception:
        return
    expected = train(AdamW, [start], [[grad], [grad], [0 * grad]])[0]
    assert_near(p.detach(), expected, 1e-12, "a parameter with a sparse gradient")


@pytest.mark.should("complex parameters are an error, or updated as torch's AdamW does")
def test_complex_parameters_are_an_error_or_pairs(implementation: Implementation, device: str) -> None:
    """Pairs of real and imaginary part, as in torch's AdamW. Many optimizers do neither."""
    start = torch.tensor([1 + 1j, 2 - 1j], device=device, dtype=torch.complex128)
    grad = torch.tensor([3 + 4j, 1 + 0j], device=device, dtype=torch.complex128)
    try:
        (found,) = train(implementation.watched, [start], [[grad]] * 2)
    except Exception:
        return
    pairs = train(AdamW, [torch.view_as_real(start)], [[torch.view_as_real(grad)]] * 2)[0]
    assert_near(torch.view_as_real(found), pairs, 1e-9, "a complex parameter")


@pytest.mark.parametrize(
    ("attribute", "says"),
    [("a_function", "makes None, and no torch.optim.Optimizer"), ("Sgd", "two steps from 1 down x² led to")],
)
def test_what_is_not_adamw_is_told(attribute: str, says: str, tmp_path: Any, device: str) -> None:
    mine = tmp_path / f"mine_{attribute}.py"
    mine.write_text(
        "import torch\ndef a_function(params, **arguments): pass\n"
        "class Sgd(torch.optim.SGD):\n"
        "    def __init__(self, params, lr, betas, eps, weight_decay): super().__init__(params, lr)\n"
    )
    with pytest.raises(RegistryError, match=says):
        check_contract(resolve("optimizer", f"{mine}:{attribute}"), device)
