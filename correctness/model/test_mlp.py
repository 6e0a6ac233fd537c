"""The MLP language model: against one formula in float64, and its closed forms against the meter."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from impl.accounting.beside import Technique, beside, peak_of_first_step
from impl.accounting.plain import PlainLanguageModel
from impl.checkpointing.accounting import OfMLP
from impl.model.mlp import MLP_SIZES, MLPLanguageModel, MLPSize
from impl.precision import PRECISIONS
from impl.training_step import CheckpointedStep, EagerStep
from impl.training_step.accounting import checkpointed_peak, eager_peak, work
from impl.training_step.cases import STEP_MODES, TrainingStepCase
from shardmark.api import followed
from shardmark.meter.memory import Memory, meter


def plain(w: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Logits by the formula; it shares no layer with the model."""
    x = w["embedding.weight"][tokens]
    for i in range(sum(name.endswith("w1.weight") for name in w)):
        hidden = torch.einsum("btd,hd->bth", x, w[f"blocks.{i}.w1.weight"]) + w[f"blocks.{i}.w1.bias"]
        gelu = hidden * 0.5 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (hidden + 0.044715 * hidden**3)))
        x = x + torch.einsum("bth,dh->btd", gelu, w[f"blocks.{i}.w2.weight"]) + w[f"blocks.{i}.w2.bias"]
    centered = x - x.mean(-1, keepdim=True)
    normed = centered / (centered.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return (normed * w["norm.weight"] + w["norm.bias"]) @ w["output.weight"].T


def test_logits_and_gradients_are_the_formulas_in_float64(device: str) -> None:
    size = MLPSize(dim=12, layers=3, vocab=50)
    model = MLPLanguageModel(size).double().to(device)
    for parameter in model.parameters():  # a norm starts as ones and zeros, which would hide errors
        nn.init.normal_(parameter)
    tokens = torch.randint(size.vocab, (2, 7), device=device)
    weights = torch.randn(2, 7, size.vocab, dtype=torch.float64, device=device)
    w = {name: x.detach().clone().requires_grad_() for name, x in model.named_parameters()}
    found, expected = model(tokens), plain(w, tokens)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, w[name].grad, rtol=1e-10, atol=1e-10, msg=lambda m, name=name: f"{name}: {m}"
        )


@pytest.mark.parametrize("name", MLP_SIZES)
def test_sizes_have_the_parameters_they_say(name: str) -> None:
    with torch.device("meta"):
        model = MLPLanguageModel(MLP_SIZES[name])
    assert sum(p.numel() for p in model.parameters()) == MLP_SIZES[name].parameters


@pytest.mark.parametrize(
    ("tokens", "line"),
    [
        (torch.zeros(3, dtype=torch.int64), r"tokens are \(batch, context\), got \(3,\)"),
        (torch.full((1, 2), 512), "token ids go from 0 to 511, got one that does not"),
    ],
    ids=["shape", "token_id"],
)
def test_wrong_tokens_are_one_line(tokens: Tensor, line: str) -> None:
    with pytest.raises(ValueError, match=f"^{line}$"):
        MLPLanguageModel(MLP_SIZES["mlp-tiny"])(tokens)


def metered(step_class: type[EagerStep], case: TrainingStepCase, steps: int = 3) -> Memory:
    """Phases and peak of the last of `steps` steps."""
    size, precision = MLP_SIZES[case.model], PRECISIONS[case.dtype]
    with meter("cpu") as memory:
        model = MLPLanguageModel(size)
        tokens, targets = (torch.randint(size.vocab, (case.batch, case.context)) for _ in range(2))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        step = step_class(model, optimizer, precision=precision)
        memory.mark("after_init")
        for _ in range(steps - 1):
            step(tokens, targets)
            optimizer.zero_grad()
        memory.mark("before_step")
        memory.reset_peak()
        if case.mode == "step":
            step(tokens, targets, lambda part: memory.mark(f"after_{part}"))
        else:
            loss = step.forward(tokens, targets)
            if case.mode == "forward_backward":
                step.backward(loss)
    return memory


CASES = [
    TrainingStepCase("mlp-tiny", 1, 8),  # peak at the end of backward
    TrainingStepCase("mlp-tiny", 3, 61),  # peak at the loss
    TrainingStepCase("mlp-tiny", 3, 61, "bfloat16"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
@pytest.mark.parametrize("step_class", [EagerStep, CheckpointedStep])
def test_bytes_of_a_step_are_exact(step_class: type[EagerStep], case: TrainingStepCase) -> None:
    memory, technique = metered(step_class, case), Technique() if step_class is EagerStep else OfMLP(case)
    expected = beside(followed(PlainLanguageModel.of(case), "cpu"), technique).marks
    for phase in ("after_init", "before_step", "after_forward", "after_backward"):
        assert memory.phases[phase] == expected[phase], phase
    assert memory.tensors == (eager_peak if step_class is EagerStep else checkpointed_peak)(case)


@pytest.mark.parametrize("case", CASES[:2], ids=str)
def test_the_first_steps_peak_is_lower_as_moments_come_after_activations(case: TrainingStepCase) -> None:
    expected = peak_of_first_step(beside(followed(PlainLanguageModel.of(case), "cpu")))
    few = 16 * MLP_SIZES[case.model].layers  # bytes of scalars that the optimizer's first step allocates and frees
    assert 0 <= metered(EagerStep, case, steps=1).tensors - expected <= few
    assert expected < eager_peak(case)


@pytest.mark.parametrize("mode", STEP_MODES[:2])
def test_peaks_of_parts_are_exact(mode: str) -> None:
    case = replace(CASES[1], mode=mode)
    assert metered(EagerStep, case, steps=1).tensors == eager_peak(case)


def test_flops_are_those_counted() -> None:
    case = TrainingStepCase("mlp-tiny", 2, 16)
    with FlopCounterMode(display=False) as counter:
        loss = MLPLanguageModel(MLP_SIZES[case.model])(torch.zeros(2, 16, dtype=torch.int64)).sum()
        forward = counter.get_total_flops()
        loss.backward()
    assert work(replace(case, mode="forward")).flops == forward
    assert work(case).flops == work(replace(case, mode="forward_backward")).flops == counter.get_total_flops()


def test_checkpointing_leaves_the_blocks_inputs() -> None:
    """A checkpointed block saves only its input: the hidden layer is gone, before and after gelu."""
    case = TrainingStepCase("mlp-4096", 8, 4096)
    size = MLP_SIZES[case.model]
    hidden = 2 * 4 * case.tokens * size.hidden * size.layers
    assert eager_peak(case) - checkpointed_peak(case) == pytest.approx(hidden, rel=1e-5)
