"""Single calls of a parallel model beside those of one process: logits, gradients, and what a rank sends and holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor, nn

from correctness.support.batches import left_as_they_are
from correctness.support.communication import delayed, recorded
from correctness.tensor_parallel.training import KINDS, batches, model_of
from impl.distributed import full, local
from impl.mesh import Decoder, DecoderSize, token_losses
from impl.mesh.decoder import Batch
from shardmark.api import Implementation, Mesh
from shardmark.meter.memory import meter

WITHIN = 1e-12
"""Relative to the largest value of a tensor, in float64."""


STEPS = (1, 2)
"""Two calls have the batches of these steps, whose rows differ in length."""


@dataclass
class Called:
    """Results of calls, by name, whole."""

    results: dict[str, Tensor]
    gradients: dict[str, Tensor]


def parallel(implementation: Implementation, mesh: Mesh, kind: str, device: str) -> nn.Module:
    on = mesh.device_mesh(torch.device(device).type)
    made: nn.Module = implementation.watched(model_of(kind, device), on["tp"])
    return made


def _gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: full(p.grad).cpu() for name, p in model.named_parameters() if p.grad is not None}


def _batch(kind: str, step: int, device: str = "cpu") -> Batch:
    """Copies of the step's first micro-batch, whose rows do not lie one after the other."""
    lying = (each.t().clone(memory_format=torch.contiguous_format).t() for each in batches(kind, 2, step)[0])
    tokens, positions, targets = (each.to(device) for each in lying)
    return tokens, positions, targets


def _with_logits(model: nn.Module, kind: str, device: str) -> Called:
    """Logits, by which two losses are differentiated: one whose gradient is expanded, and one of random weights."""
    tokens, positions, _ = _batch(kind, 1, device)
    logits = model(tokens, positions)
    logits.sum().backward(retain_graph=True)
    random = torch.Generator().manual_seed(3)
    weights = torch.randn(logits.shape, generator=random, dtype=torch.float64).to(device)
    (logits * weights).sum().backward()
    return Called({"the logits": logits.detach().cpu()}, _gradients(model))


def logits_on_rank(implementation: Implementation, mesh: Mesh, kind: str, device: str) -> Called:
    return _with_logits(parallel(implementation, mesh, kind, device), kind, device)


@cache
def logits_in_one_process(kind: str) -> Called:
    return _with_logits(model_of(kind, "cpu"), kind, "cpu")


def two_calls_on_rank(implementation: Implementation, mesh: Mesh, device: str, late: bool = False) -> Called:
    """Two forward passes before their backward passes, of which the last is the first, and runs twice; evaluations come
    before and between them. With `late`, one rank begins each collective late."""
    model = parallel(implementation, mesh, "even", device)
    given = [_batch("even", step, device) for step in STEPS]
    with left_as_they_are(given), delayed(before=0.02 if late else 0.0, on=0):
        _evaluate(model, given[0])
        first, second = (model(*batch) for batch in given)
        _evaluate(model, given[1])
        (3 * second).backward(retain_graph=True)
        second.backward()
        (2 * first).backward()
    results = {"the first loss": first.detach().cpu(), "the second loss": second.detach().cpu()}
    return Called(results, _gradients(model))


def _evaluate(model: nn.Module, batch: Batch) -> None:
    with torch.inference_mode():
        model(*batch)


@cache
def two_calls_in_one_process() -> Called:
    model = model_of("even", "cpu")
    first, second = (token_losses(model, _batch("even", step)) for step in STEPS)
    (3 * second).backward(retain_graph=True)
    second.backward()
    (2 * first).backward()
    return Called({"the first loss": first.detach(), "the second loss": second.detach()}, _gradients(model))


def _far(kind: str, device: str = "cpu") -> Batch:
    """A batch beyond position 1000, where bfloat16 has only every fourth integer."""
    tokens, positions, targets = _batch(kind, 1, device)
    return tokens, positions + 1001, targets


def _far_call(model: nn.Module, loss_of: Callable[..., Tensor], device: str, autocast: bool = False) -> Called:
    """The second of two calls, between which weights change."""
    batch = _far("biases", device)
    for call in range(2):
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
            loss, logits = loss_of(*batch), model(*batch[:2]).detach().cpu()
        if call == 0:
            for parameter in model.parameters():
                local(parameter.detach()).mul_(-0.5)
    wide = torch.promote_types(next(model.parameters()).dtype, torch.float32)
    assert loss.dtype == wide, f"the loss is {loss.dtype}: half precision is too coarse for a sum"
    loss.backward()
    return Called({"the loss": loss.detach().cpu(), "the logits": logits}, _gradients(model))


def _without_some_words(model: nn.Module, loss_of: Callable[..., Tensor], device: str) -> Called:
    """A call of a batch without the words that `_ruled_out` has as targets."""
    tokens, positions, targets = _batch("biases", 1, device)
    targets = targets.where(targets < 0, HALF + targets % HALF)  # those below 0 are ignored
    targets = targets + (targets % RULED_OUT == 0)
    loss = loss_of(tokens, positions, targets)
    loss.backward()
    return Called({"the loss": loss.detach().cpu()}, _gradients(model))


HALF, RULED_OUT = KINDS["biases"].size.vocabulary // 2, 12
"""Words 0 to HALF - 1 are ruled out, one rank's, and every RULED_OUT-th from HALF on, the other's first among them."""


def _ruled_out(device: str) -> Decoder:
    """A model some of whose words must not come, all of one rank's among them: their bias is minus infinity."""
    model = model_of("biases", device)
    with torch.no_grad():
        model.output.bias[:HALF] = model.output.bias[HALF::RULED_OUT] = -torch.inf
    return model


def ruled_out_on_rank(implementation: Implementation, mesh: Mesh, device: str) -> Called:
    model = implementation.watched(_ruled_out(device), mesh.device_mesh(torch.device(device).type)["tp"])
    return _without_some_words(model, model, device)


@cache
def ruled_out_in_one_process() -> Called:
    model = _ruled_out("cpu")
    return _without_some_words(model, lambda *batch: token_losses(model, batch), "cpu")


BFLOAT16 = {"autocast": torch.float32, "bfloat16": torch.bfloat16}
"""Ways to compute in bfloat16, and the dtype of each one's parameters."""


def bfloat16_on_rank(implementation: Implementation, mesh: Mesh, how: str, device: str) -> Called:
    on = mesh.device_mesh(torch.device(device).type)
    model = implementation.watched(model_of("biases", device).to(BFLOAT16[how]), on["tp"])
    return _far_call(model, model, device, how == "autocast")


@cache
def bfloat16_in_one_process(how: str) -> tuple[Called, Called]:
    """In bfloat16, and in float64."""
    found = []
    for dtype, autocast in ((BFLOAT16[how], how == "autocast"), (torch.float64, False)):
        model = model_of("biases", "cpu").to(dtype)
        found.append(_far_call(model, lambda *batch, of=model: token_losses(of, batch), "cpu", autocast))
    return found[0], found[1]


def differences(ranks: Sequence[Called], expected: Called) -> Iterator[str]:
    """A line for each result or gradient that is not that of one process."""
    for rank, found in enumerate(ranks):
        for what, own, right in (("", found.results, expected.results), ("of ", found.gradients, expected.gradients)):
            for name, value in right.items():
                error = _error(own, name, value)
                if not error <= WITHIN:
                    yield f"{'gradients ' * bool(what)}{what}{name} on rank {rank}: off by {error:.3g} of the largest"


def _error(own: Mapping[str, Tensor], name: str, right: Tensor) -> float:
    if name not in own or own[name].shape != right.shape:
        return torch.inf
    return ((own[name].double() - right).abs().max() / right.abs().max().clamp(min=1e-3)).item()


def rounding_differences(ranks: Sequence[Called], rounded: Called, right: Called) -> Iterator[str]:
    """A line for each tensor that is further from float64 than four times bfloat16's own error in one process, and than
    a few roundings of the largest, or of another dtype than there."""
    for rank, found in enumerate(ranks):
        for what in ("results", "gradients"):
            own, once, exact = (getattr(each, what) for each in (found, rounded, right))
            for name, value in exact.items():
                error, allowed = _error(own, name, value), max(4 * _error(once, name, value), 2**-7)
                if not error <= allowed:
                    yield f"{what} {name} on rank {rank}: off by {error:.3g} of the largest, allowed {allowed:.3g}"
                elif own[name].dtype != once[name].dtype:
                    yield f"{what} {name} on rank {rank}: {own[name].dtype}, in one process {once[name].dtype}"


def parts_on_rank(implementation: Implementation, mesh: Mesh, device: str) -> dict[str, tuple[int, int, int]]:
    """By name: elements of a parameter, those that this rank has, and those of the memory that they keep alive."""
    model = parallel(implementation, mesh, "sizes_that_do_not_divide", device)
    found = {}
    for name, parameter in model.named_parameters():
        own = local(parameter.detach())
        kept = own.untyped_storage().nbytes() // own.itemsize
        found[name] = parameter.numel(), own.numel(), kept
    return found


WIDE = DecoderSize(dim=8, layers=1, heads=4, kv_heads=4, hidden=8, vocabulary=8192)
"""A vocabulary beside which all else is small."""
WIDES = {"even": WIDE, "uneven": replace(WIDE, vocabulary=8191), "tied": replace(WIDE, tied=True)}


def peak_with_targets_on_rank(implementation: Implementation, mesh: Mesh, kind: str, device: str) -> dict[str, int]:
    """Bytes at the peak of a forward and a backward pass, and of an evaluation, beyond the model's own."""
    torch.manual_seed(0)
    model = implementation.watched(Decoder(WIDES[kind]).to(device), mesh.device_mesh(torch.device(device).type)["tp"])
    tokens = torch.randint(WIDES[kind].vocabulary, (8, 32), device=device)
    positions = torch.arange(32, device=device).expand(8, 32)
    with meter(device) as training:
        model(tokens, positions, tokens).backward()
    model.zero_grad()
    with torch.no_grad(), meter(device) as evaluation:
        model(tokens, positions, tokens)
    return {"training": training.tensors, "evaluation": evaluation.tensors}


def sent_on_rank(implementation: Implementation, mesh: Mesh, kind: str, device: str) -> dict[str, int]:
    """Bytes sent in a forward and a backward pass, by name of the collective."""
    model = parallel(implementation, mesh, kind, device)
    batch = _batch(kind, 1, device)
    with recorded() as started:
        model(*batch).backward()
    found: dict[str, int] = {}
    for each in started:
        found[each.name] = found.get(each.name, 0) + each.sent
    return found
