"""Contract of checkpointing, one property per test: equal bits, and names and parameters that stay."""

from __future__ import annotations

import random
from copy import deepcopy
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from correctness.checkpointing.models import (
    SIZE,
    Dropping,
    assert_equal,
    assert_same_bits,
    dropping,
    gradients,
    gradients_of,
    loss_of,
    transformer,
)
from correctness.support.contracts import Note, assert_refused
from correctness.support.global_state import global_state_stays
from correctness.support.own_model import OWN, assert_as_in_one_process, optimizer_of, own_model, train
from impl.checkpointing.contract import claims_to_save
from impl.training_step.workload import checkpointed
from shardmark.api import Implementation, OwnModelCase

pytestmark = pytest.mark.family("checkpointing")


@pytest.fixture
def tokens(device: str) -> Tensor:
    return torch.randint(SIZE.vocab, (2, 13), device=device)


@pytest.fixture
def x(device: str) -> Tensor:
    return torch.randn(6, 8, device=device)


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 7])
def test_gradients_are_bitwise_those_without(
    implementation: Implementation, layers: int, tokens: Tensor, device: str
) -> None:
    plain = transformer(device, layers=layers)
    model = implementation.watched(transformer(device, layers=layers))
    for step in ("", "accumulated, "):
        expected = gradients(plain, tokens)
        assert all(grad is not None and grad.any() for grad in expected.values())
        assert_same_bits(gradients(model, tokens), expected, step)


@pytest.mark.parametrize("trained", ["last", "first", "biases"])
def test_frozen_parameters_stay_without_gradients(
    implementation: Implementation, trained: str, tokens: Tensor, device: str
) -> None:
    """As in fine-tuning: some blocks are frozen, or some parameters of each block."""
    plain, model = transformer(device), implementation.watched(transformer(device))
    for each in (plain, model):
        for name, p in each.named_parameters():
            block = {"last": f"blocks.{SIZE.layers - 1}.", "first": "blocks.0."}.get(trained, "norm")
            p.requires_grad_(block in name)
    assert_same_bits(gradients(model, tokens), gradients(plain, tokens))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("backward_too", [False, True], ids=["forward", "forward_and_backward"])
def test_gradients_under_autocast_are_bitwise_those_without(
    implementation: Implementation, backward_too: bool, dtype: torch.dtype, tokens: Tensor, device: str
) -> None:
    """Backward recomputes in forward's dtype, even outside of autocast, and where it is not autocast's default."""

    def under_autocast(model: nn.Module) -> dict[str, Tensor | None]:
        with torch.autocast(device, dtype=dtype):
            logits = model(tokens)
            loss = logits.float().square().mean()
            if backward_too:
                loss.backward()
        assert logits.dtype == dtype, f"under autocast the output is in {logits.dtype}"
        if not backward_too:
            loss.backward()
        return gradients_of(model)

    expected = under_autocast(transformer(device))
    assert_same_bits(under_autocast(implementation.watched(transformer(device))), expected)


@pytest.mark.parametrize("shared", [True, False], ids=["by two blocks", "by two forwards"])
def test_under_autocast_gradients_of_a_weight_used_twice_add_up_as_without(
    implementation: Implementation, shared: bool, tokens: Tensor, device: str
) -> None:
    """Autocast casts a weight once in a region, so that gradients of all its uses are added up in the narrow dtype;
    a recomputation may cast it again, and add them up in the other."""

    def made() -> nn.Module:
        model = transformer(device)
        first, last = (next(m for m in model.blocks[i].modules() if isinstance(m, nn.Linear)) for i in (0, -1))
        if shared:
            last.weight = first.weight
        return model

    def under_autocast(model: nn.Module) -> dict[str, Tensor | None]:
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = model(tokens).float().square().mean()
            if not shared:
                loss = loss + model(tokens.flip(-1)).float().square().mean()
        loss.backward()
        return gradients_of(model)

    found, expected = under_autocast(implementation.watched(made())), under_autocast(made())
    for name, gradient in expected.items():
        assert gradient is not None
        off = torch.nan if (mine := found[name]) is None else (mine - gradient).abs().max() / gradient.abs().max()
        assert off < torch.finfo(torch.bfloat16).eps, f"the gradient of {name} is off by {off:.2g} of its largest value"


class InPlace(nn.Module):
    """Blocks that change the outputs of their products in place, as residual sums do."""

    class Block(nn.Module):
        def __init__(self, bias: bool) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(8, 8, bias=bias), nn.Linear(8, 8, bias=bias)

        def forward(self, x: Tensor) -> Tensor:
            h = self.up(x)
            h += x
            h = self.down(h.sin())
            h *= 0.5
            return h + x

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(InPlace.Block(bias) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("shape", [(5, 8), (2, 5, 8)], ids=["two dimensions", "three"])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_outputs_of_products_may_be_changed_in_place(
    implementation: Implementation, bias: bool, shape: tuple[int, ...], device: str
) -> None:
    """A policy that keeps them must keep what they were."""
    torch.manual_seed(0)
    plain = InPlace(bias).to(device)
    model, x = implementation.watched(deepcopy(plain)), torch.randn(shape, device=device)
    assert_same_bits(gradients(model, x), gradients(plain, x))


def test_a_deep_copy_computes_with_weights_of_its_own(
    implementation: Implementation, tokens: Tensor, device: str
) -> None:
    """As for a moving average or a reference policy; also where the original is gone."""
    model = implementation.watched(transformer(device))
    copied, alone = deepcopy(model), deepcopy(implementation.watched(transformer(device)))
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    expected = gradients(transformer(device), tokens)
    assert_same_bits(gradients(copied, tokens), expected, "a copy: ")
    assert_same_bits(gradients(alone, tokens), expected, "a copy whose original is gone: ")
    assert all(p.grad is None for p in model.parameters()), "the copy's gradients are the original's"


class Mixing(nn.Module):
    """Blocks that mix over time, of inputs (time, batch, width) whose memory is in another order, as views need it."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix = nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            time, rows, width = x.shape
            mixed = self.mix(x.transpose(0, 1).view(rows, time * width)).tanh()
            return mixed.view(rows, time, width).transpose(0, 1)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Mixing.Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_blocks_are_recomputed_on_inputs_of_the_same_strides(implementation: Implementation, device: str) -> None:
    torch.manual_seed(0)
    plain = Mixing().to(device)
    model = implementation.watched(deepcopy(plain))
    x = torch.randn(2, 3, 4, device=device).transpose(0, 1)
    assert_same_bits(gradients(model, x), gradients(plain, x))


@pytest.mark.parametrize("born", ["train", "eval", "p_0", "without"])
def test_dropout_drops_the_same_again(implementation: Implementation, born: str, x: Tensor, device: str) -> None:
    """Backward recomputes with the random numbers of its own forward, whatever was drawn since.

    `born` is the mode of the model when the policy is applied, or dropout's probability then, or it is put in later, as
    LoRA's is; then it trains.
    """

    def dropped(model: nn.Module) -> dict[str, Tensor | None]:
        torch.manual_seed(1)
        losses = [loss_of(model, x) for _ in range(2)]
        _ = torch.rand(5, device=device), random.random(), np.random.rand()
        with global_state_stays("backward"):
            for i, loss in enumerate(losses):
                (loss / (1 + i)).backward()
        return gradients_of(model)

    model = dropping(device).train(born != "eval")
    dropouts = [(name, part, part.p) for name, part in model.named_modules() if isinstance(part, nn.Dropout)]
    for name, part, p in dropouts:
        part.p = 0.0 if born == "p_0" else p
        model.set_submodule(name, nn.Identity() if born == "without" else part)
    checkpointed = implementation.watched(model).train()
    for name, part, p in dropouts:
        part.p = p
        checkpointed.set_submodule(name, part)
    assert_same_bits(dropped(checkpointed), dropped(dropping(device)))


def test_the_same_model_twice_in_a_graph(implementation: Implementation, x: Tensor, device: str) -> None:
    plain, model = dropping(device).eval(), implementation.watched(dropping(device).eval())
    for each in (plain, model):
        (each(each(x)) + each(x)).square().mean().backward()
    assert_same_bits(gradients_of(model), gradients_of(plain))


def test_in_eval_mode_gradients_are_those_without(implementation: Implementation, tokens: Tensor, device: str) -> None:
    plain, model = transformer(device).eval(), implementation.watched(transformer(device)).eval()
    assert_same_bits(gradients(model, tokens), gradients(plain, tokens))


def test_without_gradients_outputs_are_those_without(
    implementation: Implementation, tokens: Tensor, device: str
) -> None:
    model = implementation.watched(transformer(device)).eval()
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            found, expected = model(tokens), transformer(device)(tokens)
        assert_equal(found, expected, f"the output under {context.__name__}")
        assert not found.requires_grad, f"the output requires a gradient under {context.__name__}"


def test_parameters_stay_the_same_objects(implementation: Implementation, device: str) -> None:
    """An optimizer made before the policy must update them."""
    model = transformer(device)
    model.blocks[1].requires_grad_(False).eval()
    before = [*model.named_parameters()], [*model.blocks], [(p.requires_grad) for p in model.parameters()]
    training = [module.training for module in model.modules()]
    assert implementation.watched(model) is model, "the policy returns another model than it was given"
    for name, p in before[0]:
        assert dict(model.named_parameters()).get(name) is p, f"{name} is not the parameter that it was"
    assert isinstance(model.blocks, nn.ModuleList), f"model.blocks is a {type(model.blocks).__name__} now"
    assert len(model.blocks) == len(before[1]), f"{len(before[1])} blocks became {len(model.blocks)}"
    assert [p.requires_grad for p in model.parameters()] == before[2], "the policy changes requires_grad"
    assert [module.training for module in model.modules()] == training, "the policy changes train() or eval()"


def test_names_and_classes_stay(implementation: Implementation, device: str) -> None:
    plain, model = transformer(device), implementation.watched(transformer(device))
    assert list(model.state_dict()) == list(plain.state_dict()), "the names in state_dict change"
    for (name, mine), (_, theirs) in zip(model.named_modules(), plain.named_modules(), strict=True):
        assert isinstance(mine, type(theirs)), f"{name} was a {type(theirs).__name__}, and is a {type(mine).__name__}"
    for i, theirs in enumerate(plain.blocks):
        assert isinstance(model.blocks[i], type(theirs)), f"block {i} is a {type(model.blocks[i]).__name__}"


def test_forward_hooks_of_blocks_run(implementation: Implementation, tokens: Tensor, device: str) -> None:
    model = transformer(device)
    called: list[int] = []
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda module, inputs, output, i=i: called.append(i))
    implementation.watched(model)(tokens)
    assert called == list(range(SIZE.layers)), f"forward hooks of {SIZE.layers} blocks ran for {called}"


@pytest.mark.should("a model without blocks is a ValueError")
def test_a_model_without_blocks_is_refused(implementation: Implementation, record_property: Note) -> None:
    empty: Any = nn.Module()
    empty.blocks = nn.ModuleList()
    wording = "checkpointing needs `model.blocks`.* has none"
    for model in (nn.Linear(2, 2), empty):
        what = f"a {type(model).__name__} without blocks"
        assert_refused(implementation, what, partial(implementation.watched, model), wording, record_property)


@pytest.mark.should("a model that is checkpointed already is a ValueError")
def test_a_second_policy_is_refused(implementation: Implementation, record_property: Note) -> None:
    """It would recompute everything a second time."""
    if not claims_to_save(implementation.target):
        pytest.skip(f"{implementation} checkpoints nothing, so it may be applied twice")
    call = partial(implementation.watched, implementation.watched(Dropping()))
    assert_refused(implementation, "a second policy", call, "this Dropping is checkpointed already", record_property)


@pytest.mark.cases(OWN)
def test_a_users_own_model_trains_as_without(implementation: Implementation, case: OwnModelCase, device: str) -> None:
    """Losses and parameters are equal to the bit."""
    own = own_model(case, device, 0)
    model = checkpointed(implementation, own, case)
    optimizer = optimizer_of(case, own)(list(model.parameters()))
    assert_as_in_one_process([train(model, case, device, model.named_parameters, optimizer)], case, device, close=0)
