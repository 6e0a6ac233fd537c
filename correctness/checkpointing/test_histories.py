"""Random models and passes: outputs and gradients equal those without the policy, to the bit.

Hypothesis draws blocks, their arguments, hooks, modes, autocast and how gradients are computed.
"""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from correctness.checkpointing.events import DROPOUTS, HISTORIES, History, Model, Pass
from correctness.engine.histories import Problem, hold
from correctness.support.contracts import is_ours
from shardmark.api import Implementation

pytestmark = pytest.mark.family("checkpointing")


def _hooked(model: Model, history: History, before: bool) -> list[Any]:
    handles = []
    for kind, early, index in history.hooks:
        block = model.blocks[index % history.layers]
        if early == before and kind == "pre":
            handles.append(block.register_forward_pre_hook(lambda module, args: (args[0] * 1.5, *args[1:])))
        elif early == before:
            handles.append(block.register_forward_hook(lambda module, args, output: output * 0.5))
    return handles


Result = tuple[int, str, Tensor | None]
"""Number of the pass, name, value."""


class Refused(Exception):
    """Forward raised where blocks have further arguments: the policy does not take them."""


def _results(policy: Any, history: History, device: str) -> list[Result]:
    """Play the history; return each pass's output, gradients of all leaves, and random numbers drawn afterwards."""
    torch.manual_seed(0)
    model = Model(history).to(device, history.dtype)
    for i, p in enumerate(model.parameters()):
        p.requires_grad_(not (history.frozen and i % history.frozen == 0))
    leaves = {"the input": torch.randn(6, 8, device=device, dtype=history.dtype, requires_grad=history.x_needs_grad)}
    for i, (by_name, needs, _, place) in enumerate(history.extra):
        name = f"argument {i}{' by name' if by_name else ''}{'' if place == 'itself' else f' {place}'}"
        leaves[name] = torch.rand(6, 1, device=device, dtype=history.dtype, requires_grad=needs)
    handles = _hooked(model, history, before=True)
    first = model.blocks[0]
    model = policy(model.train(history.born == "train"))
    handles += _hooked(model, history, before=False)
    found: list[Result] = []
    waiting: list[tuple[int, Pass, Tensor]] = []
    for number, each in enumerate(history.events, 1):
        last = number == len(history.events)
        if number > 1 and last:
            for handle in handles:
                handle.remove()
        if not waiting:
            model, first = _changed(model, first, history, each)
        named = {**leaves, **dict(model.named_parameters())}
        with ExitStack() as stack:
            if each.autocast:
                dtype = getattr(torch, each.autocast.split(",")[0])
                stack.enter_context(torch.autocast(device, dtype=dtype))
            output = _forward(model, history, each, leaves, device)
            found.append((number, "the output", output.detach()))
            if output.requires_grad and each.backward_inside and not each.waits:
                found += _backward(number, each, output, named, device)
        if (
            output.requires_grad and each.waits and not last and not history.hooks
        ):  # a hook may be removed before the next
            waiting.append((number, each, output))
        elif output.requires_grad and (each.waits or not each.backward_inside):
            found += _backward(number, each, output, named, device)
            while waiting:
                found += _backward(*waiting.pop(-history.last_forward_first), named, device)
        del output
        found.append((number, "what is drawn afterwards", torch.rand(3, device=device)))
    while waiting:
        found += _backward(*waiting.pop(-history.last_forward_first), named, device)
    return found


def _changed(model: Model, first: nn.Module, history: History, each: Pass) -> tuple[Model, nn.Module]:
    """Change the model as the pass says, then set the mode of each submodule; return the model that goes on and its
    first block."""
    if each.change == "freeze the first block":
        first.requires_grad_(False)
    elif each.change == "thaw all":
        model.requires_grad_(True)
    elif each.change in ("a state_dict", "a state_dict assigned"):
        assign = each.change == "a state_dict assigned"
        model.load_state_dict({name: x * 0.9 for name, x in model.state_dict().items()}, assign=assign)
    elif each.change == "parameters replaced":
        for module in model.modules():
            for name, p in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(p.detach() * 0.9, requires_grad=p.requires_grad))
    elif each.change == "copied" and not history.hooks:  # a copied hook has no handle to remove it by
        old, model = model, copy.deepcopy(model)
        first = next(iter(model.blocks._modules.values()))
        _scale(old)
    elif each.change == "weights in place":
        _scale(model)
    if each.change == "no mode is set":
        return model, first
    model.train(each.mode in ("train", "dropout alone evaluates", "every second block evaluates"))
    for module in model.modules():
        if isinstance(module, DROPOUTS) and "alone" in each.mode:
            module.train("trains" in each.mode)
    if "second" in each.mode:
        for block in list(model.blocks._modules.values())[1::2]:
            block.eval()
    return model, first


@torch.no_grad()
def _scale(model: nn.Module) -> None:
    for p in model.parameters():
        p.mul_(0.9)


def _forward(model: Model, history: History, each: Pass, leaves: dict[str, Tensor], device: str) -> Tensor:
    tensors = [
        _placed(leaf * 2 if made else leaf, place)
        for leaf, (_, _, made, place) in zip(list(leaves.values())[1:], history.extra, strict=True)
    ]
    args = [t for t, (by_name, *_) in zip(tensors, history.extra, strict=True) if not by_name]
    kwargs = {f"k{i}": t for i, (t, e) in enumerate(zip(tensors, history.extra, strict=True)) if e[0]}
    kwargs |= {"flag": True} if history.extra else {}
    x = leaves["the input"]
    if each.layout == "transposed":
        x = x.mT.contiguous().mT
    elif each.layout == "expanded":
        x = x[:1].expand(6, 8)
    elif each.layout == "another batch" and not history.extra:
        x = x[:3]
    with torch.autocast(device, enabled=False) if each.autocast and "disabled" in each.autocast else nullcontext():
        try:
            if each.no_grad_first:
                with torch.no_grad():
                    model(x, *args, **kwargs)
            if each.dropped_first:
                model(x, *args, **kwargs)
            return model(x, *args, **kwargs)
        except Exception as error:
            if history.extra:
                raise Refused(f"{type(error).__name__}: {error}") from error
            raise


def _placed(x: Tensor, place: str) -> Any:
    named = {"scale": x, "name": "a"}
    return {
        "itself": x,
        "in a tuple": (None, x),
        "in a list": [x, None],
        "in a dict": named,
        "in an object": SimpleNamespace(**named),
    }[place]


def _backward(number: int, each: Pass, output: Tensor, named: dict[str, Tensor], device: str) -> list[Result]:
    """Run backward in the context that the pass says."""
    around: AbstractContextManager[object] = nullcontext()
    loss = output.float().square().mean()
    if each.around == "no_grad":
        around = torch.no_grad()
    elif each.around == "disabled":
        around = torch.autocast(device, enabled=False)
    elif each.around:
        around = torch.autocast(device, dtype=getattr(torch, each.around))
    with around:
        return _gradients(loss, each, named, number)


def _gradients(loss: Tensor, each: Pass, named: dict[str, Tensor], number: int) -> list[Result]:
    torch.rand(2)
    needing = {name: x for name, x in named.items() if x.requires_grad}
    some = {name: x for i, (name, x) in enumerate(needing.items()) if not i % each.subset}
    for x in named.values():
        x.grad = None
    if each.way.startswith("grad"):
        of = needing if each.way == "grad of all" else some
        grads = dict(zip(of, torch.autograd.grad(loss, list(of.values()), allow_unused=True), strict=True))
    else:
        loss.backward(inputs=list(some.values()) if "inputs" in each.way else None)
        grads = {name: x.grad for name, x in named.items()}
    return [(number, f"the gradient of {name} by {each.way}", grad) for name, grad in grads.items()]


def _problem(implementation: Implementation, history: History, device: str) -> Problem | None:
    """Return the first result that the policy changes, or None.

    Raises Refused if the implementation cannot run such blocks.
    """
    expected = _results(lambda model: model, history, device)
    try:
        found = _results(implementation.watched, history, device)
    except Refused as error:
        raise Refused(f"blocks take no further arguments: {error}") from error
    except Exception as error:
        what = f"{type(error).__name__} with the policy, and none without: {error}"
        return Problem(len(history.events), what)
    for (number, name, mine), (_, same_name, theirs) in zip(found, expected, strict=False):
        if name != same_name:
            return Problem(number, f"{name} is given, and without the policy {same_name}")
        # Gradients of shared parameters are sums, which a policy may make in another order, or in autocast's dtype.
        equal = _equal if history.blocks == "different" or is_ours(implementation) else _near
        same = mine is theirs is None or (mine is not None and theirs is not None and equal(mine, theirs))
        if not same:
            return Problem(number, f"{name} is {_shown(mine)}, and without the policy {_shown(theirs)}")
    if len(found) != len(expected):
        return Problem(len(history.events), f"{len(found)} results, and without the policy {len(expected)}")
    return None


def _equal(mine: Tensor, theirs: Tensor) -> bool:
    return mine.dtype == theirs.dtype and bool(((mine == theirs) | (mine.isnan() & theirs.isnan())).all())


def _near(mine: Tensor, theirs: Tensor) -> bool:
    off, largest = (mine - theirs).double().nan_to_num().abs().max(), theirs.double().nan_to_num().abs().max()
    return mine.dtype == theirs.dtype and bool(off <= 4 * torch.finfo(torch.bfloat16).eps * largest)


def _shown(x: Tensor | None) -> str:
    return "none" if x is None else f"{x.flatten()[:3].tolist()}... in {x.dtype}"


@pytest.mark.examples(20, 100, 600)
def test_any_history_is_to_the_bit_as_without(
    implementation: Implementation, examples: int, device: str, record_property: Any
) -> None:
    def problem(history: History) -> Problem | None:
        try:
            return _problem(implementation, history, device)
        except Refused as refused:
            record_property("note", str(refused))
            return None

    hold(HISTORIES, problem, examples)
