"""The training step's implementations against the eager one: results, compiled graphs, and a user's own model."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from correctness.support.own_model import OWN, Trained, assert_as_in_one_process, on_cpu, optimizer_of, own_model
from correctness.support.own_model import STEPS as OWN_STEPS
from correctness.support.training import STEPS, Results, assert_as_accurate_as_eager, trained
from correctness.training_step.stepping import SIZE, batch
from impl.model.mlp import MLPLanguageModel
from impl.precision import PRECISIONS, Precision
from impl.training_step import CompileModel, CompileStep
from impl.training_step.compiled import OPTIONS, CompileAllOptions, CompileEpilogueFusion, CompileNoOptions
from shardmark.api import OwnModelCase
from shardmark.api.registry import FAMILIES, Implementation, Unsupported

WIDE = Precision(torch.float64, torch.float64, torch.float64)


def _setting(device: str) -> tuple[nn.Module, Tensor, Tensor]:
    """A model, tokens and targets."""
    return MLPLanguageModel(SIZE).to(device), *batch(device, (2, 8))


def _trained(
    implementation: Implementation, model: nn.Module, tokens: Tensor, targets: Tensor, precision: Precision
) -> Results:
    """Results of training a copy of the model with SGD."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)  # AdamW would make rounding of a gradient near zero large
    return trained(implementation.watched(model, optimizer, precision=precision), model, optimizer, tokens, targets)


@pytest.mark.family("training_step")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_gradients_and_parameters_are_those_of_eager(
    implementation: Implementation, dtype: str, device: str
) -> None:
    model, tokens, targets = _setting(device)
    eager = FAMILIES["training_step"].implementations["eager"]
    exact = _trained(eager, copy.deepcopy(model).double(), tokens, targets, WIDE)
    expected = _trained(eager, model, tokens, targets, PRECISIONS[dtype])
    found = _trained(implementation, model, tokens, targets, PRECISIONS[dtype])
    assert_as_accurate_as_eager(found, expected, exact, PRECISIONS[dtype].compute)


GRAPHS = {"compile_model": 1, "compile_forward_backward": 2, "compile_step": 1}
"""Graphs with a fused optimizer, which the compiler leaves alone."""


@pytest.mark.compiled_every_time("compile_step")
@pytest.mark.family("training_step", only=tuple(GRAPHS))
def test_compiles_in_the_first_step_alone(implementation: Implementation, device: str) -> None:
    if implementation.name not in GRAPHS:
        pytest.skip("its graphs are its own")
    torch._dynamo.reset()
    counters.clear()
    model, tokens, targets = _setting(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    step = implementation.watched(model, optimizer, precision=PRECISIONS["float32"])
    first = step(tokens, targets)
    graphs, captures = counters["stats"]["unique_graphs"], counters["compiled_autograd"]["captures"]
    assert graphs == GRAPHS[implementation.name]
    assert captures == (implementation.name == "compile_forward_backward")
    for _ in range(STEPS):
        optimizer.zero_grad()
        last = step(tokens, targets)
    assert counters["stats"]["unique_graphs"] == graphs and counters["compiled_autograd"]["captures"] == captures
    assert last < first / 2  # a compiled update that forgets the optimizer's state, or the gradients, learns nothing


def test_compile_step_takes_no_float16() -> None:
    model = MLPLanguageModel(SIZE)
    with pytest.raises(Unsupported, match=r"^compile_step takes no float16"):
        CompileStep(model, torch.optim.SGD(model.parameters()), precision=PRECISIONS["float16"])


def test_options_say_all_of_what_they_turn_on_and_off() -> None:
    assert set(CompileNoOptions.options) == set(OPTIONS) and not any(CompileNoOptions.options.values())
    assert [name for name, on in CompileEpilogueFusion.options.items() if on] == ["epilogue_fusion"]
    assert all(CompileAllOptions.options.values())
    assert CompileModel.options is None
    assert set(OPTIONS) <= set(torch._inductor.list_options())  # or the compiler would not know them


@pytest.mark.family("training_step", option="loss", only=("eager", *GRAPHS))
@pytest.mark.cases(OWN)
def test_a_users_own_model_trains_as_in_one_process(
    implementation: Implementation, case: OwnModelCase, device: str
) -> None:
    own = own_model(case, device, 0)
    recipe = case.recipe
    count = recipe.micro_batches
    if count > 1 and not getattr(implementation.target, "accumulates", True):
        pytest.skip(f"{implementation} takes one batch a step")
    optimizer = optimizer_of(case, own)(list(own.module.parameters()))

    def clip(*_: Any) -> None:
        if recipe.clip is not None:
            nn.utils.clip_grad_norm_(own.module.parameters(), recipe.clip)

    optimizer.register_step_pre_hook(clip)
    step = implementation.watched(
        own.module, optimizer, precision=WIDE, loss=lambda model, batch, targets: own.loss(model, *batch) / count
    )
    losses = []
    for i in range(OWN_STEPS):
        optimizer.zero_grad()
        losses.append(0.0)
        for micro_batch in range(i * count, (i + 1) * count):
            inputs = own_model(case, device, 0, micro_batch).batch
            torch.manual_seed(1000 * micro_batch)
            last = micro_batch == (i + 1) * count - 1
            loss = step(inputs, None) if last else step.forward(inputs, None)
            if not last:
                step.backward(loss)
            losses[-1] += loss.item()
    found = Trained(losses, on_cpu(own.module.named_parameters()))
    assert_as_in_one_process([found], case, device, float(torch.finfo(torch.float32).eps))
