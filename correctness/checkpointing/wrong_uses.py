"""Planted defects: policies that are right for blocks of one tensor and for one backward, as public trackers report."""

from __future__ import annotations

import random
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint

from correctness.checkpointing.wrong import Forward, recomputed, wrapped
from correctness.checkpointing.wrong_reported import _Frame
from correctness.support.planting import defect


class _Once(_Frame):
    """Hands out each recomputed tensor once, and does not recompute again."""

    def unpack(self, place: int) -> Tensor:
        found = super().unpack(place)
        self.stored[place] = found.new_zeros(found.shape)
        return found


@defect(cause="two calls", caught_by="test_any_history_is_to_the_bit")
def hands_out_each_tensor_once(model: nn.Module) -> nn.Module:
    """pytorch/pytorch#82156: a tensor that was recomputed is gone once read; the second backward finds zeros."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            frame = _Once(partial(forward, *args, **kwargs), Tensor.detach)
            with saved_tensors_hooks(frame.pack, frame.unpack):
                return forward(*args, **kwargs)

        return run

    return wrapped(model, wrap)


@defect(cause="gradients", caught_by="test_any_history_is_to_the_bit")
def outputs_in_containers_detached(model: nn.Module) -> nn.Module:
    """HIPS/autograd#495: sees an output that is itself a tensor; those in a tuple or dict get no gradient."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            output = recomputed(forward)(*args, **kwargs)
            return output if isinstance(output, Tensor) else tree_map_only(Tensor, Tensor.detach, output)

        return run

    return wrapped(model, wrap)


@defect(cause="gradients", caught_by="test_any_history_is_to_the_bit")
def none_shifts_the_arguments(model: nn.Module) -> nn.Module:
    """deepspeedai/DeepSpeed#8455: the recomputation gets another None after each argument that is no tensor."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            ran: list[bool] = []

            def once_or_again(*args: Any, **kwargs: Any) -> Any:
                again = [y for x in args for y in ((None, None) if x is None else (x,))]
                given, _ = again if ran else args, ran.append(True)
                return forward(*given, **kwargs)

            return checkpoint(once_or_again, *args, use_reentrant=False, **kwargs)

        return run

    return wrapped(model, wrap)


@defect(cause="gradients", caught_by="test_any_history_is_to_the_bit")
def runs_hooks_of_parameters_twice(model: nn.Module) -> nn.Module:
    """pytorch/pytorch#81296: hooks of parameters run for the gradient that comes from the block, and again for all."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            hooked = {name: p for name, p in block.named_parameters() if p._backward_hooks and p.requires_grad}
            views = {name: p.view_as(p) for name, p in hooked.items()}
            for name, view in views.items() if torch.is_grad_enabled() else ():
                for hook in hooked[name]._backward_hooks.values():
                    view.register_hook(hook)
            with _reparametrize_module(block, views):
                return recomputed(forward)(*args, **kwargs)

        return run

    return wrapped(model, wrap)


@defect(cause="memory", caught_by="test_it_saves_however_blocks_are_called")
def not_with_keywords(model: nn.Module) -> nn.Module:
    """Checkpoints no block that is given an argument by name, which reentrant checkpointing does not take."""
    return wrapped(
        model,
        lambda forward, block: lambda *args, **kwargs: (forward if kwargs else recomputed(forward))(*args, **kwargs),
    )


@defect(cause="memory", caught_by="test_nothing_is_kept_after_backward_by_a_loss_that_the_caller_keeps")
def inputs_stay_on_the_node(model: nn.Module) -> nn.Module:
    """deepspeedai/DeepSpeed#1698: what is saved is not cleared after backward, and lives as its node does."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            output = checkpoint(forward, *args, use_reentrant=False, **kwargs)
            for each in tree_leaves(output):
                if isinstance(each, Tensor) and each.grad_fn is not None:
                    each.grad_fn.metadata["stashed"] = args
            return output

        return run

    return wrapped(model, wrap)


@defect(cause="state", caught_by="test_a_deep_copy_computes_with_weights_of_its_own")
def copies_run_the_original(model: nn.Module) -> nn.Module:
    """facebookresearch/fairscale#816: the patched forward refers to its block, also once it is copied."""
    for block in model.blocks._modules.values():
        block.forward = partial(_checkpointed, type(block).forward, weakref.ref(block))
    return model


def _checkpointed(forward: Forward, block: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(partial(forward, block()), *args, use_reentrant=False, **kwargs)


@defect(cause="state", caught_by="test_it_saves_in_each_mode_whatever_is_frozen")
def keeps_the_gradient_of_its_input(model: nn.Module) -> nn.Module:
    """NVIDIA/Megatron-LM#6339: the gradient of a block's input outlives backward, until the next one replaces it."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        kept: list[Tensor] = []

        def keep(gradient: Tensor) -> None:
            kept[:] = [gradient.detach()]

        def run(*args: Any, **kwargs: Any) -> Any:
            first = next((x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)), None)
            if first is not None and first.requires_grad and torch.is_grad_enabled():
                first.register_hook(keep)
            return recomputed(forward)(*args, **kwargs)

        return run

    return wrapped(model, wrap)


class _PassesOn(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: Tensor, x: Tensor) -> Tensor:  # type: ignore[override]
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return gradient, gradient


@defect(cause="gradients", caught_by="test_any_history_is_to_the_bit")
def passes_on_to_an_input_that_is_not_read(model: nn.Module) -> nn.Module:
    """ooples/AiDotNet.Tensors#361: an input that its block does not read gets the gradient of the block's output."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            output, x = recomputed(forward)(*args, **kwargs), args[0]
            both = isinstance(x, Tensor) and isinstance(output, Tensor) and output is not x
            if not (both and x.requires_grad and output.requires_grad and output.shape == x.shape):
                return output
            with torch.enable_grad(), torch.random.fork_rng(devices=[]):
                probe = x.detach().requires_grad_()
                again = forward(probe, *args[1:], **kwargs)
            read = again.requires_grad and torch.autograd.grad(again.sum(), probe, allow_unused=True)[0] is not None
            return output if read else _PassesOn.apply(output, x)

        return run

    return wrapped(model, wrap)


class _Together(torch.autograd.Function):
    """All outputs of a block. Backward passes on the gradients of those that `need` one, as if no other had any."""

    @staticmethod
    def forward(ctx: Any, need: list[bool], *outputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.need = need
        return tuple(x.view_as(x) for x in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return None, *(gradient for gradient, _ in zip(gradients, filter(None, ctx.need), strict=True))


@defect(cause="gradients", caught_by="test_any_history")
def counts_gradients_of_masks(model: nn.Module) -> nn.Module:
    """PaddlePaddle/Paddle#34664: a floating-point output that needs no gradient, as a mask that is handed on, comes
    back as one that does, and backward has more gradients than it expects."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            leaves, form = tree_flatten(checkpoint(forward, *args, use_reentrant=False, **kwargs))
            floats = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and x.is_floating_point()]
            need = [leaves[i].requires_grad for i in floats]
            if any(need):
                for i, x in zip(floats, _Together.apply(need, *(leaves[i] for i in floats)), strict=True):
                    leaves[i] = x
            return tree_unflatten(leaves, form)

        return run

    return wrapped(model, wrap)


@defect(cause="state", caught_by="test_any_history_is_to_the_bit")
def makes_its_tensor_in_the_first_call(model: nn.Module) -> nn.Module:
    """snowflakedb/ArcticTraining#265: what the first call makes is an inference tensor if that is an evaluation under
    `inference_mode`, and training cannot save it for backward."""
    made: list[Tensor] = []

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        def run(x: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(x, Tensor):
                return recomputed(forward)(x, *args, **kwargs)
            if not made:
                made.append(torch.ones((), dtype=x.dtype, device=x.device))
            return recomputed(forward)(x * made[0], *args, **kwargs)

        return run

    return wrapped(model, wrap)


@defect(cause="memory", caught_by="test_it_saves_however_blocks_are_called")
def keeps_what_is_in_tuples(model: nn.Module) -> nn.Module:
    """Keeps the tensors of tuples in a list that is never emptied; a tensor alone it does not keep."""
    kept: list[Tensor] = []

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        def run(x: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(x, tuple):
                kept.extend(each.detach() for each in x if isinstance(each, Tensor))
            return recomputed(forward)(x, *args, **kwargs)

        return run

    return wrapped(model, wrap)


@defect(cause="random numbers", caught_by="test_dropout_drops_the_same_again")
def leaves_pythons_random_state_of_forward(model: nn.Module) -> nn.Module:
    """Backward goes back to the state of Python's generator in forward too, and leaves it there."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            states: list[Any] = []

            def once_more(*args: Any, **kwargs: Any) -> Any:
                if states:
                    random.setstate(states[0])
                states.append(random.getstate())
                return forward(*args, **kwargs)

            return recomputed(once_more)(*args, **kwargs)

        return run

    return wrapped(model, wrap)


@defect(cause="memory", caught_by="test_it_saves_in_each_mode_whatever_is_frozen")
def where_inputs_need_gradients(model: nn.Module) -> nn.Module:
    """OpenBMB/BMTrain#8: a block behind a frozen embedding is not checkpointed, as its inputs need no gradient."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            needed = any(isinstance(x, Tensor) and x.requires_grad for x in tree_leaves((args, kwargs)))
            return (recomputed(forward) if needed else forward)(*args, **kwargs)

        return run

    return wrapped(model, wrap)
