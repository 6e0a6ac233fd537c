"""Planted defects: checkpointing policies with one mistake each."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from correctness.checkpointing.models import distinct_blocks
from correctness.support.planting import defect

Forward = Callable[..., Any]


def wrapped(model: nn.Module, wrap: Callable[[Forward, nn.Module], Forward]) -> nn.Module:
    """Replace each block's forward by `wrap(forward, block)`; return the model."""
    for block in distinct_blocks(model):
        block.forward = wrap(block.forward, block)
    return model


def recomputed(forward: Forward, **options: Any) -> Forward:
    return partial(checkpoint, forward, **{"use_reentrant": False, **options})


@defect(cause="memory", caught_by="test_it_saves_in_each_mode")
def of_no_block(model: nn.Module) -> nn.Module:
    """Checkpoints no block, as with each n-th block for an n above their number."""
    return wrapped(model, lambda forward, block: lambda *args, **kwargs: forward(*args, **kwargs))


@defect(cause="memory", caught_by="test_it_saves_in_each_mode")
def activations_in_a_list(model: nn.Module) -> nn.Module:
    """Keeps all activations in a list, by hooks: backward never frees them."""
    kept: list[Any] = []

    def keeping(forward: Forward, block: nn.Module) -> Forward:
        for part in block.modules():
            part.register_forward_hook(lambda module, inputs, output: kept.append((inputs, output)))
        return recomputed(forward)

    return wrapped(model, keeping)


@defect(cause="memory", caught_by="test_it_saves_in_each_mode")
def all_at_once(model: nn.Module) -> nn.Module:
    """Backward recomputes all blocks before it goes through the last."""
    wrapped(model, lambda forward, block: forward)
    blocks = model.blocks

    class Loop(nn.ModuleList):
        def __iter__(self) -> Any:
            parts = list(self._modules.values())
            run = lambda x, *args, **kwargs: [x := part(x, *args, **kwargs) for part in parts][-1]  # noqa: E731
            yield partial(checkpoint, run, use_reentrant=False) if torch.is_grad_enabled() else run

    blocks.__class__ = Loop
    return model


@defect(cause="memory", caught_by="test_it_saves_in_each_mode")
def keeps_inputs(model: nn.Module) -> nn.Module:
    """Keeps each input in a list that is never emptied."""

    def keeping(forward: Forward, block: nn.Module) -> Forward:
        inputs: list[Tensor] = []

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            inputs.append(x.detach())
            return checkpoint(forward, x, *args, use_reentrant=False, **kwargs)

        return run

    return wrapped(model, keeping)


@defect(cause="state", caught_by="test_dropout_drops_the_same_again")
def other_random_numbers(model: nn.Module) -> nn.Module:
    """allenai/OLMo-core#828, pytorch/xla#4690: backward draws new random numbers."""
    return wrapped(model, lambda forward, block: recomputed(forward, preserve_rng_state=False))


@defect(cause="gradients", caught_by="test_any_history")
def reentrant(model: nn.Module) -> nn.Module:
    """ai2cm/ace#1493, pytorch/pytorch#7617: if no input needs a gradient, autograd treats the block as a constant."""
    return wrapped(model, lambda forward, block: recomputed(forward, use_reentrant=True))


@defect(cause="state", caught_by="test_any_history")
def random_state_left_behind(model: nn.Module) -> nn.Module:
    """pytorch/pytorch#14253: backward changes the random state: it sets that of forward, and leaves it there."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            random, again = torch.get_rng_state(), False

            def body(*inputs: Any, **named: Any) -> Any:
                nonlocal again
                if again:
                    torch.set_rng_state(random)
                again = True
                return forward(*inputs, **named)

            return checkpoint(body, x, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)

        return run

    return wrapped(model, wrap)


@defect(cause="numerics", caught_by="test_gradients_under_autocast")
def autocast_forgotten(model: nn.Module) -> nn.Module:
    """NVIDIA/TransformerEngine#787, pytorch/pytorch#148831: the recomputation runs without autocast."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            again = False

            def body(*inputs: Any, **named: Any) -> Any:
                nonlocal again
                off, again = again, True
                if not off or not torch.is_autocast_enabled("cpu"):
                    return forward(*inputs, **named)
                with torch.autocast("cpu", enabled=False):
                    return forward(*inputs, **named).bfloat16().to(inputs[0].dtype)

            return checkpoint(body, *args, use_reentrant=False, determinism_check="none", **kwargs)

        return run

    return wrapped(model, wrap)


@defect(cause="two calls", caught_by="test_any_history")
def one_input_a_block(model: nn.Module) -> nn.Module:
    """Keeps the input on the block, where the next forward replaces it."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        last: list[Tensor] = []

        def run(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            last[:] = [x]
            again = False

            def body(given: Tensor, *inputs: Any, **named: Any) -> Any:
                nonlocal again
                if again and last[0].shape == given.shape:
                    given = last[0].detach().requires_grad_(given.requires_grad)
                again = True
                return forward(given, *inputs, **named)

            return checkpoint(body, x, *args, use_reentrant=False, **kwargs)

        return run

    return wrapped(model, wrap)


@defect(cause="state", caught_by="test_parameters_stay_the_same_objects")
def of_copies(model: nn.Module) -> nn.Module:
    """An optimizer made before the policy holds parameters that the model no longer uses."""
    for i, block in enumerate(getattr(model, "blocks", ())):
        model.blocks[i] = copy.deepcopy(block)
    return wrapped(model, lambda forward, block: recomputed(forward))


@defect(cause="state", caught_by="the contract's check")
def in_wrappers(model: nn.Module) -> nn.Module:
    """pytorch/pytorch#80089: wrappers put their own name into the parameters' names."""

    class Wrapper(nn.Module):
        def __init__(self, block: nn.Module) -> None:
            super().__init__()
            self.block = block

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            return checkpoint(self.block, *args, use_reentrant=False, **kwargs)

    model.blocks = nn.ModuleList(map(Wrapper, model.blocks))
    return model


@defect(cause="gradients", caught_by="test_in_eval_mode")
def detached(model: nn.Module) -> nn.Module:
    """Cuts the last block's inputs from the graph, also where the model evaluates."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        run = recomputed(forward)
        return lambda *args, **kwargs: run(*args, **kwargs) if block.training else forward(*args, **kwargs).detach()

    return wrapped(model, wrap)


@defect(cause="errors", caught_by="test_a_model_without_blocks_is_refused")
def silent_without_blocks(model: nn.Module) -> nn.Module:
    return wrapped(model, lambda forward, block: recomputed(forward)) if getattr(model, "blocks", None) else model


@defect(cause="errors", caught_by="test_a_second_policy_is_refused")
def again_and_again(model: nn.Module) -> nn.Module:
    """meta-llama/llama-cookbook#740: each application recomputes more, without an error."""
    for block in getattr(model, "blocks", ()):
        vars(block).setdefault("forward", recomputed(block.forward))
    return wrapped(nn.Module(), recomputed) if not getattr(model, "blocks", None) else model


@defect(cause="memory", caught_by="test_it_saves_in_each_mode")
def only_in_training(model: nn.Module) -> nn.Module:
    """huggingface/diffusers#9850: saves everything in eval mode."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        run = recomputed(forward)
        return lambda *args, **kwargs: (run if block.training else forward)(*args, **kwargs)

    return wrapped(model, wrap)


@defect(cause="memory", caught_by="test_it_saves_in_each_mode")
def keeps_inputs_of_frozen(model: nn.Module) -> nn.Module:
    """Each block keeps its last input that needs no gradient, for a backward that may never come."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        run = recomputed(forward)

        def keeping(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            if not x.requires_grad:
                vars(block)["last"] = x
            return run(x, *args, **kwargs)

        return keeping

    return wrapped(model, wrap)


@defect(cause="state", caught_by="test_any_history")
def dropout_among_children(model: nn.Module) -> nn.Module:
    """Restores the random state for direct children alone; dropout deeper down draws new numbers."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        drops = any(isinstance(part, nn.Dropout) for part in block.children())
        return recomputed(forward, preserve_rng_state=drops)

    return wrapped(model, wrap)


@defect(cause="gradients", caught_by="test_any_history")
def keywords_detached(model: nn.Module) -> nn.Module:
    """unslothai/unsloth-zoo#1038: tensors passed by keyword get no gradient."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        def run(*args: Any, **kwargs: Any) -> Any:
            cut = {name: x.detach() if isinstance(x, Tensor) else x for name, x in kwargs.items()}
            return checkpoint(forward, *args, use_reentrant=False, **cut)

        return run

    return wrapped(model, wrap)


@defect(cause="state", caught_by="test_any_history")
def random_state_of_blocks_in_training(model: nn.Module) -> nn.Module:
    """Restores the random state only of blocks in training; a dropout may train where its block evaluates."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        return lambda *args, **kwargs: recomputed(forward, preserve_rng_state=block.training)(*args, **kwargs)

    return wrapped(model, wrap)


@defect(cause="memory", caught_by="test_it_saves_in_each_mode")
def frozen_blocks_are_not_checkpointed(model: nn.Module) -> nn.Module:
    """Skips frozen blocks, though backward passes through them to trained layers before them."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        run, parameters = recomputed(forward), list(block.parameters())
        return lambda *args, **kwargs: (run if any(p.requires_grad for p in parameters) else forward)(*args, **kwargs)

    return wrapped(model, wrap)


@defect(cause="state", caught_by="test_dropout_drops_the_same_again")
def asks_for_dropout_too_early(model: nn.Module) -> nn.Module:
    """Looks for dropout when the policy is applied; in a model that evaluates then, none draws random numbers."""

    def wrap(forward: Forward, block: nn.Module) -> Forward:
        draws = any(isinstance(each, nn.Dropout) and each.training for each in block.modules())
        return recomputed(forward, preserve_rng_state=draws)

    return wrapped(model, wrap)
