"""Errors call each known mistake by its name."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.attention import accuracy as of_attention
from correctness.attention.mistakes import mistakes as attention_mistakes
from correctness.layers import accuracy as of_layers
from correctness.layers.mistakes import mistakes as layers_mistakes
from correctness.layers.operations import random_inputs
from correctness.loss import accuracy as of_loss
from correctness.loss.mistakes import mistakes as loss_mistakes
from correctness.optim import training as of_optim
from correctness.optim.mistakes import mistakes as optim_mistakes

OPTIONS: dict[str, Any] = {"label_smoothing": 0.1, "z_loss": 1e-3}
ARGUMENTS: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-3}


def attentions() -> Iterator[tuple[str, AssertionError]]:
    torch.manual_seed(0)
    q, grad = torch.randn(2, 2, 4, 29, 16, dtype=torch.float64)
    k, v = torch.randn(2, 2, 2, 37, 16, dtype=torch.float64)
    for is_causal in (True, False):
        for name, wrong in attention_mistakes(q, k, is_causal).items():
            if is_causal and "whole" in name:
                continue  # the mask hides them: this is no mistake of so few queries
            found = of_attention.results(wrong, [q, k, v, grad], is_causal)
            with pytest.raises(AssertionError) as caught:
                of_attention.assert_accurate(found, [q, k, v, grad], is_causal)
            yield name, caught.value


def layers() -> Iterator[tuple[str, AssertionError]]:
    torch.manual_seed(0)
    for operation in ("add_rms_norm", "swiglu", "rotary"):
        inputs = random_inputs(operation, 5, 8, "cpu", torch.float64)
        inputs = replace(inputs, eps=0.1)
        for name, wrong in layers_mistakes(inputs).items():
            with pytest.raises(AssertionError) as caught:
                of_layers.assert_accurate(wrong(inputs), inputs)
            yield name, caught.value


def losses() -> Iterator[tuple[str, AssertionError]]:
    torch.manual_seed(0)
    inputs = of_loss.random_inputs(33, 8, 20, "cpu", torch.float64)
    inputs.targets[:5] = -100
    for name, wrong in loss_mistakes(inputs.targets, OPTIONS).items():
        with pytest.raises(AssertionError) as caught:
            of_loss.assert_as_accurate_as_eager(wrong, inputs, **OPTIONS)
        yield name, caught.value


def steps_of_adamw() -> Iterator[tuple[str, AssertionError]]:
    torch.manual_seed(0)
    start, *grads = torch.randn(6, 3, 4, dtype=torch.float64)
    for name, wrong in optim_mistakes(start, grads, ARGUMENTS).items():
        result = wrong()

        class AfterItsSteps(torch.optim.SGD):
            """Has the mistake's result, whatever the gradients."""

            def step(self, closure: Any = None, result: Tensor = result) -> None:
                self.param_groups[0]["params"][0].data.copy_(result)

        with pytest.raises(AssertionError) as caught:
            of_optim.assert_as_accurate_as_plain(
                lambda params, **_: AfterItsSteps(params), [start], [[grad] for grad in grads], **ARGUMENTS
            )
        yield name, caught.value


@pytest.mark.parametrize("family", [attentions, layers, losses, steps_of_adamw], ids=lambda each: each.__name__)
def test_a_known_mistake_is_called_by_its_name(family: Any) -> None:
    seen = dict(family())
    assert len(seen) >= 6
    assert {name: str(error).rpartition("; it is that ")[2] for name, error in seen.items()} == {n: n for n in seen}
