"""The suite's runner: carries out a plan, an action after the other, with messages that it does not wait for until it
needs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.distributed import full
from impl.pipeline.actions import NEEDS, Action, Kind, Plan, ranks_of_stages
from impl.pipeline.deferred import Later, deferring, prepare
from impl.pipeline.exchange import Exchange, Like, Shapes, Tensors
from impl.pipeline.wrappers import accumulating, outermost_wrappers, reduce, widen

Build = Callable[[int, int], nn.Module]
Loss = Callable[[Any, Any], Tensor]
Does = Callable[[Action], None]


class Runner:
    """See `impl.pipeline.Pipeline` for its contract."""

    def __init__(
        self,
        plan: Plan,
        build: Build,
        group: dist.ProcessGroup,
        loss: Loss,
        like: Callable[[Shapes], Like] | None = None,
    ) -> None:
        self.group, self.loss, self.actions = group, loss, plan[group.rank()]
        self.rank_of = ranks_of_stages(plan)
        self.stages = len(self.rank_of)
        self.micro_batches = 1 + max(action.micro_batch for action in self.actions)
        own = [stage for stage, rank in self.rank_of.items() if rank == group.rank()]
        self.modules = {stage: build(stage, self.stages) for stage in own}
        for stage in {action.stage for action in self.actions if action.kind == Kind.WEIGHT}:
            prepare(self.modules[stage])
        self.wrappers = [wrapper for module in self.modules.values() for wrapper in outermost_wrappers(module)]
        self.exchange = Exchange(group, self.rank_of, like)
        self.around: Callable[[Does, Action], None] = lambda does, action: does(action)
        """Carries out an action, once it has what it needs. Meters and timelines put themselves around it."""
        self._does: dict[Kind, Does] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT: self._backward,
            Kind.WEIGHT: self._weights,
            Kind.SEND_FORWARD: self.exchange.send,
            Kind.SEND_BACKWARD: self.exchange.send,
            Kind.RECEIVE_FORWARD: self.exchange.receive,
            Kind.RECEIVE_BACKWARD: self.exchange.receive,
        }

    def step(
        self, inputs: Sequence[Tensors], targets: Sequence[Any], named: Sequence[Mapping[str, Any]] = ()
    ) -> Tensor:
        """Gradients of the sum of the micro-batches' losses are added to those of the stages; returns that sum, the
        same on every rank. Every stage gets a micro-batch's `named` arguments, which each rank has."""
        if not len(inputs) == len(targets) == self.micro_batches:
            raise ValueError(
                f"it was made for {self.micro_batches} micro-batches: these are {len(inputs)} inputs and "
                f"{len(targets)} targets"
            )
        self.inputs, self.targets, self.named = inputs, targets, named or [{}] * self.micro_batches
        self.kept: dict[tuple[int, int], tuple[Tensors, Tensors]] = {}
        """Inputs and outputs of forward passes, by stage and micro-batch, until their backward passes."""
        self.later: dict[tuple[int, int], Later] = {
            (action.stage, action.micro_batch): Later() for action in self.actions if action.kind == Kind.WEIGHT
        }
        device = inputs[0][0].device
        self.total = torch.zeros((), dtype=torch.float64, device=device)
        self.exchange.begin([tuple(each.shape for each in x) for x in inputs], device)
        try:
            self._run()
        finally:  # nothing of a step is left but gradients
            self.inputs = self.targets = self.named = ()
            self.kept.clear()
            self.later.clear()
        dist.all_reduce(self.total, group=self.group)
        return self.total

    def _run(self) -> None:
        with accumulating(self.wrappers):
            for action in self.actions:
                if action.kind in NEEDS:
                    self.exchange.wait_for(action)
                self.around(self._does[action.kind], action)
        for wrapper in self.wrappers:
            reduce(wrapper)
        self.exchange.end()

    def _forward(self, action: Action) -> None:
        """The loss is the last stage's output."""
        stage, number = key = action.stage, action.micro_batch
        x = self.inputs[number] if stage == 0 else self._as_inputs(self.exchange.arrived(action))
        with deferring(self.later.get(key)):
            outputs = self.modules[stage](*x, **self.named[number])
        if stage == self.stages - 1:
            loss = self.loss(outputs, self.targets[number])
            self.total += full(loss.detach())  # under loss_parallel it is a DTensor
            self.kept[key] = x, (loss,)
            return
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        self.kept[key] = x, outputs
        self.exchange.leave(action, tuple(each.detach() for each in outputs))

    def _backward(self, action: Action) -> None:
        stage, key = action.stage, (action.stage, action.micro_batch)
        x, outputs = self.kept.pop(key)
        gradients: Sequence[Tensor | None] = [None] if stage == self.stages - 1 else self.exchange.arrived(action)
        trained = [(out, gradient) for out, gradient in zip(outputs, gradients, strict=True) if out.requires_grad]
        with deferring(self.later.get(key)):
            if trained:
                torch.autograd.backward([out for out, _ in trained], [gradient for _, gradient in trained])
        if stage > 0:
            self.exchange.leave(action, tuple(torch.zeros_like(each) if each.grad is None else each.grad for each in x))

    def _weights(self, action: Action) -> None:
        self.later.pop((action.stage, action.micro_batch)).find()
        for wrapper in self.wrappers:
            widen(wrapper)

    def _as_inputs(self, arrived: Tensors) -> Tensors:
        """Tensors of a graph of their own, whose gradients are to be sent back."""
        return tuple(each.detach().requires_grad_(each.is_floating_point() or each.is_complex()) for each in arrived)
