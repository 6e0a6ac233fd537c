"""Plays a history on a model with a policy: outputs, gradients of all leaves, and random numbers drawn afterwards."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from correctness.checkpointing.events import CONTAINERS, DROPOUTS, History, Model, Pass, returned, taken

Result = tuple[int, str, Tensor | None]
"""Number of the pass, name, value."""


class Refused(Exception):
    """An error where blocks take or return more than a tensor, backward runs twice, or gradients are differentiated:
    the policy does not support it."""


def results(policy: Any, history: History, device: str) -> list[Result]:
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
    others: list[nn.Module] = []
    for number, each in enumerate(history.events, 1):
        last = number == len(history.events)
        if number > 1 and last:
            for handle in handles:
                handle.remove()
        if not waiting:
            model, first = _changed(model, first, history, each, leaves)
        named = {**leaves, **dict(model.named_parameters())}
        with ExitStack() as stack:
            if each.autocast:
                dtype = getattr(torch, each.autocast.split(",")[0])
                stack.enter_context(torch.autocast(device, dtype=dtype))
            with saved_tensors_hooks(_elsewhere, lambda copied: copied) if each.packed else nullcontext():
                output = _forward(model, history, each, leaves, device)
            found.append((number, "the output", output.detach()))
            found += [(number, f"a block's {container}", None) for container in model.containers]
            if each.between:
                found += _of_another(policy, others, history, number, each, device)
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


def _elsewhere(x: Tensor) -> Tensor:
    """A copy in other memory, with the same strides, as bits may depend on them."""
    return x.new_empty(0).set_(x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride())


def _of_another(
    policy: Any, others: list[nn.Module], history: History, number: int, each: Pass, device: str
) -> list[Result]:
    """Train another model with the same policy; return its gradients. One that is made anew may get the memory, and so
    the id, of the one before."""
    if not others or each.between == "another model, made anew":
        others.clear()
        others.append(policy(Model(history).to(device, history.dtype)))
    (other,) = others
    other.zero_grad()
    x = torch.randn(4, 8, device=device, dtype=history.dtype)
    try:
        output = other(x)
    except Exception as error:
        if history.output in CONTAINERS:
            raise Refused(f"blocks take and return a tensor alone: {type(error).__name__}: {error}") from error
        raise
    if output.requires_grad:
        output.float().square().mean().backward()
    return [(number, f"another model's gradient of {name}", p.grad) for name, p in other.named_parameters()]


def _hooked(model: Model, history: History, before: bool) -> list[Any]:
    if history.ignores:
        return []  # they would get zeros that stand for no gradient, and change these
    handles: list[Any] = []
    for kind, early, index in history.hooks:
        block = model.blocks[index % history.layers]
        if early == before and kind == "pre":
            handles.append(block.register_forward_pre_hook(_larger))
        elif early == before and kind == "post":
            handles.append(block.register_forward_hook(_halved))
        elif early == before and kind == "backward" and history.output == "a tensor":
            handles.append(block.register_full_backward_hook(lambda module, into, out: tuple(map(_bent, into))))
        elif early == before and kind == "parameter":
            handles += [p.register_hook(_bent) for p in block.parameters() if p.requires_grad]
    return handles


def _larger(module: Any, args: Any) -> Any:
    return _times(1.5, module, args[0]), *args[1:]


def _halved(module: Any, args: Any, output: Any) -> Any:
    return _times(0.5, module, output)


def _times(factor: float, module: Any, given: Any) -> Any:
    x, beside = taken(given)
    return x * factor if beside is None else returned(module.output, x * factor, beside)


def _bent(gradient: Tensor | None) -> Tensor | None:
    """Another gradient, which tells how often this ran."""
    return gradient * 0.5 + 0.25 if gradient is not None and gradient.is_floating_point() else gradient


def _changed(
    model: Model, first: nn.Module, history: History, each: Pass, leaves: dict[str, Tensor]
) -> tuple[Model, nn.Module]:
    """Change the model as the pass says, and the leaves' dtype with it, then set the mode of each submodule; return the
    model that goes on and its first block."""
    if each.change == "freeze the first block" and not history.ignores:
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
    elif each.change == "memory replaced":
        for p in model.parameters():
            p.data = p.data * 0.9
    elif each.change == "another dtype":
        model.to(torch.float64 if leaves["the input"].dtype == torch.float32 else torch.float32)
        for leaf in leaves.values():
            leaf.grad, leaf.data = None, leaf.data.to(next(model.parameters()).dtype)
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
        _placed(leaves["the input"] if place == "the input" else _made(leaf, needs) if made else leaf, place)
        for leaf, (_, needs, made, place) in zip(list(leaves.values())[1:], history.extra, strict=True)
    ]
    args = [t for t, (by_name, *_) in zip(tensors, history.extra, strict=True) if not by_name]
    args = [x for t in args for x in (t if isinstance(t, _After) else (t,))]
    kwargs = {
        f"k{i}": tuple(t) if isinstance(t, _After) else t
        for i, (t, e) in enumerate(zip(tensors, history.extra, strict=True))
        if e[0]
    }
    kwargs |= {"flag": True} if history.extra else {}
    x = leaves["the input"]
    if each.layout == "transposed":
        x = x.mT.contiguous().mT
    elif each.layout == "expanded":
        x = x[:1].expand(6, 8)
    elif each.layout == "another batch" and not history.extra:
        x = x[:3]
    elif each.layout == "no rows" and not history.extra:
        x = x[:0]
    with torch.autocast(device, enabled=False) if each.autocast and "disabled" in each.autocast else nullcontext():
        try:
            if each.evaluated_first:
                in_inference = each.evaluated_first == "inference_mode" and not each.autocast
                with torch.inference_mode() if in_inference else torch.no_grad():
                    model(x, *args, **kwargs)
            if each.dropped_first:
                model(x, *args, **kwargs)
            return model(x, *args, **kwargs)
        except Exception as error:
            if history.extra or history.output in CONTAINERS:
                raise Refused(f"blocks take and return a tensor alone: {type(error).__name__}: {error}") from error
            raise


@dataclass(slots=True)
class _Slots:
    scale: Tensor


class _After(tuple[None, Tensor]):
    """Two arguments, None and a tensor."""


def _made(leaf: Tensor, needs: bool) -> Tensor:
    return leaf * 2 if needs else leaf > 0.5


def _placed(x: Tensor, place: str) -> Any:
    named = {"scale": x, "name": "a"}
    return {
        "itself": x,
        "in a tuple": (None, x),
        "in a list": [x, None],
        "in a dict": named,
        "in an object": SimpleNamespace(**named),
        "in an object of slots": _Slots(x),
        "in a tuple in a dict": {"pair": (x, None), "name": "a"},
        "in an object in a list": [SimpleNamespace(**named), None],
        "after None": _After((None, x)),
        "the input": x,
        "as complex numbers": torch.complex(x.float(), x.float() + 1),
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

    def gradients() -> list[Result]:
        with around:
            return _gradients(loss, each, named, number)

    if not each.on_a_thread:
        return gradients()
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(gradients).result()


def _gradients(loss: Tensor, each: Pass, named: dict[str, Tensor], number: int) -> list[Result]:
    torch.rand(2)
    needing = {name: x for name, x in named.items() if x.requires_grad}
    some = {name: x for i, (name, x) in enumerate(needing.items()) if not i % each.subset}
    found: list[Result] = []
    for again in (False, True) if each.again == "retained" else (False,):
        for x in named.values():
            x.grad = None
        keep = each.again == "differentiated" or (each.again == "retained" and not again)
        try:
            if each.way.startswith("grad"):
                of = needing if each.way == "grad of all" else some
                found_now = torch.autograd.grad(loss, [*of.values()], retain_graph=keep, allow_unused=True)
                grads = dict(zip(of, found_now, strict=True))
            else:
                loss.backward(retain_graph=keep, inputs=list(some.values()) if "inputs" in each.way else None)
                grads = {name: x.grad for name, x in named.items()}
        except Exception as error:
            if again:  # as PyTorch's own selective checkpointing
                raise Refused(f"backward runs once: {type(error).__name__}: {error}") from error
            raise
        how = each.way + " again" * again
        found += [(number, f"the gradient of {name} by {how}", grad) for name, grad in grads.items()]
    return found + (_of_gradients(loss, needing, number) if each.again == "differentiated" else [])


@torch.enable_grad()
def _of_gradients(loss: Tensor, needing: dict[str, Tensor], number: int) -> list[Result]:
    """Gradients of the sum of the gradients' squares, as gradient penalties have it."""
    try:
        grads = torch.autograd.grad(loss, [*needing.values()], create_graph=True, allow_unused=True)
        penalty = sum((g.float().square().sum() for g in grads if g is not None and g.requires_grad), torch.zeros(()))
        if not penalty.requires_grad:
            return []
        for x in needing.values():
            x.grad = None
        penalty.backward()  # autograd.grad would leave out a Function that is differentiable once
    except Exception as error:
        raise Refused(f"gradients cannot be differentiated: {type(error).__name__}: {error}") from error
    return [(number, f"the gradient of {name} by the squares of the gradients", x.grad) for name, x in needing.items()]
