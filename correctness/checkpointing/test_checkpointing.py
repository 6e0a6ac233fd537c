"""Activation checkpointing: the same gradients to the bit, from the bytes and the FLOPs that the closed forms say."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from impl.accounting.programs.transformer import TransformerStep
from impl.accounting.strategies.checkpointing import Recursive
from impl.attention import FlashAttentionPyTorch, as_attention, eager_attention, sdpa
from impl.checkpointing import every, full, none, recursive, selective
from impl.checkpointing.accounting import POLICIES, segment_length
from impl.model import SIZES, Transformer, TransformerSize
from impl.training_step.cases import TrainingStepCase
from perf.workloads.training_step import CheckpointedStep
from shardmark.memory import Memory, meter
from shardmark.registry import Implementation, RegistryError, check_contract, family, resolve

SIZE = TransformerSize(d_model=24, d_ff=64, layers=5, heads=2, vocab=50)
DEPTHS = [1, 2, 3, 5, 7]

Policy = Callable[[nn.Module], nn.Module]


def transformer(device: str, **changes: Any) -> Transformer:
    torch.manual_seed(0)
    return Transformer(replace(SIZE, **changes), context_length=16).to(device)


def gradients(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    model(inputs).float().square().mean().backward()
    found = [parameter.grad for parameter in model.parameters()]
    assert all(grad is not None and grad.abs().max() > 0 for grad in found)
    return [grad for grad in found if grad is not None]


def same_bits(mine: list[Tensor], theirs: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.fixture
def tokens(device: str) -> Tensor:
    return torch.randint(SIZE.vocab, (2, 13), device=device)


@pytest.mark.family("checkpointing")
@pytest.mark.parametrize("layers", DEPTHS)
def test_gradients_are_bitwise_those_without(
    implementation: Implementation, layers: int, tokens: Tensor, device: str
) -> None:
    plain = transformer(device, layers=layers)
    model = implementation.adapted(transformer(device, layers=layers))
    for _ in range(2):  # gradients accumulate as they do without
        expected = gradients(plain, tokens)
        assert same_bits(gradients(model, tokens), expected)


@pytest.mark.family("checkpointing")
@pytest.mark.parametrize("backward_too", [False, True], ids=["forward", "forward_and_backward"])
def test_gradients_under_autocast_are_bitwise_those_without(
    implementation: Implementation, backward_too: bool, tokens: Tensor, device: str
) -> None:
    def under_autocast(model: nn.Module) -> list[Tensor]:
        with torch.autocast(device, dtype=torch.bfloat16):
            logits = model(tokens)
            loss = logits.float().square().mean()
            if backward_too:
                loss.backward()
        assert logits.dtype == torch.bfloat16
        if not backward_too:
            loss.backward()
        return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]

    expected = under_autocast(transformer(device))
    assert same_bits(under_autocast(implementation.adapted(transformer(device))), expected)


class Dropping(nn.Module):
    """Blocks of another kind, which draw random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.GELU(), nn.Linear(8, 8)) for _ in range(5)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.family("checkpointing")
def test_any_module_with_blocks_is_taken_and_what_they_drop_is_dropped_again(
    implementation: Implementation, device: str
) -> None:
    x = torch.randn(6, 8, device=device)

    def dropped(policy: Policy) -> list[Tensor]:
        torch.manual_seed(0)
        return gradients(policy(Dropping().to(device)), x)

    assert same_bits(dropped(implementation.adapted), dropped(none))


class Adding(Dropping):
    """Does something between its blocks."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@pytest.mark.parametrize("policy", [full, every(2), selective])
def test_what_a_model_does_between_blocks_is_left_alone(policy: Policy) -> None:
    x, model = torch.randn(6, 8), Adding().eval()
    expected = gradients(model, x)
    model.zero_grad()
    assert same_bits(gradients(policy(model), x), expected)


def test_segments_of_a_model_that_does_something_between_blocks_are_one_line() -> None:
    with pytest.raises(ValueError, match=r"^recursive checkpointing runs blocks in segments[^\n]+$"):
        recursive(Adding())(torch.randn(6, 8))


@pytest.mark.family("checkpointing")
def test_names_classes_and_hooks_stay(implementation: Implementation, tokens: Tensor, device: str) -> None:
    plain, model = transformer(device), transformer(device)
    called: list[int] = []
    for i, block in enumerate(model.blocks):
        block.register_forward_hook(lambda module, inputs, output, i=i: called.append(i))
    assert implementation.adapted(model) is model
    assert list(model.state_dict()) == list(plain.state_dict()) and repr(model) == repr(plain)
    assert [(name, type(m).__name__) for name, m in model.named_modules()] == [
        (name, type(m).__name__) for name, m in plain.named_modules()
    ]
    assert all(isinstance(model.blocks[i], type(plain.blocks[i])) for i in range(SIZE.layers))
    model.load_state_dict(plain.state_dict())
    with torch.no_grad():
        assert torch.equal(model.eval()(tokens), plain(tokens))
    assert called == list(range(SIZE.layers))


@pytest.mark.parametrize("policy", [none, full, every(2), recursive, selective])
def test_a_model_without_blocks_is_one_line(policy: Policy) -> None:
    empty = nn.Module()
    empty.blocks = nn.ModuleList()
    for model in (nn.Linear(2, 2), empty):
        with pytest.raises(ValueError, match=r"^checkpointing needs `model.blocks`[^\n]+ has none$"):
            policy(model)


@pytest.mark.parametrize("first", [full, every(2), recursive, selective])
@pytest.mark.parametrize("second", [none, full, every(2), recursive, selective])
def test_a_second_policy_is_one_line(first: Policy, second: Policy) -> None:
    model = first(Dropping())
    with pytest.raises(ValueError, match=r"^this Dropping is checkpointed already[^\n]+$"):
        second(model)


@pytest.mark.parametrize("n", [0, 1.5, "2"])
def test_every_n_of_no_whole_number_is_one_line(n: Any) -> None:
    with pytest.raises(ValueError, match=rf"^every n-th block is checkpointed, with n from 1 on, got {n!r}$"):
        every(n)


def test_a_dtype_without_a_closed_form_is_one_line() -> None:
    with pytest.raises(ValueError, match=r"^checkpointing's bytes have a closed form in float32, not in bfloat16$"):
        POLICIES["full"].peak(TrainingStepCase("tiny", 2, 32, "bfloat16"))


@pytest.mark.parametrize(
    ("source", "complaint"),
    [
        ("policy = 3", "3 is not callable; a policy is policy(model) -> model"),
        ("def policy(model): pass", "it does not return the model that it was given"),
        (
            "import torch\ndef policy(model):\n"
            "    model.blocks = torch.nn.ModuleList(map(torch.nn.Sequential, model.blocks))\n    return model",
            "it changes the names in the model's state_dict or the classes of its blocks",
        ),
    ],
)
def test_what_is_not_a_policy_is_told_so(source: str, complaint: str, tmp_path: Any) -> None:
    path = tmp_path / "mine.py"
    path.write_text(source)
    entry = resolve("checkpointing", f"{path}:policy")
    with pytest.raises(RegistryError, match=f"^[^\n]+{re.escape(complaint)}$"):
        check_contract(entry, "cpu")


@contextmanager
def sized(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Iterator[str]:
    """The name of a size that there is for a while."""
    with monkeypatch.context() as patch:
        patch.setitem(SIZES, "passing", replace(SIZE, **changes))
        yield "passing"


@pytest.mark.parametrize("layers", DEPTHS)
@pytest.mark.parametrize("name", POLICIES)
def test_recomputed_flops_are_those_counted(name: str, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def counted(policy: str) -> int:
        model = Transformer(replace(SIZE, layers=layers), context_length=16, attention=eager_attention)
        with FlopCounterMode(display=False) as counter:
            family("checkpointing").implementations[policy].target(model)(tokens).sum().backward()
        return counter.get_total_flops()

    tokens = torch.zeros(2, 13, dtype=torch.int64)
    with sized(monkeypatch, layers=layers) as model:
        case = TrainingStepCase(model, *tokens.shape)
        but_for_last, whole = POLICIES[name].again(case)
        # The counter sees eager attention, whole; the formula counts half of it, as it is causal.
        masked = 2 * tokens.numel() * tokens.shape[1] * SIZE.d_model * (but_for_last + whole)
        assert counted(name) - counted("none") == POLICIES[name].recomputed(case) + masked


class Calls(TorchDispatchMode):
    """Counts what is called of each operator."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[Any] = Counter()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[function.overloadpacket] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_selective_computes_no_product_and_no_attention_again_and_all_the_rest(
    attention: str, tokens: Tensor, device: str
) -> None:
    def calls(policy: Policy) -> Counter[Any]:
        target = family("attention").implementations[attention].target
        model = policy(Transformer(SIZE, context_length=16, attention=target).to(device))
        with Calls() as counted:
            gradients(model, tokens)
        return counted.of

    aten = torch.ops.aten
    everything, kept = calls(none), calls(selective)
    products = [op for op in everything if any(part in str(op) for part in ("mm", "attention"))]
    assert aten.mm in products and len(products) == (3 if attention == "sdpa" else 2)
    assert all(kept[op] == everything[op] for op in products)
    assert (everything[aten.silu], kept[aten.silu]) == (SIZE.layers, 2 * SIZE.layers)
    assert kept[aten.rsqrt] == everything[aten.rsqrt] + 2 * SIZE.layers


def test_selective_keeps_no_tile_of_an_autograd_function() -> None:
    """Its products are its own, and to keep each of them would take memory quadratic in the context."""

    def kept(attention: Any) -> int:
        size = replace(SIZE, layers=1)
        with meter("cpu") as memory:
            model = selective(Transformer(size, context_length=600, attention=as_attention(attention)))
            tokens = torch.zeros(1, 600, dtype=torch.int64)
            memory.mark("before")
            logits = model(tokens)
            memory.mark("after")
        assert logits.requires_grad
        return memory.phases["after"] - memory.phases["before"]

    assert kept(FlashAttentionPyTorch) < kept(sdpa)


@pytest.mark.sweep
@pytest.mark.family("checkpointing")
def test_traced_in_one_graph_gradients_are_those_without(
    implementation: Implementation, tokens: Tensor, device: str
) -> None:
    expected = gradients(transformer(device), tokens)
    model = implementation.adapted(transformer(device))
    torch.compile(model, backend="aot_eager", fullgraph=True)(tokens).float().square().mean().backward()
    for parameter, theirs in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, theirs, rtol=1e-4, atol=1e-6)


def step_memory(name: str, case: TrainingStepCase) -> Memory:
    """The meter's view of a step; "forward" is what forward leaves."""
    with meter("cpu") as memory:
        step = CheckpointedStep(family("checkpointing").implementations[name], case, "cpu")
        step.step(lambda part: None)  # the optimizer's state comes with the first
        step.prepare()
        memory.mark("before")
        memory.reset_peak()
        step.step(memory.mark)
    return memory


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(
    ("changes", "batch", "context"),
    [
        ({"layers": 5}, 3, 33),  # the largest moment is SwiGLU's product
        ({"layers": 8, "d_model": 8, "d_ff": 32}, 3, 90),  # the same in the last block, as inputs outweigh gradients
        ({"layers": 4, "vocab": 1000}, 2, 30),  # it is the loss
        ({"layers": 1, "d_model": 32, "d_ff": 96}, 1, 200),
        ({"layers": 3, "d_model": 60, "d_ff": 151, "heads": 3, "vocab": 121}, 3, 9),  # it is W1's backward
        ({"layers": 2, "d_model": 40, "heads": 4, "vocab": 200}, 1, 5),  # it is the embedding
    ],
    ids=["product", "last_product", "loss", "one_block", "w1", "embedding"],
)
def test_kept_and_peak_bytes_are_the_formulas_to_the_byte(
    name: str, changes: dict[str, int], batch: int, context: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sized(monkeypatch, **changes) as model:
        case = TrainingStepCase(model, batch, context)
        memory = step_memory(name, case)
        assert memory.phases["forward"] - memory.phases["before"] == POLICIES[name].kept(case)
        assert memory.tensors == POLICIES[name].peak(case)


@pytest.mark.parametrize("model", ["medium", "large", "xl"])
def test_each_policy_saves_what_it_is_for(model: str) -> None:
    case = TrainingStepCase(model, batch=4, context=2048)
    kept, peak, flops = (
        {name: getattr(policy, form)(case) for name, policy in POLICIES.items()}
        for form in ("kept", "peak", "recomputed")
    )
    assert kept["recursive"] < kept["full"] < kept["every_2"] < kept["selective"] < kept["none"]
    assert peak["recursive"] == peak["full"] < peak["every_2"] < peak["selective"] < peak["none"]
    assert flops["none"] == flops["selective"] == 0 < flops["every_2"] < flops["full"] < flops["recursive"]


@pytest.mark.parametrize(("tokens", "saves"), [(15, False), (17, True)])
def test_recursive_lowers_the_peak_where_a_block_has_a_larger_input_than_gradients(
    tokens: int, saves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block leaves gradients of 16 d^2 where f is 4 d, and takes its input of T d away, as backward passes."""
    with sized(monkeypatch, d_model=128, d_ff=512, layers=100, vocab=100) as model:
        case = TrainingStepCase(model, batch=128, context=tokens)
        assert (POLICIES["recursive"].peak(case) < POLICIES["full"].peak(case)) == saves


class CountingInputs(Recursive):
    """Counts the most inputs of blocks that are there as a block goes backward."""

    most = 0

    def enter_backward(self, unit: int) -> None:
        super().enter_backward(unit)
        live = self.ledger.live.entries
        inputs = (live.get("residual stream", 0) + live.get("embedding output", 0)) // self.step.residual_bytes
        self.most = max(self.most, inputs - 1)  # one lies between attention and the feed-forward


@pytest.mark.parametrize("layers", [*range(1, 40), 1000])
def test_recursive_keeps_no_more_than_two_roots_of_the_inputs(layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with sized(monkeypatch, layers=layers) as model:
        case = TrainingStepCase(model, 1, 1)
        strategy = CountingInputs(segment_length(layers))
        TransformerStep(case, strategy).run()
        most = strategy.most - 1  # beside the block's own
        segments = -(-layers // segment_length(layers))
        assert most == segments + min(segment_length(layers), layers) - 2 or layers % segment_length(layers)
        assert most + 1 <= 2 * layers**0.5
