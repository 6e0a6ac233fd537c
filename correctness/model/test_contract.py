"""Contract of the language model, one property per test: every implementation against the reference, in float64."""

from dataclasses import replace
from itertools import combinations, product

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from correctness.model.language_models import CLOSE, CONTEXT, SIZE, assert_logits, copy_weights, draw, models
from correctness.support.contracts import Note, assert_refused, left_by, skip_if_slow
from correctness.support.default_dtype import default_dtype
from correctness.support.global_state import global_state_stays
from impl.model import PlainTransformer, TransformerSize
from shardmark.api import Implementation

pytestmark = pytest.mark.family("model")

ROUNDED = 0.1
"""Relative error of logits in bfloat16: many times what rounding gives."""

LARGE = replace(SIZE, vocab=2054)
"""float16 has no odd integers above 2,048, bfloat16 none above 256."""

float64 = pytest.mark.usefixtures("in_float64")


SIZES = {
    "three_layers": SIZE,
    "one_layer": TransformerSize(d_model=24, d_ff=40, layers=1, heads=2, vocab=50),
    "one_head": TransformerSize(d_model=10, d_ff=7, layers=2, heads=1, vocab=11),
    "head_dim_2": TransformerSize(d_model=10, d_ff=33, layers=2, heads=5, vocab=3),
    "wider_than_a_block": TransformerSize(d_model=1040, d_ff=1100, layers=1, heads=13, vocab=1030),
}


@float64
@pytest.mark.parametrize("size", SIZES.values(), ids=list(SIZES))
def test_logits_are_the_plain_models(implementation: Implementation, size: TransformerSize, device: str) -> None:
    model, plain = models(implementation, device, size)
    tokens = draw(device, size=size)
    assert_logits(model(tokens), plain(tokens))


@float64
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_small_activations(implementation: Implementation, dtype: torch.dtype, device: str) -> None:
    """Activations whose mean square is below the norm's epsilon (1e-5), which goes under the root. Another one makes
    about half of the logits, and roundings a hundredth."""
    model, plain = models(implementation, device)
    with torch.no_grad():
        for each in (model, plain):
            each.get_parameter("embedding.weight").mul_(1e-3)
            each.to(dtype)
    tokens, tolerance = draw(device), 1e-5 if dtype == torch.float64 else ROUNDED
    assert_logits(model(tokens), plain.double()(tokens), tolerance, f", of small activations in {dtype},")


@float64
@pytest.mark.parametrize("size", [40, 1000], ids=["in_the_thousands", "in_the_millions"])
def test_large_scores(implementation: Implementation, size: int, device: str) -> None:
    """Scores whose exponentials overflow float64, and that outweigh any finite number added as a mask."""
    model, plain = models(implementation, device)
    with torch.no_grad():
        for each in (model, plain):
            for i in range(SIZE.layers):
                for name in ("query", "key"):
                    each.get_parameter(f"blocks.{i}.attention.{name}.weight").mul_(size)
    tokens = draw(device)
    assert_logits(model(tokens), plain(tokens), where=", of large scores,")


@float64
@pytest.mark.parametrize(
    "weights", ["any_weights", "some_are_zero", "frozen_blocks", *(f"some_frozen_{i}" for i in range(8))]
)
def test_gradients_are_the_plain_models(implementation: Implementation, weights: str, device: str) -> None:
    """A weight of zero has a gradient, too: some start training at zero. Blocks before frozen
    ones train, and each parameter trains whichever others are frozen."""
    model, plain = models(implementation, device)
    for name, p in model.named_parameters():
        in_blocks, drawn = name.startswith(("blocks.1.", "blocks.2.")), bool(torch.randint(2, ()))
        p.requires_grad_("frozen" not in weights or not (in_blocks if weights == "frozen_blocks" else drawn))
    if weights == "some_are_zero":
        with torch.no_grad():
            for p in plain.parameters():
                p.flatten()[::3] = 0
        copy_weights(plain, model)
    tokens = draw(device)
    of_logits = torch.randn(*tokens.shape, SIZE.vocab, device=device)
    for each in (model, plain):
        (each(tokens) * of_logits).sum().backward()
    for name, p in plain.named_parameters():
        found = model.get_parameter(name).grad
        needs = model.get_parameter(name).requires_grad
        assert (found is not None) == needs, f"{name} has {'no' if needs else 'a'} gradient"
        if found is None:
            continue
        error = (found - p.grad).norm() / p.grad.norm()
        assert error < CLOSE, f"the gradient of {name} has a relative error of {error.item():.2g}, allowed {CLOSE}"


@float64
def test_weights_may_be_given_for_one_call(implementation: Implementation, device: str) -> None:
    """`functional_call` puts tensors that autograd computed in place of the parameters: gradients flow through them."""
    model, plain = models(implementation, device)
    halves = {name: p.detach().div(2).requires_grad_() for name, p in plain.named_parameters()}
    weights, tokens = list(halves.values()), draw(device)
    found, expected = (
        functional_call(each, {name: 3 * p for name, p in halves.items()}, (tokens,)) for each in (model, plain)
    )
    assert_logits(found, expected, where=" of weights given for one call")
    for name, of_model, of_plain in zip(
        halves,
        torch.autograd.grad(found.square().sum(), weights, allow_unused=True),
        torch.autograd.grad(expected.square().sum(), weights),
        strict=True,
    ):
        assert of_model is not None, f"{name}, given for one call, has no gradient"
        error = (of_model - of_plain).norm() / of_plain.norm()
        assert error < CLOSE, f"the gradient of {name}, given for one call, has a relative error of {error.item():.2g}"


@float64
def test_another_model_that_is_cast_changes_nothing(implementation: Implementation, device: str) -> None:
    """A table that models of one size share would be rounded with it."""
    model, plain = models(implementation, device)
    tokens = draw(device)
    for dtype in (torch.bfloat16, torch.float32):
        implementation.watched(SIZE, context_length=CONTEXT).to(device, dtype)(tokens)
        assert_logits(model(tokens), plain(tokens), where=f" beside another model that was cast to {dtype}")


@float64
@pytest.mark.parametrize("context", [1024, 2049])
def test_a_long_context(implementation: Implementation, context: int, device: str) -> None:
    model, plain, tokens = _of_long_context(implementation, context, device)
    with torch.no_grad():
        skip_if_slow(implementation, lambda share: model(tokens[:, : context // share]), device)
        assert_logits(model(tokens), plain(tokens), where=f" of {context} tokens")


@pytest.mark.parametrize(
    ("dtype", "how"),
    [
        *product((torch.bfloat16, torch.float16), ("converted", "made_in_it", "made_and_called_in_it")),
        (torch.float32, "converted"),
    ],
    ids=str,
)
def test_a_long_context_is_as_accurate_in_every_dtype(
    implementation: Implementation, dtype: torch.dtype, how: str, device: str
) -> None:
    """Each model's error against float64: positions or angles rounded to half precision would be far off. A model is
    converted to a dtype, or made while that is torch's default, or made and called while it is."""
    scores, times = (4.0, 1.5) if dtype.itemsize == 2 else (2.0, 4.0)  # beside float64, angles in float32 are rounded
    with default_dtype(torch.float32 if how == "converted" else dtype):
        model, plain, tokens = _of_long_context(implementation, 700, device, scores)
    plain.to(dtype)
    with torch.no_grad():
        of_plain = plain(tokens).double()
        exact = plain.double()(tokens)
        with default_dtype(dtype if how == "made_and_called_in_it" else torch.float32):
            skip_if_slow(implementation, lambda share: model(tokens[:, : -(-700 // share)]), device)
            logits = model.to(dtype)(tokens)
        error, of_plain = ((x.double() - exact).abs() for x in (logits, of_plain))
    found, of_plain = error.mean().item(), of_plain.mean().item()
    assert found <= times * of_plain, (
        f"logits of 700 tokens in {dtype} are off by {found:.2g} on average, the plain model's by {of_plain:.2g}: "
        "are positions or angles rounded?"
    )


def _of_long_context(
    implementation: Implementation, context: int, device: str, scores: float = 2.0
) -> tuple[nn.Module, nn.Module, Tensor]:
    """Models with large scores, so that positions matter."""
    size = TransformerSize(d_model=32, d_ff=16, layers=1, heads=2, vocab=20)
    model, plain = models(implementation, device, size, context)
    with torch.no_grad():
        for each, name in product((model, plain), ("query", "key")):
            each.get_parameter(f"blocks.0.attention.{name}.weight").mul_(scores)
    return model, plain, draw(device, 1, context, size)


@float64
def test_float64_is_float64_throughout(implementation: Implementation, device: str) -> None:
    """A float32 and a bfloat16 model of this size are made first: no cache may be shared across dtypes."""
    size, context = TransformerSize(d_model=28, d_ff=8, layers=1, heads=2, vocab=20), 19
    tokens = draw(device, context=context, size=size)
    torch.set_default_dtype(torch.float32)
    for dtype in (torch.bfloat16, torch.float32):
        implementation.watched(size, context_length=context).to(device, dtype)(tokens)
    torch.set_default_dtype(torch.float64)
    model, plain = models(implementation, device, size, context)
    assert_logits(model(tokens), plain(tokens), 1e-11, " of a model made in float64")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_logits_have_the_parameters_dtype(implementation: Implementation, dtype: torch.dtype, device: str) -> None:
    """The error is at most a few roundings of the dtype per layer. Token ids are beyond the integers that it has."""
    model, plain = models(implementation, device, LARGE)
    tokens = draw(device, size=LARGE)
    expected = plain.double()(tokens)
    model(tokens)  # fills caches, which the conversion must convert too
    logits = model.to(dtype)(tokens)
    assert logits.dtype == dtype, f"logits are {logits.dtype} where the parameters are {dtype}"
    assert_logits(logits, expected, max(1e-6, 16 * torch.finfo(dtype).eps), f" in {dtype}")


@pytest.mark.parametrize("between", [torch.bfloat16, torch.float16], ids=str)
def test_a_model_that_was_in_half_precision_has_exact_positions(
    implementation: Implementation, between: torch.dtype, device: str
) -> None:
    """Weights are rounded and stay so; what the model computes itself, such as the angles of positions, is not."""
    model, plain = models(implementation, device, context_length=300)
    model.to(between).to(torch.float32)
    copy_weights(model, plain)
    tokens = draw(device, 1, 300)
    with torch.no_grad():
        assert_logits(model(tokens), plain(tokens), 1e-4, f" after {str(between).removeprefix('torch.')} and back")


def test_random_numbers_are_the_callers(implementation: Implementation, device: str) -> None:
    """Weights follow the seed that the caller has set; neither making a model nor calling one sets another."""
    made = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        model = implementation.watched(SIZE, context_length=CONTEXT).to(device)
        made.append((torch.cat([p.detach().flatten() for p in model.parameters()]), torch.rand(4)))
    (weights, after), (others, others_after) = made
    assert not torch.equal(weights, others), "models made after torch.manual_seed(1) and (2) have equal weights"
    assert not torch.equal(after, others_after), "random numbers after making a model do not follow the caller's seed"
    tokens = draw(device)
    with global_state_stays("a call of a model without dropout"):
        model(tokens)


def test_contexts_of_many_lengths_keep_little(implementation: Implementation, device: str) -> None:
    """Tables for the longest context may stay; a mask for each length adds up to all memory there is."""
    model, _ = models(implementation, device, context_length=256)

    def call(*lengths: int) -> None:
        with torch.no_grad():
            for length in lengths:
                model(draw(device, 1, length))

    left = left_by(lambda: call(256, 255), lambda: call(*range(226, 255)), device)
    assert left < 2 * 256 * 256, f"29 contexts of other lengths, whose logits are gone, leave {left:,} bytes behind"


def test_positions_under_autocast_are_not_rounded_to_it(implementation: Implementation, device: str) -> None:
    """bfloat16 has 8 bits: position 300 would be 300 ± 1, an angle of a full radian, and token 300 another one."""
    size = TransformerSize(d_model=16, d_ff=16, layers=1, heads=1, vocab=LARGE.vocab)
    model, plain = models(implementation, device, size, context_length=320)
    with torch.no_grad():
        for each in (model, plain):
            for name in ("query", "key", "value", "output"):
                each.get_parameter(f"blocks.0.attention.{name}.weight").mul_(8)
        tokens = draw(device, 1, 320, size)
        with torch.autocast(device, dtype=torch.bfloat16):
            found = model(tokens)
        expected = plain(tokens)
    error = ((found.float() - expected).norm() / expected.norm()).item()
    assert error < ROUNDED, f"under autocast the logits' relative error is {error:.2g}, allowed {ROUNDED}"


def test_weights_are_drawn_one_by_one(implementation: Implementation, device: str) -> None:
    """Layers that start as copies of one another are no random start."""
    model = implementation.watched(SIZE, context_length=CONTEXT).to(device)
    drawn = {name: p for name, p in model.named_parameters() if p.std(correction=0) > 0}  # not a norm's ones
    for (name, p), (other, q) in combinations(drawn.items(), 2):
        assert p.shape != q.shape or not torch.equal(p, q), f"{name} and {other} start with equal weights"


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_its_own_weights_learn(implementation: Implementation, autocast: bool, device: str) -> None:
    """After a few steps every parameter has had a gradient and has changed."""
    torch.manual_seed(0)
    model = implementation.watched(SIZE, context_length=CONTEXT).to(device)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    tokens = draw(device)
    losses, still = [], set(before)
    for _ in range(10):
        optimizer.zero_grad()
        with torch.autocast(device, dtype=torch.bfloat16, enabled=autocast):
            logits = model(tokens[:, :-1])
        loss = cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        still -= {name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())}
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0], f"ten steps from its own weights took the loss from {losses[0]} to {losses[-1]}"
    assert not still, f"in ten steps from its own weights {sorted(still)[0]} has had no gradient but zero"
    for name, p in model.named_parameters():
        assert not torch.equal(p, before[name]), f"ten steps from its own weights have not moved {name}"


def test_weights_load_into_the_plain_model_and_back(implementation: Implementation) -> None:
    """Strict loading: `load_state_dict` refuses names that the other model lacks, such as those of buffers."""
    model = implementation.watched(SIZE, context_length=CONTEXT)
    plain = PlainTransformer(SIZE, context_length=CONTEXT)
    state, names = set(model.state_dict()), set(plain.state_dict())
    assert not names - state, f"its state_dict has no {sorted(names - state)}"
    assert not state - names, f"its state_dict has {sorted(state - names)}, with which it loads into no other model"
    plain.load_state_dict(model.state_dict())
    model.load_state_dict(plain.state_dict())


@float64
@pytest.mark.should("a model of the meta device is whole once `to_empty` and `load_state_dict` have run")
def test_a_model_of_the_meta_device_is_whole_once_its_state_is_loaded(
    implementation: Implementation, device: str
) -> None:
    """No state has tables of positions, and the memory that `to_empty` gives them has no values."""
    _, plain = models(implementation, device)
    with torch.no_grad():
        for p in plain.parameters():
            p.mul_(4)
    with torch.device("meta"):
        model = implementation.watched(SIZE, context_length=CONTEXT)
    model = model.to_empty(device=device)
    model.load_state_dict(plain.state_dict())
    tokens = draw(device)
    assert_logits(model(tokens), plain(tokens), where=" of an emptied model")


@pytest.mark.should("a context that is too long is a ValueError")
@pytest.mark.parametrize("extra", [1, 8])
def test_a_context_too_long_is_refused(
    implementation: Implementation, extra: int, record_property: Note, device: str
) -> None:
    model = implementation.watched(SIZE, context_length=8).to(device)
    model(draw(device, 2, 8))
    tokens = draw(device, 2, 8 + extra)
    what, wording = f"context {8 + extra} of 8", r"context up to 8\), got \(2,"
    assert_refused(implementation, what, lambda: model(tokens), wording, record_property)


@pytest.mark.should("token ids out of range are a ValueError on CPU")
@pytest.mark.parametrize("wrong", [-1, -SIZE.vocab, SIZE.vocab])
def test_token_ids_out_of_range_are_refused(implementation: Implementation, wrong: int, record_property: Note) -> None:
    """CPU only: on CUDA the device's assertion ends the process."""
    model = implementation.watched(SIZE, context_length=8)
    tokens = draw("cpu", 2, 8)
    tokens[1, 3] = wrong
    what = f"token id {wrong} of a vocabulary of {SIZE.vocab}"
    assert_refused(implementation, what, lambda: model(tokens), "token ids go from 0 to", record_property)
