"""Planted defects: checkpointing policies that are wrong as public trackers report."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils.stateless import _reparametrize_module
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from correctness.checkpointing.models import distinct_blocks
from correctness.checkpointing.wrong import Forward, recomputed, wrapped
from correctness.support.planting import defect
from impl.checkpointing.policies import _mix_in


@defect(cause="numerics", caught_by="test_gradients_under_autocast")
def recomputes_in_autocasts_default_dtype(model: nn.Module) -> nn.Module:
    """pytorch/pytorch#71124, facebookresearch/fairscale#1199: the recomputation is under autocast in its default dtype,
    whatever forward's was.
    """

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            device = args[0].device.type
            enabled, ran = torch.is_autocast_enabled(device), []

            def once_or_again(*args: Any, **kwargs: Any) -> Any:
                if not ran:
                    ran.append(True)
                    return forward(*args, **kwargs)
                default = torch.float16 if device == "cuda" else torch.bfloat16
                with torch.autocast(device, dtype=default, enabled=enabled):
                    return forward(*args, **kwargs)

            return checkpoint(once_or_again, *args, use_reentrant=False, **kwargs)

        return run

    return wrapped(model, wrap)


@defect(cause="state", caught_by="test_dropout_drops_the_same_again")
def random_state_if_any_dropout_was_on(model: nn.Module) -> nn.Module:
    """Keeps the generators' state only if some dropout had p > 0 when the policy was applied; p may be raised later."""
    keeps = any(isinstance(part, nn.Dropout) and part.p > 0 for part in model.modules())
    return wrapped(model, lambda forward, block: recomputed(forward, preserve_rng_state=keeps))


class _Holding(torch.autograd.Function):
    """Passes its input on; its node refers to `held`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Any) -> Tensor:  # type: ignore[override]
        ctx.held = held
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad, None


class _Cyclic(_Holding):
    """Its node refers to itself too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, held: Any) -> Tensor:
        return _Holding.forward(ctx, x, [held, ctx])


@defect(cause="memory", caught_by="test_what_it_saves_is_freed_without_the_collector")
def saved_tensors_in_a_cycle(model: nn.Module) -> nn.Module:
    """pytorch/pytorch#84413, pytorch/pytorch#154642: saves for backward in a cycle, which stays until the garbage
    collector runs, and steps pile up.
    """

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        inner = recomputed(forward)
        return lambda x, *args, **kwargs: _Cyclic.apply(inner(x, *args, **kwargs), x.detach())

    return wrapped(model, wrap)


class _Frame:
    """A run of a block that saves nothing. Backward runs it again, and stores as `keep` does what this run saves."""

    def __init__(self, run: Forward, keep: Callable[[Tensor], Tensor]) -> None:
        self.run, self.keep, self.random = run, keep, torch.get_rng_state()
        self.count, self.stored = 0, []  # type: ignore[var-annotated]

    def pack(self, tensor: Tensor) -> int:
        self.count += 1
        return self.count - 1

    def unpack(self, place: int) -> Tensor:
        if not self.stored:
            hooks = saved_tensors_hooks(lambda tensor: self.stored.append(self.keep(tensor)), lambda _: _)
            with torch.enable_grad(), torch.random.fork_rng(devices=[]), hooks:
                torch.set_rng_state(self.random)
                self.run()
        stored: Tensor = self.stored[place]
        return stored


def in_frames(model: nn.Module, keep: Callable[[Tensor], Tensor], hold: bool = False) -> nn.Module:
    def wrap(forward: Forward, block: nn.Module) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            frame = _Frame(partial(forward, *args, **kwargs), keep)
            with saved_tensors_hooks(frame.pack, frame.unpack):
                output = forward(*args, **kwargs)
            return _Holding.apply(output, frame) if hold else output

        return lambda *args, **kwargs: (run if torch.is_grad_enabled() else forward)(*args, **kwargs)

    return wrapped(model, wrap)


@defect(cause="memory", caught_by="test_it_saves_in_each_mode")
def recomputed_until_the_loss_is_freed(model: nn.Module) -> nn.Module:
    """pytorch/pytorch#77284: what each block recomputed stays, so the peak is as without checkpointing."""
    return in_frames(model, Tensor.detach, hold=True)


@defect(cause="memory", caught_by="test_what_it_saves_is_freed_without_the_collector")
def recomputed_with_its_graph(model: nn.Module) -> nn.Module:
    """pytorch/pytorch#82776: stores what it recomputed with its graph, whose hooks refer to the store: a cycle."""
    return in_frames(model, lambda tensor: tensor)


class _OfTheInput(torch.autograd.Function):
    """Runs a block without a graph, and in backward again, for the gradient of its input."""

    @staticmethod
    def forward(ctx: Any, run: Forward, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.run = run
        ctx.save_for_backward(x)
        output: Tensor = run(x)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:  # type: ignore[override]
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.run(x)
        return None, torch.autograd.grad(output, x, grad)[0]


@defect(cause="gradients", caught_by="test_gradients_are_bitwise_those_without")
def of_the_input_alone(model: nn.Module) -> nn.Module:
    """ooples/AiDotNet.Tensors#643: backward differentiates the block by its input; its parameters get no gradient."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        return lambda x, *args, **kwargs: _OfTheInput.apply(lambda y: forward(y, *args, **kwargs), x)

    return wrapped(model, wrap)


@defect(cause="gradients", caught_by="test_any_history_is_to_the_bit")
def tensors_in_containers_detached(model: nn.Module) -> nn.Module:
    """huggingface/diffusers#12776: sees tensors that are themselves arguments; those in a tuple get no gradient."""

    def cut(x: Any) -> Any:
        return x if isinstance(x, Tensor) else tree_map_only(Tensor, Tensor.detach, x)

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        run = recomputed(forward)
        return lambda *args, **kwargs: run(*map(cut, args), **{name: cut(x) for name, x in kwargs.items()})

    return wrapped(model, wrap)


@defect(cause="gradients", caught_by="test_any_history_is_to_the_bit")
def tensors_in_objects_detached(model: nn.Module) -> nn.Module:
    """pytorch/pytorch#124725: sees tensors in tuples, lists and dicts; those in other objects get no gradient."""

    def cut(x: Any) -> Any:
        return SimpleNamespace(**tree_map_only(Tensor, Tensor.detach, vars(x))) if hasattr(x, "scale") else x

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        run = recomputed(forward)
        return lambda *args, **kwargs: run(*map(cut, args), **{name: cut(x) for name, x in kwargs.items()})

    return wrapped(model, wrap)


@contextmanager
def _recorded(states: list[Tensor]) -> Iterator[None]:
    states.append(torch.get_rng_state())
    yield


@contextmanager
def _replayed(states: list[Tensor]) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(states.pop())
        yield


@defect(cause="state", caught_by="test_dropout_drops_the_same_again")
def random_states_on_a_stack(model: nn.Module) -> nn.Module:
    """Each block keeps random states on a stack; another order of backwards takes those of another forward."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        states: list[Tensor] = []
        contexts = lambda: (_recorded(states), _replayed(states))  # noqa: E731
        return recomputed(forward, preserve_rng_state=False, context_fn=contexts)

    return wrapped(model, wrap)


@defect(cause="state", caught_by="test_any_history_is_to_the_bit")
def of_the_copied_model(model: nn.Module) -> nn.Module:
    """Each block's forward is a closure over that block, so a deep copy of the model runs the weights of the first."""
    return wrapped(model, lambda forward, block: lambda *args, **kwargs: recomputed(forward)(*args, **kwargs))


class _Listed(nn.Module):
    """A mixin of blocks that trains the parameters in `listed`."""

    listed: set[nn.Parameter]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return recomputed(self.run)(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        others = {name: p.detach() for name, p in self.named_parameters() if p not in self.listed}
        with _reparametrize_module(self, others):
            return super().forward(*args, **kwargs)


@defect(cause="gradients", caught_by="test_any_history_is_to_the_bit")
def of_the_parameters_at_first(model: nn.Module) -> nn.Module:
    """Lists a block's parameters when the policy is applied; what is assigned or added later gets no gradient."""
    for block in distinct_blocks(model):
        _mix_in(block, _Listed)
        vars(block)["listed"] = set(block.parameters())
    return model


@defect(cause="memory", caught_by="test_it_saves_where_an_evaluation_came_first")
def the_first_call_decides(model: nn.Module) -> nn.Module:
    """Keeps whether the first call needed gradients; if that was an evaluation, training saves nothing."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        decided: list[bool] = []

        def run(*args: Any, **kwargs: Any) -> Any:
            decided[:] = decided or [torch.is_grad_enabled()]
            return (recomputed(forward) if decided[0] else forward)(*args, **kwargs)

        return run

    return wrapped(model, wrap)


@defect(cause="memory", caught_by="test_it_saves_after_a_batch_that_raised_in_a_block")
def counts_depth_without_finally(model: nn.Module) -> nn.Module:
    """Recomputes the outermost block alone, and counts depth: an error in a block leaves the count above zero."""
    depth = [0]

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            depth[0] += 1
            output = (recomputed(forward) if depth[0] == 1 else forward)(*args, **kwargs)
            depth[0] -= 1
            return output

        return run

    return wrapped(model, wrap)


@defect(cause="shapes", caught_by="test_blocks_are_recomputed_on_inputs_of_the_same_strides")
def saves_a_packed_input(model: nn.Module) -> nn.Module:
    """Recomputes from a contiguous copy of the input: a block that takes a view of it fails, or gives other bits."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(x, *args, **kwargs)
            frame = _Frame(partial(forward, x.contiguous(), *args, **kwargs), Tensor.detach)
            with saved_tensors_hooks(frame.pack, frame.unpack):
                return forward(x, *args, **kwargs)

        return run

    return wrapped(model, wrap)
