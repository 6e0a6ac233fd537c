"""Planted defects that only some orders of events, or some modules, show."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.data_parallel.wrappers import Overlapped, Plain
from correctness.support.planting import defect
from impl.distributed import broadcast_in_place


@defect(cause="state", caught_by="test_any_history")
class LearnsUsedOnce(Plain):
    """Learns in the first step which parameters any rank uses, and later averages only those."""

    used: list[nn.Parameter] | None = None

    def average(self, parameters: list[nn.Parameter]) -> None:
        if self.used is None:
            flags = torch.tensor([float(p.grad is not None) for p in parameters], device=parameters[0].device)
            dist.all_reduce(flags, group=self.group)
            self.used = [p for p, flag in zip(parameters, flags.tolist(), strict=True) if flag]
        super().average(self.used)


@defect(cause="state", caught_by="test_any_history")
class BroadcastsBuffersAtEval(Plain):
    """Broadcasts buffers in `eval()`, so that every rank evaluates with equal running statistics."""

    def train(self, mode: bool = True) -> BroadcastsBuffersAtEval:
        super().train(mode)
        for buffer in () if mode else self.module.buffers():
            dist.broadcast(buffer, group=self.group, group_src=0)
        return self


@defect(cause="handles", caught_by="test_any_history")
class NoSyncFromTheCall(Plain):
    """`no_sync()` takes effect when called, not when entered."""

    held = 0

    def no_sync(self) -> Any:
        self.held += 1
        stack = ExitStack()
        stack.callback(setattr, self, "held", self.held - 1)
        return stack

    def finish_gradient_synchronization(self) -> None:
        if not self.held:
            super().finish_gradient_synchronization()


@defect(cause="two calls", caught_by="test_any_history")
class NotesPlacesOnParameters(Plain):
    """Stores its indices on the parameters, where a wrapper of a submodule stores its own."""

    def start(self) -> None:
        super().start()
        for i, p in enumerate(p for p in self.module.parameters() if p.requires_grad):
            p.place = i  # type: ignore[attr-defined]

    def average(self, parameters: list[nn.Parameter]) -> None:
        own = {p.place: p for p in parameters}  # type: ignore[attr-defined]
        super().average([own[place] for place in sorted(own)])


@defect(cause="options", caught_by="test_bucket_mb")
class ClosesABucketAtEachDtype(Plain):
    """Alternating dtypes make one bucket per parameter."""

    def __init__(self, module: nn.Module, *, process_group: Any = None, bucket_mb: float = 25) -> None:
        super().__init__(module, process_group=process_group)
        self.room = bucket_mb * 2**20

    def average(self, parameters: list[nn.Parameter]) -> None:
        buckets: list[list[nn.Parameter]] = [[]]
        for p in parameters[::-1]:
            last = buckets[-1]
            if last and (last[0].dtype != p.dtype or sum(q.nbytes for q in last) + p.nbytes > self.room):
                buckets.append([])
            buckets[-1].append(p)
        for bucket in buckets:
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]
            flat = torch.cat([gradient.flatten() for gradient in gradients])
            self.reduce(flat)
            for p, part in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
                p.grad = part.view(p.shape).clone()


@defect(cause="shapes", caught_by="test_any_history")
class SendsMemoryAsItLies(Plain):
    """Sends memory as it lies: right if a parameter's strides are equal on every rank."""

    def average(self, parameters: list[nn.Parameter]) -> None:
        for p in parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
            memory: Tensor = p.grad.permute(sorted(range(p.dim()), key=lambda i: -p.grad.stride(i)))
            self.reduce(memory)


@defect(cause="gradients", caught_by="test_passes_before_an_error_count_where_later_ones_do_not_reach")
class CompletesAtTheEndOfAPass(Overlapped):
    """Sends zeros for gradients that lack at the end of a pass: those that another one brings stay local."""

    def on_gradient(self, parameter: nn.Parameter) -> None:
        if self.synchronizing and not self.ready:
            torch.autograd.Variable._execution_engine.queue_callback(self.end)
        super().on_gradient(parameter)

    def end(self) -> None:
        for p in self.order[len(self.handles) :]:
            self.launch(p)
        for handle in self.handles:
            handle.wait()


@defect(cause="gradients", caught_by="test_any_history")
class AveragesItsViews(Plain):
    """facebookresearch/fairscale#354: gradients are views from a forward pass on, and another tensor that the user puts
    in the place of one is not averaged.
    """

    def start(self) -> None:
        super().start()
        self.views: dict[nn.Parameter, Tensor] = {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for p in self.module.parameters():
            if torch.is_grad_enabled() and p.requires_grad and p.grad is None:
                self.views[p] = p.grad = torch.zeros_like(p)
        return super().forward(*args, **kwargs)

    def average(self, parameters: list[nn.Parameter]) -> None:
        for p in parameters:
            found, p.grad = p.grad, self.views.get(p, p.grad)
            super().average([p])
            p.grad = found


@defect(cause="gradients", caught_by="test_parameters_equal_a_single_process_on_the_whole_batch[AveragesEachMemoryOnce")
class AveragesEachMemoryOnce(Plain):
    """safetensors/safetensors#379: parameters that share memory are taken for tied ones; only the first is averaged."""

    def average(self, parameters: list[nn.Parameter]) -> None:
        by_memory = {p.untyped_storage().data_ptr(): p for p in reversed(parameters)}
        super().average([p for p in parameters if by_memory[p.untyped_storage().data_ptr()] is p])


@defect(cause="two calls", caught_by="test_gradients_are_averaged_whatever_a_loss_does[HooksOnNodes")
class HooksOnNodes(Plain):
    """pytorch/pytorch#104336: averages what hooks on the nodes saw; after a cast, parameters have others."""

    def start(self) -> None:
        super().start()
        reached = self.reached = torch.zeros(())

        def reach(*_: Any) -> None:
            reached.fill_(1)

        functions = [p.expand_as(p).grad_fn for p in self.module.parameters() if p.requires_grad]
        self.nodes = [function.next_functions[0][0] for function in functions if function is not None]
        for node in self.nodes:
            node.register_hook(reach)

    def average(self, parameters: list[nn.Parameter]) -> None:
        dist.all_reduce(self.reached, group=self.group)
        if self.reached:
            super().average(parameters)
        self.reached.zero_()


@defect(cause="subgroup", caught_by="test_any_history")
class StartsFromTheLowestRank(Plain):
    """Takes the lowest of a group's ranks for its first one, also where the group has another order."""

    def start(self) -> None:
        ranks = dist.get_process_group_ranks(self.group)
        for tensor in (*self.module.parameters(), *self.module.buffers()):
            broadcast_in_place(tensor, self.group, ranks.index(min(ranks)))


@defect(cause="two calls", caught_by="test_modules_work_as_before")
class MovesTensors(Plain):
    """Moves tensors that it is given to a device by a copy: what forward writes into one is lost."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        given = {name: x.clone() if isinstance(x, Tensor) else x for name, x in kwargs.items()}
        return super().forward(*(x.clone() if isinstance(x, Tensor) else x for x in args), **given)


@defect(cause="options", caught_by="test_modules_work_as_before")
class LooksAtItsFirstInput(Plain):
    """Takes the first input by position, of which a call by name has none."""

    def forward(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        return super().forward(first, *args, **kwargs)


@defect(cause="two calls", caught_by="test_gradients_are_averaged_whatever_forward_returns")
class PlainContainers(Plain):
    """Goes through outputs and builds their containers anew: tuples without names, and dicts of no class of their
    own."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.anew(super().forward(*args, **kwargs))

    def anew(self, output: Any) -> Any:
        if isinstance(output, dict):
            return {name: self.anew(each) for name, each in output.items()}
        return tuple(map(self.anew, output)) if isinstance(output, tuple) else output


@defect(cause="gradients", caught_by="test_any_history")
class AveragesEachBufferOnce(Plain):
    """Takes gradients that share memory for those of tied parameters, and averages the first alone."""

    def average(self, parameters: list[nn.Parameter]) -> None:
        seen: set[int] = set()
        for p in parameters:
            memory = 0 if p.grad is None else p.grad.untyped_storage().data_ptr()
            if memory and memory in seen:
                self.reduce(torch.zeros_like(p).contiguous())  # as other ranks may lack this gradient
            else:
                super().average([p])
            seen.add(memory)
