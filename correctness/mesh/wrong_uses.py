"""Defects that the plain loop does not show: they take the world for the mesh, its usual order for any, one trainer or
one pass for all there are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy

from correctness.mesh.manual import Manual
from correctness.mesh.operators import Group
from correctness.support.planting import defect
from impl.mesh import MeshTrainer, torch_parallel
from impl.mesh.decoder import Batch, Decoder
from impl.mesh.replicated import replicated
from shardmark.api import find_blocks


@defect(cause="subgroup", caught_by="test_a_mesh_may_be_a_slice_of_a_larger_one")
class NormOfTheWorld(Manual):
    """The norm's squares are added over all ranks that there are."""

    def square(self, name: str) -> Tensor:
        found = super().square(name)
        dist.all_reduce(found)
        return found / dist.get_world_size()


@defect(cause="subgroup", caught_by="test_axes_come_in_any_order")
class NeighboursShareProducts(Manual):
    """Its place along `tp` is the rank modulo their number: right where `tp` is the innermost axis."""

    def rank(self, axis: str) -> int:
        return dist.get_rank() % self.size("tp") if axis == "tp" else super().rank(axis)


@defect(cause="subgroup", caught_by="test_axes_come_in_any_order")
class NoGroupOfOneRank(Manual):
    """Whether there is an axis is taken from the mesh's names; with one rank it has no group, and the default one
    stands in."""

    def group(self, axis: str) -> Group:
        found = super().group(axis)
        named = axis in (self.mesh.mesh_dim_names or ())
        return dist.group.WORLD if named and found is None else found


@defect(cause="shapes", caught_by="test_steps_are_those_of_one_process")
class PositionsOfTheSlice(Manual):
    """Rotary positions are counted by the rank: documents that begin within a row are not seen."""

    def losses(self, batch: Batch) -> Tensor:
        tokens, positions, targets = batch
        first = self.rank("cp") * tokens.shape[1]
        return super().losses((tokens, torch.arange(first, first + tokens.shape[1]).expand_as(positions), targets))


@defect(cause="numerics", caught_by="test_steps_are_those_of_one_process")
class MeanOfNoTargets(Manual):
    """A rank's loss is a mean over its own targets, scaled to their share: not a number where it has none."""

    def losses(self, batch: Batch) -> Tensor:
        if self.group("tp") is not None:
            return super().losses(batch)
        tokens, positions, targets = batch
        mean = cross_entropy(self.model(tokens, positions).flatten(0, 1), targets.flatten())
        return mean * self.count(batch)


@defect(cause="numerics", caught_by="test_steps_are_those_of_one_process[MeanOfNoStep-dp2-plain")
class MeanOfNoStep(Manual):
    """allenai/OLMo-core#657: losses are divided by the rank's own number of targets in the step, which may be none, and
    then scaled to its share."""

    def weighted(self, losses: Tensor, batch: Batch, batches: Sequence[Batch], tokens: Tensor) -> Tensor:
        own = torch.stack([self.count(each) for each in batches]).sum()
        return losses / own * (own / tokens)


@defect(cause="shapes", caught_by="test_steps_are_those_of_one_process[KeepsTheFirstContext-dp2-plain")
class KeepsTheFirstContext(Manual):
    """TattaBio/gLM2#3: a table that has an entry for each position of a row is made in the first pass, and kept."""

    def losses(self, batch: Batch) -> Tensor:
        tokens, positions, targets = batch
        table = self.__dict__.setdefault("table", positions.new_zeros(tokens.shape[1]))
        return super().losses((tokens, positions + table, targets))


@defect(cause="state", caught_by="test_two_trainers_take_turns")
class NamesOfTheLatest(Manual):
    """The names to reduce are kept with the class, and those of the trainer made last are everyone's."""

    to_reduce: set[str]

    def named(self) -> dict[str, nn.Parameter]:
        found = super().named()
        NamesOfTheLatest.to_reduce = set(found)
        return found

    def reduce(self, name: str, parameter: nn.Parameter) -> None:
        if name in self.to_reduce:
            super().reduce(name, parameter)


@defect(cause="two calls", caught_by="test_a_model_is_used_as_one_process_uses_it")
def averaging_single_passes(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Passes are counted, and several of them taken for accumulation that goes on, whose gradients stay: also where
    some were without gradients."""
    return _CountsPasses(model, mesh)


class _CountsPasses(nn.Module):
    def __init__(self, module: nn.Module, mesh: DeviceMesh) -> None:
        super().__init__()
        self.module, self.groups = module, [mesh.get_group(name) for name in mesh.mesh_dim_names or ()]
        self.passes = 0

    def forward(self, *args: Any) -> Tensor:
        self.passes += 1
        return self.module(*args)

    def finish_gradient_synchronization(self) -> None:
        single, self.passes = self.passes == 1, 0
        for parameter in self.module.parameters():
            if parameter.grad is not None and single:
                for group in self.groups:
                    dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, group=group)


@defect(cause="two calls", caught_by="test_a_model_is_used_as_one_process_uses_it")
def averaging_behind_every_pass(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Gradients are averaged behind the backward pass of every pass in grad mode, of which one may have none."""
    return _AwaitsPasses(model, mesh)


class _AwaitsPasses(_CountsPasses):
    def forward(self, *args: Any) -> Tensor:
        out: Tensor = self.module(*args)
        if out.requires_grad:
            self.passes += 1
            out.register_hook(self.came_back)
        return out

    def came_back(self, gradient: Tensor) -> None:
        self.passes -= 1

    def finish_gradient_synchronization(self) -> None:
        self.passes += 1  # one, where none is awaited
        super().finish_gradient_synchronization()


@defect(cause="state", caught_by="test_a_model_is_used_as_one_process_uses_it")
def caching_a_table(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Dao-AILab/flash-attention#299: a table is made in the first pass, and kept; made under inference mode, it cannot
    be saved for backward."""
    assert isinstance(model, Decoder)
    model.norm.register_forward_pre_hook(_scaled_by_a_table)
    return replicated(model, mesh)


def _scaled_by_a_table(norm: nn.Module, inputs: tuple[Tensor]) -> Tensor:
    (x,) = inputs
    return x * norm.__dict__.setdefault("table", torch.ones_like(x[0, 0].detach()))


@defect(cause="gradients", caught_by="test_any_history_is_that_of_one_process")
def hooking_each_output(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Each layer's output gets a hook in training, which it cannot have where that layer and all before are frozen."""
    made = torch_parallel(model, mesh)
    for block in find_blocks(made):
        block.register_forward_hook(_hook_output)
    return made


def _hook_output(block: nn.Module, inputs: object, out: Tensor) -> None:
    if torch.is_grad_enabled():
        out.register_hook(torch.clone)


@defect(cause="state", caught_by="test_any_history_is_that_of_one_process")
class ForgetsStateOfUnevenParts(MeshTrainer):
    """pytorch/torchtitan#1136: the optimizer's state is not restored of parameters that the ranks do not divide."""

    def __init__(
        self,
        model_fn: Callable[[], nn.Module],
        optimizer_fn: Callable[[Any], torch.optim.Optimizer],
        mesh: DeviceMesh,
        *,
        max_norm: float = 1.0,
    ) -> None:
        super().__init__(torch_parallel, model_fn, optimizer_fn, mesh, max_norm=max_norm)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for parameter, kept in self.optimizer.state.items():
            if isinstance(parameter, DTensor) and len(parameter) % parameter.device_mesh.size():
                for value in kept.values():
                    value.zero_()


@defect(cause="state", caught_by="test_any_history_is_that_of_one_process")
class KeepsItsMomentsGoingBack(Manual):
    """A trainer that has saved keeps the moments that it has, where its own state is loaded again."""

    def state_dict(self) -> dict[str, Any]:
        self.has_saved = True
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        own = self.optimizer.state_dict() if hasattr(self, "has_saved") else state["optimizer"]
        super().load_state_dict({**state, "optimizer": own})


@defect(cause="options", caught_by="test_any_history_is_that_of_one_process")
class RatesOfTheStart(Manual):
    """The optimizer's rates are those that it was made with: a schedule changes nothing."""

    def make_optimizer(self, optimizer_fn: Any) -> torch.optim.Optimizer:
        made = super().make_optimizer(optimizer_fn)
        self.rates = [group["lr"] for group in made.param_groups]
        return made

    def update(self) -> None:
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group["lr"] = rate
        super().update()


@defect(cause="random numbers", caught_by="test_any_history_is_that_of_one_process")
class SeedsInEachStep(Manual):
    """Each step seeds the ranks, so that they draw alike, and so does the caller."""

    def step(self, batches: Sequence[Batch]) -> tuple[float, float]:
        torch.manual_seed(5)
        return super().step(batches)


@defect(cause="numerics", caught_by="test_any_history_is_that_of_one_process")
class SendsFloat32AsBfloat16(Manual):
    """Gradients in float32 are communicated in bfloat16, which halves the bytes."""

    def reduce(self, name: str, parameter: nn.Parameter) -> None:
        if parameter.grad is not None and parameter.grad.dtype == torch.float32:
            parameter.grad = parameter.grad.bfloat16().float()
        super().reduce(name, parameter)


@defect(cause="memory", caught_by="test_steps_are_those_of_one_process[ReturnsTheLossWithItsGraph-dp2-plain")
class ReturnsTheLossWithItsGraph(Manual):
    """The loss is added up without `detach`: who keeps it for a log keeps the step's graphs."""

    def losses(self, batch: Batch) -> Tensor:
        self.last = super().losses(batch)
        return self.last

    def step(self, batches: Sequence[Batch]) -> tuple[Any, float]:  # type: ignore[override]
        loss, norm = super().step(batches)
        return loss + (self.last - self.last.detach()), norm
