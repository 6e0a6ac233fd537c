"""Planted defects: wrong for some losses, or where a step does not go as usual."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from correctness.data_parallel.wrappers import Overlapped, Plain
from correctness.support.planting import defect
from impl.distributed import backward_twice


class _AsTheyAre(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return gradients


@defect(cause="two calls", caught_by="test_gradients_are_averaged_whatever_a_loss_does[OutputsThatAreViews")
class OutputsThatAreViews(Plain):
    """pytorch/pytorch#61982: a Function between module and loss returns views, which nobody may change in place."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return through(_AsTheyAre, super().forward(*args, **kwargs), lambda x: x.requires_grad)


def through(function: type[torch.autograd.Function], outputs: Any, followed: Callable[[Tensor], bool]) -> Any:
    """The outputs, of which these go through the Function."""
    leaves, structure = tree_flatten(outputs)
    places = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and followed(x)]
    for i, x in zip(places, function.apply(*(leaves[i] for i in places)), strict=True):
        leaves[i] = x
    return tree_unflatten(leaves, structure)


class _Copies(_AsTheyAre):
    @staticmethod
    def forward(ctx: Any, *outputs: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        ctx.set_materialize_grads(False)
        return tuple(output.clone() for output in outputs)


@defect(cause="gradients", caught_by="test_any_history_averages_gradients")
class EveryOutputHasAHistory(Plain):
    """pytorch/pytorch#60733: a Function has all outputs, also those that need no gradient, and so gives them one."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return through(_Copies, super().forward(*args, **kwargs), torch.is_floating_point)


@defect(cause="gradients", caught_by="test_gradients_are_averaged_whatever_forward_returns")
class LooksIntoKnownContainers(Plain):
    """huggingface/transformers#25357: looks for outputs in containers that PyTorch knows. A subclass of OrderedDict has
    none, and there is nothing to average."""

    outputs = 1

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        returned = super().forward(*args, **kwargs)
        if torch.is_grad_enabled():
            self.outputs = sum(not isinstance(each, dict) for each in tree_leaves(returned))
        return returned

    def average(self, parameters: list[nn.Parameter]) -> None:
        if self.outputs:
            super().average(parameters)


@defect(cause="gradients", caught_by="test_gradients_are_averaged_whatever_a_loss_does[TakesGradForBackward")
class TakesGradForBackward(Overlapped):
    """Hooks of gradients note a pass: they run where `torch.autograd.grad` is asked for the parameters' gradients."""

    def start(self) -> None:
        super().start()
        self.came: set[nn.Parameter] = set()
        for p in self.order:
            p.register_hook(self.noting(weakref.ref(p)))

    def noting(self, parameter: weakref.ref[nn.Parameter]) -> Any:
        this = weakref.ref(self)

        def note(gradient: Tensor) -> None:
            wrapper, p = this(), parameter()
            if wrapper is None or p is None or not wrapper.synchronizing:
                return
            if p in wrapper.came:
                raise backward_twice()
            wrapper.came.add(p)

        return note

    def finish_gradient_synchronization(self) -> None:
        super().finish_gradient_synchronization()
        self.came.clear()


@defect(cause="gradients", caught_by="test_gradients_are_averaged_whatever_a_loss_does[WaitsForWhatOutputsReach")
class WaitsForWhatOutputsReach(Plain):
    """pytorch/pytorch#20586: gradients are expected of all parameters that outputs reach. Where the loss leaves out an
    output, one of them does not come, and the others in its bucket wait for it."""

    def start(self) -> None:
        super().start()
        self.expected: set[nn.Parameter] = set()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        output = super().forward(*args, **kwargs)
        nodes = {x.grad_fn for x in tree_leaves(output) if isinstance(x, Tensor) and x.grad_fn is not None}
        following = [*nodes]
        while following:
            ahead = {node for node, _ in following.pop().next_functions if node is not None} - nodes
            nodes |= ahead
            following += ahead
        self.expected = {node.variable for node in nodes if hasattr(node, "variable")}
        return output

    def average(self, parameters: list[nn.Parameter]) -> None:
        waiting = torch.tensor(float(any(p.grad is None for p in self.expected)))
        dist.all_reduce(waiting, group=self.group)
        if not waiting:
            super().average(parameters)


@defect(cause="gradients", caught_by="test_gradients_are_averaged_whatever_a_loss_does[EndsWithAnInnerPass")
class EndsWithAnInnerPass(Overlapped):
    """facebookresearch/fairscale#753: averages in a callback at the end of the pass in which the first gradient comes.
    Where a part is recomputed in a pass of its own, that is its end, and other gradients come after it."""

    queued = False

    def on_gradient(self, parameter: nn.Parameter) -> None:
        if not self.synchronizing:
            return
        if parameter in self.ready:
            raise backward_twice()
        self.ready.add(parameter)
        if not self.queued:
            self.queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self.end)

    def end(self) -> None:
        self.average(self.order)

    def finish_gradient_synchronization(self) -> None:
        if self.synchronizing:
            if not self.queued:
                self.end()
            self.queued = False
            self.ready.clear()


@defect(cause="state", caught_by="test_gradients_are_averaged_whatever_a_loss_does[StaysInACallThatFails")
class StaysInACallThatFails(Plain):
    """Notes that a forward pass is under way, and that it is over, but not where it raises an error."""

    inside = 0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.inside += 1
        output = super().forward(*args, **kwargs)
        self.inside -= 1
        return output

    def finish_gradient_synchronization(self) -> None:
        if not self.inside:
            super().finish_gradient_synchronization()


@defect(
    cause="state",
    caught_by="test_gradients_are_averaged_whatever_a_loss_does[StaysInAPartThatFails-2ranks-after_an_error_in_forward",
)
class StaysInAPartThatFails(StaysInACallThatFails):
    """Hooks note that a part is entered and left: where its forward raises an error, it is not left."""

    def start(self) -> None:
        super().start()
        for part in [*self.module.modules()][1:]:
            part.register_forward_pre_hook(lambda *_: self.count(1))
            part.register_forward_hook(lambda *_: self.count(-1))

    def count(self, by: int) -> None:
        self.inside += by

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


@defect(cause="gradients", caught_by="test_gradients_are_averaged_whatever_a_loss_does[ReducesWhatFlowsOn")
class ReducesWhatFlowsOn(Plain):
    """A hook averages the gradient in place: backward of `layer(x) + table` goes on with the same tensor."""

    def start(self) -> None:
        super().start()
        for p in self.module.parameters():
            p.register_hook(self.reduced)

    def reduced(self, gradient: Tensor) -> Tensor:
        self.reduce(gradient)
        return gradient

    def average(self, parameters: list[nn.Parameter]) -> None:
        pass


@defect(cause="gradients", caught_by="test_gradients_are_averaged_whatever_a_loss_does[LeavesSparseOnesLocal")
class LeavesSparseOnesLocal(Plain):
    """A bucket takes no sparse gradient, and nothing else does."""

    def average(self, parameters: list[nn.Parameter]) -> None:
        super().average([p for p in parameters if p.grad is None or not p.grad.is_sparse])


@defect(cause="gradients", caught_by="test_gradients_are_averaged_whatever_a_loss_does[SumsWhenFinishedAgain")
class SumsWhenFinishedAgain(Overlapped):
    """The first gradient of a pass sets what sums are divided by, and the end takes it back: another end sums."""

    divisor = 1

    def on_gradient(self, parameter: nn.Parameter) -> None:
        self.divisor = self.size

    def reduce(self, gradient: Tensor) -> None:
        dist.all_reduce(gradient, group=self.group)
        gradient.div_(self.divisor)

    def finish_gradient_synchronization(self) -> None:
        if self.synchronizing:
            self.average(self.order)
            self.divisor = 1


@defect(
    cause="gradients",
    caught_by="test_gradients_are_averaged_whatever_a_loss_does[ArmedByItsForward-2ranks-a_step_for_each_of_two_losses",
)
class ArmedByItsForward(Plain):
    """huggingface/trl#7245: averages only after a forward pass of its own since the last time."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.armed = True
        return super().forward(*args, **kwargs)

    def average(self, parameters: list[nn.Parameter]) -> None:
        if self.__dict__.pop("armed", False):
            super().average(parameters)


@defect(cause="two calls", caught_by="test_gradients_are_averaged_whatever_a_loss_does[CountsItsForwards")
class CountsItsForwards(Overlapped):
    """pytorch/pytorch#121594: allows one gradient for each forward pass, and averages the first of them alone."""

    def start(self) -> None:
        super().start()
        self.forwards = 0
        self.came: dict[nn.Parameter, int] = {}
        self.sent: dict[nn.Parameter, tuple[Tensor, Tensor]] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.forwards += torch.is_grad_enabled() and self.synchronizing
        return super().forward(*args, **kwargs)

    def on_gradient(self, parameter: nn.Parameter) -> None:
        self.came[parameter] = self.came.get(parameter, 0) + 1
        if parameter not in self.ready:
            super().on_gradient(parameter)
        elif self.came[parameter] > self.forwards:
            raise backward_twice()

    def launch(self, parameter: nn.Parameter) -> None:
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
        self.sent[parameter] = own.detach().clone(), own.detach().clone()
        self.handles.append(dist.all_reduce(self.sent[parameter][1], group=self.group, async_op=True))

    def wait(self) -> None:
        for handle, p in zip(self.handles, self.order, strict=True):
            handle.wait()
            own, total = self.sent[p]
            p.grad = total / self.size + (0 if p.grad is None else p.grad.detach() - own)
        self.came.clear()
        self.sent.clear()
        self.forwards = 0
