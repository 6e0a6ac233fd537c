"""Mixed precision: dtypes, models and optimizers that do not go together, and what a skipped step warns of."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from impl.optim import AdamW
from impl.precision import FLOAT32, PRECISIONS, Precision
from impl.training_step import EagerStep

F16, BF16, F32, F64 = torch.float16, torch.bfloat16, torch.float32, torch.float64
MASTER = Precision(F16, F16, F16, master=F32)


@pytest.mark.parametrize(
    ("dtypes", "line"),
    [
        ({"parameter": torch.int64}, "parameter is torch.float16, bfloat16, float32 or float64, got torch.int64"),
        ({"compute": "bfloat16"}, "compute is torch.float16, bfloat16, float32 or float64, got bfloat16"),
        (
            {"parameter": torch.float8_e5m2, "compute": torch.float8_e5m2},
            "parameter is torch.float16, bfloat16, float32",
        ),
        ({"compute": F16, "reduction": BF16}, "float16 and bfloat16 do not mix"),
        ({"parameter": F64, "compute": BF16}, "compute is the parameters' own dtype, or float16 or bfloat16"),
        ({"parameter": BF16}, "compute is the parameters' own dtype, or float16 or bfloat16"),
        ({"compute": F64}, "compute is the parameters' own dtype, or float16 or bfloat16"),
        ({"master": BF16}, "master weights are at least as wide as the parameters"),
        ({"parameter": F16, "compute": F16}, "float16 parameters need master weights"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_dtypes_that_do_not_go_together_are_one_line(dtypes: dict[str, torch.dtype], line: str) -> None:
    with pytest.raises(ValueError, match=rf"^{line}[^\n]*$"):
        Precision(**dtypes)


def test_the_named_precisions_and_their_words() -> None:
    assert FLOAT32 == PRECISIONS["float32"] == Precision()
    assert str(PRECISIONS["bfloat16"]) == "parameter float32, compute bfloat16, reduction float32, master None"
    for name, precision in PRECISIONS.items():
        assert precision.scaler("cpu").is_enabled() == (name == "float16")
    assert PRECISIONS["bfloat16_parameters"].parameter == BF16


@pytest.mark.parametrize("name", PRECISIONS)
def test_products_are_in_the_compute_dtype(name: str, device: str) -> None:
    precision = PRECISIONS[name]
    layer = nn.Linear(4, 4, bias=False, device=device, dtype=precision.parameter)
    with precision.autocast(device):
        assert layer(torch.ones(2, 4, device=device, dtype=precision.parameter)).dtype == precision.compute


@pytest.mark.parametrize(
    ("optimizer", "precision", "line"),
    [
        (
            torch.optim.SGD,
            Precision(BF16, BF16),
            "the model's parameters are torch.float16, and the precision's torch.bfloat16$",
        ),
        (torch.optim.SGD, MASTER, "master weights are the optimizer's to keep, and SGD keeps none"),
        (partial(AdamW, master_weights=True), MASTER, "float16 parameters need an optimizer that unscales"),
    ],
    ids=["dtype", "no_master_weights", "nobody_unscales"],
)
def test_a_model_or_optimizer_that_does_not_fit_is_one_line(optimizer: Any, precision: Precision, line: str) -> None:
    model = nn.Embedding(3, 3, dtype=F16)
    with pytest.raises(ValueError, match=rf"^{line}[^\n]*$"):
        EagerStep(model, optimizer(model.parameters()), precision=precision)


def test_a_target_that_the_vocabulary_does_not_have_is_one_line() -> None:
    model = nn.Embedding(7, 7)
    tokens, targets = _batch("cpu")
    targets[1, 2] = 7
    with pytest.raises(ValueError, match=r"^targets go from 0 to 6, or are -100 to be ignored, got another$"):
        EagerStep(model, torch.optim.SGD(model.parameters()))(tokens, targets)


def _batch(device: str) -> tuple[Tensor, Tensor]:
    tokens = torch.arange(12, device=device).reshape(2, 6) % 7
    return tokens, (tokens + 1) % 7


def test_the_warning_of_a_skipped_float16_step_has_both_scales(device: str) -> None:
    model = nn.Embedding(7, 7, device=device)
    step = EagerStep(model, torch.optim.SGD(model.parameters()), precision=PRECISIONS["float16"])
    model.weight.register_hook(lambda grad: torch.full_like(grad, torch.inf))
    scale = step.scaler.get_scale()
    line = f"the step is skipped, the loss is scaled by {scale / 2:g} from here on, where it was {scale:g}"
    with pytest.warns(RuntimeWarning, match=rf"^float16 gradients overflowed: {line}$"):
        step(*_batch(device))
    assert step.scaler.get_scale() == scale / 2
