"""A training step's side effects: what it must not change, the marks of its parts, and inputs that it refuses."""

import copy
import traceback
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from correctness.support.global_state import global_state_stays
from correctness.training_step.stepping import SIZE, batch, setting, values
from impl.model.mlp import MLPLanguageModel
from impl.precision import PRECISIONS
from shardmark.api import Implementation
from shardmark.meter.memory import meter

pytestmark = pytest.mark.family("training_step")


def test_frozen_parameters_stay_and_those_that_are_not_used(implementation: Implementation, device: str) -> None:
    model = MLPLanguageModel(SIZE)
    model.embedding.requires_grad_(False)
    model.integers = nn.Parameter(torch.arange(3, dtype=torch.int8), requires_grad=False)  # as a quantized weight
    model.unused = nn.Parameter(torch.ones(3))
    of = setting(implementation, device, model=model, lr=0.1)
    before = values(of.model)
    of.step(of.tokens, of.targets)
    assert not model.embedding.weight.requires_grad, "embedding.weight was frozen, and is trainable after a step"
    for name in ("embedding.weight", "integers", "unused"):
        p = model.get_parameter(name)
        assert torch.equal(p, before[name]), f"{name} has changed"
        assert p.grad is None or not p.grad.any(), f"{name} has a gradient"
    assert not torch.equal(model.output.weight, before["output.weight"]), "output.weight has not changed"


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_parameters_keep_their_dtype_and_their_place(
    implementation: Implementation, precision: str, device: str
) -> None:
    """Parameters are still those that the optimizer updates, and gradients have their dtype."""
    products = torch.get_float32_matmul_precision()
    of = setting(implementation, device, precision, lr=0.1)
    inputs = of.tokens.clone(), of.targets.clone()
    of.step(of.tokens, of.targets)
    updated = {id(p) for group in of.optimizer.param_groups for p in group["params"]}
    for name, p in of.model.named_parameters():
        assert p.dtype == torch.float32, f"{name} was of torch.float32, and is of {p.dtype} after a step"
        assert p.grad is not None and p.grad.dtype == p.dtype, f"{name} has no gradient of its dtype"
        assert id(p) in updated, f"{name} is no longer the parameter that the optimizer updates"
    assert torch.equal(of.tokens, inputs[0]) and torch.equal(of.targets, inputs[1]), "the batch has changed"
    assert not torch.is_autocast_enabled(device), "autocast is still on after the step"
    assert torch.get_float32_matmul_precision() == products, "the precision of all float32 products has changed"


@pytest.mark.should("hooks of parameters run, as wrappers have them")
def test_hooks_of_parameters_see_their_gradients(implementation: Implementation, device: str) -> None:
    """Data-parallel wrappers wait for gradients in such hooks, and some optimizers step in them."""
    of = setting(implementation, device)
    ready: dict[str, bool] = {}
    for name, p in of.model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: ready.update({name: p.grad is not None}))
    of.step.backward(of.step.forward(of.tokens, of.targets))
    for name, _ in of.model.named_parameters():
        assert ready.get(name), f"backward has no gradient for {name} when its hook runs, or does not run it"


class Recomputing(nn.Module):
    """Logits of large blocks over few tokens, so that casts of weights are most of what forward could leave. Each block
    runs under PyTorch's checkpoint if it `recomputes`."""

    def __init__(self, recomputes: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SIZE.vocab, 256)
        self.blocks = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))
        self.recomputes = recomputes

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.recomputes else block(x)
        return x[..., : SIZE.vocab]


@pytest.mark.should("blocks that recompute under autocast leave no casts of their weights until backward ends")
def test_blocks_that_recompute_need_no_more_memory(implementation: Implementation, device: str) -> None:
    """Inside of any other autocast, PyTorch's cache keeps what blocks cast again in backward."""
    peaks = []
    for recomputes in (False, True):
        of = setting(implementation, device, "bfloat16", Recomputing(recomputes))
        for _ in range(2):  # the first step makes workspaces and the optimizer's state
            of.optimizer.zero_grad()
            with meter(device) as memory:
                of.step(of.tokens, of.targets)
        peaks.append(memory.peak)
    assert peaks[1] <= 1.05 * peaks[0], (
        f"a step whose blocks recompute has {peaks[1]:,} bytes at its peak, and one whose blocks do not {peaks[0]:,}"
    )


class Norms(nn.Module):
    """A batch norm of the last dimension."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, x: Tensor) -> Tensor:  # (batch, context, dim)
        return self.norm(x.flatten(0, 1)).view_as(x)


def test_buffers_of_blocks_change_once_in_a_forward_without_backward(
    implementation: Implementation, device: str
) -> None:
    model = MLPLanguageModel(SIZE)
    for block in model.blocks:
        block.gelu = nn.Sequential(block.gelu, Norms(SIZE.hidden))
    plain = copy.deepcopy(model).to(device)
    of = setting(implementation, device, model=model)
    of.step.forward(of.tokens, of.targets)
    plain(of.tokens)
    for name, expected in plain.named_buffers():
        found = of.model.get_buffer(name)
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6), f"{name} is {found}, expected {expected}"


def test_the_random_state_is_the_callers(implementation: Implementation, device: str) -> None:
    of = setting(implementation, device, lr=0.1)
    with global_state_stays("a step of a model without dropout"):
        of.step(of.tokens, of.targets)


@pytest.mark.should("`mark` is called as each part ends")
def test_parts_mark_their_end(implementation: Implementation, device: str) -> None:
    of = setting(implementation, device, lr=0.1)
    before = values(of.model)
    marks: dict[str, tuple[bool, bool]] = {}

    def mark(part: str) -> None:
        weight = of.model.get_parameter("output.weight")
        marks[part] = weight.grad is not None, not torch.equal(weight, before["output.weight"])

    of.step(of.tokens, of.targets, mark)
    assert list(marks) in (["forward", "backward", "optimizer"], ["step"]), (
        f"mark was called with {list(marks)}, expected 'forward', 'backward' and 'optimizer', or 'step'"
    )
    for part, (has_gradient, is_updated) in marks.items():
        assert has_gradient == (part != "forward"), (
            f"when {part!r} was marked there were {'' if has_gradient else 'no '}gradients"
        )
        assert is_updated == (part in ("optimizer", "step")), (
            f"when {part!r} was marked the parameters were {'updated already' if is_updated else 'not updated yet'}"
        )


@pytest.mark.should("parameters of another precision are a ValueError")
@pytest.mark.compiled_every_time
def test_parameters_of_another_precision_are_refused(implementation: Implementation, device: str) -> None:
    model = MLPLanguageModel(SIZE).to(device, torch.bfloat16)
    with pytest.raises(ValueError, match=r"^[^\n]+$"):
        implementation.watched(model, torch.optim.SGD(model.parameters()), precision=PRECISIONS["float32"])(
            *batch(device)
        )


def raised_by_compiled_code(error: Exception) -> bool:
    dynamo = Path(torch._dynamo.__file__).parent
    return any(dynamo in Path(frame.filename).parents for frame in traceback.extract_tb(error.__traceback__))


@pytest.mark.should("targets that the vocabulary lacks are an error")
@pytest.mark.parametrize("wrong", [SIZE.vocab, -1, -99, -101])
def test_wrong_targets_are_refused(implementation: Implementation, wrong: int, device: str) -> None:
    """By ValueError in eager code; compiled code raises errors of its own."""
    if device == "cuda":
        pytest.skip("on CUDA the device's own assertion would end the process")
    of = setting(implementation, device)
    of.targets[1, 2] = wrong
    what = f"target {wrong} of a vocabulary of {SIZE.vocab}"
    try:
        loss = of.step(of.tokens, of.targets)
    except ValueError:
        return
    except Exception as error:
        if not raised_by_compiled_code(error):
            pytest.fail(f"{what} raised {type(error).__name__}, expected ValueError; it said: {error}")
        return
    pytest.fail(f"{what} gave a loss of {loss.item():.4g}, expected an error")
