"""Defects of the reduction of gradients, each from a report: over too few axes, twice, or of the wrong passes."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from correctness.mesh.manual import Manual
from correctness.mesh.operators import summed
from correctness.support.planting import defect
from impl.mesh.decoder import Batch


@defect(cause="communication", caught_by="tp2-plain]")
class ForgetsTheLastNorm(Manual):
    """NVIDIA/Megatron-LM#1446: the norm after the last layer is not among those whose gradients are summed over tp."""

    def is_on_slices(self, name: str) -> bool:
        return super().is_on_slices(name) and name != "norm.weight"


@defect(cause="communication", caught_by="tp2-plain]")
class FindsNoNorms(Manual):
    """NVIDIA-NeMo/Speech#7184: the mark by which norms are looked for has another name than the one they have."""

    def is_on_slices(self, name: str) -> bool:
        return getattr(self.parameters[name], "sequence_parallel_enabled", False)


@defect(cause="communication", caught_by="tp2-plain]")
class SumsNormsOfTheFirstLayer(Manual):
    """bigcode-project/Megatron-LM#12: gradients of replicated parameters are reduced in the first chunk only."""

    def is_on_slices(self, name: str) -> bool:
        return super().is_on_slices(name) and not name.startswith("layers.1")


@defect(cause="two calls", caught_by="tp2-plain]")
class AnotherStepForManyMicroBatches(Manual):
    """NVIDIA-NeMo/RL#3716: a second way through a step ends without the reduction over tp."""

    many = False

    def step(self, batches: Sequence[Batch]) -> tuple[float, float]:
        self.many = len(batches) > 1
        return super().step(batches)

    def is_on_slices(self, name: str) -> bool:
        return super().is_on_slices(name) and not self.many


@defect(cause="communication", caught_by="dp2_tp2-plain]")
class LosesTheOtherAxis(Manual):
    """pytorch/torchtitan#2532: of a parameter on two axes, unwrapped to its local tensor, the reduction over tp is
    lost."""

    def is_on_slices(self, name: str) -> bool:
        return super().is_on_slices(name) and self.group("dp") is None


@defect(cause="gradients", caught_by="tp2-plain]")
class NoReductionAtProducts(Manual):
    """awslabs/slapo#20: the backward of gathering a sequence cuts, also where the next product is split and its ranks'
    gradients are summands."""

    def enter(self, x: Tensor) -> Tensor:
        return self.enter_whole(x)


@defect(cause="communication", caught_by="dp2_shard2-plain]")
class ReducesOverShardsAlone(Manual):
    """NVIDIA-NeMo/Automodel#3135: the mesh of shards has lost the axis of copies."""

    def reduced_over(self, name: str) -> tuple[str, ...]:
        axes = super().reduced_over(name)
        return tuple(axis for axis in axes if axis != "dp") if self.group("shard") is not None else axes


@defect(cause="communication", caught_by="dp2-plain]")
class ReturnsWhatItDidNotReduce(Manual):
    """NovaSky-AI/SkyRL#1886: a contiguous copy of a transposed gradient is reduced, and the original is used."""

    def reduce(self, name: str, parameter: nn.Parameter) -> None:
        if "w2" in name and parameter.grad is not None:
            self.over(parameter.grad.t().contiguous(), self.reduced_over(name))
        else:
            super().reduce(name, parameter)


@defect(cause="two calls", caught_by="dp2-plain]")
class SynchronizesTheFirst(Manual):
    """modelscope/FunASR#3472: the first micro-batch is synchronized, and the one before the step is not."""

    first = True

    def step(self, batches: Sequence[Batch]) -> tuple[float, float]:
        self.first = True
        return super().step(batches)

    def backward(self, loss: Tensor, last: bool) -> None:
        super().backward(loss, last)
        if self.first:
            super().reduce_gradients()
            self.first = False

    def reduce_gradients(self) -> None:
        pass


@defect(cause="two calls", caught_by="dp2-plain]")
class PreparesTooLate(Manual):
    """karpathy/build-nanogpt#30: whether the last pass is synchronized is said after its forward pass, which reads it:
    only a step of one pass is."""

    passes = 0

    def step(self, batches: Sequence[Batch]) -> tuple[float, float]:
        self.passes = len(batches)
        return super().step(batches)

    def reduce_gradients(self) -> None:
        if self.passes == 1:
            super().reduce_gradients()


@defect(cause="two calls", caught_by="tp2-plain]")
class KeepsTheLastPass(Manual):
    """pytorch/pytorch#73535: a newly reduced gradient takes the place of the accumulated one."""

    def backward(self, loss: Tensor, last: bool) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None
        super().backward(loss, last)


@defect(cause="two calls", caught_by="dp2-plain]")
class AddsIntoAUsedBuffer(Manual):
    """NVIDIA/Megatron-LM#4609: the buffer of gradients has served as another's and is not zeroed before backward."""

    before: Tensor | None = None

    def reduce(self, name: str, parameter: nn.Parameter) -> None:
        super().reduce(name, parameter)
        if name == "output.weight" and parameter.grad is not None:
            used, self.before = self.before, parameter.grad.clone()
            if used is not None:
                parameter.grad += used


@defect(cause="communication", caught_by="dp2-plain]")
class ReducesNormsTwice(Manual):
    """sony/nnabla#1120: a norm's backward reduces its gradients, and the trainer reduces all of them again."""

    def reduce(self, name: str, parameter: nn.Parameter) -> None:
        super().reduce(name, parameter)
        if "norm" in name and parameter.grad is not None:
            parameter.grad = self.over(parameter.grad, ("dp",))


@defect(cause="numerics", caught_by="dp2_tp2-plain]")
class CopiesDrift(Manual):
    """pytorch/pytorch#160169: what all ranks of tp have is not reduced over tp, and one of them rounds otherwise."""

    def reduce(self, name: str, parameter: nn.Parameter) -> None:
        super().reduce(name, parameter)
        if self.rank("tp") and name not in self.cuts and parameter.grad is not None:
            parameter.grad *= 1 + 2**-52


@defect(cause="numerics", caught_by="tp2-plain]")
class AccumulatesInBfloat16(Manual):
    """deepspeedai/DeepSpeed#1800: gradients of micro-batches are accumulated in bfloat16."""

    def backward(self, loss: Tensor, last: bool) -> None:
        super().backward(loss, last)
        for parameter in self.parameters.values():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.bfloat16().to(parameter.dtype)


@defect(cause="numerics", caught_by="cp2-plain]")
class SumsSlicesInBfloat16(Manual):
    """deepspeedai/DeepSpeed#4530: gradients of one sequence's slices are summed in bfloat16."""

    def over(self, value: Tensor, axes: Sequence[str]) -> Tensor:  # type: ignore[override]
        for axis in axes:
            group = self.group(axis)
            if axis == "cp" and group is not None and value.ndim:
                value = summed(value.bfloat16(), group).to(value.dtype)
            else:
                value = summed(value, group)
        return value


@defect(cause="numerics", caught_by="tp2-plain]")
class RoundsBeforeTheSum(Manual):
    """RL-Align/RL-Kernel#313: each rank rounds its part of a row-parallel product before the sum over tp."""

    def leave(self, x: Tensor) -> Tensor:
        return super().leave(x + (x.float().to(x.dtype) - x).detach())


@defect(cause="communication", caught_by="cp2-plain]")
class ReducesNoSlices(Manual):
    """Gradients are reduced over the ranks with rows of their own, without those that have slices of them."""

    def reduced_over(self, name: str) -> tuple[str, ...]:
        return tuple(axis for axis in super().reduced_over(name) if axis != "cp")
