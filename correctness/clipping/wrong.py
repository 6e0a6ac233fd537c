"""Defects of clipping on a mesh, most from reports: a gradient that counts n times, not at all, or by one rank's part
alone, and a scale that is not the same for all."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Placement

from correctness.support.planting import defect
from impl.clipping import scale_, whole_gradients


class ByEach:
    """Right: the norm of each gradient by itself, summed over the axes that it is sharded along."""

    def __call__(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        gradients = self.gradients(parameters)
        norm = self.together([self.power(g, norm_type) for g in gradients], norm_type)
        self.scale(gradients, norm, max_norm)
        return norm

    def gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        return whole_gradients(parameters)

    def scale(self, gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
        scale_(gradients, norm, max_norm)

    def power(self, gradient: Tensor, norm_type: float) -> Tensor:
        """The sum of absolute values to that power; of infinity, the largest."""
        total = self.own(gradient.to_local() if isinstance(gradient, DTensor) else gradient, norm_type)
        for group in self.groups(gradient):
            if math.isinf(norm_type):  # Gloo's largest of numbers may miss a NaN
                total.nan_to_num_(math.inf, math.inf)
            dist.all_reduce(total, self.operation(norm_type), group=group)
        return total

    def own(self, local: Tensor, norm_type: float) -> Tensor:
        if math.isinf(norm_type):
            return local.abs().max().double() if local.numel() else torch.zeros((), dtype=torch.float64)
        return local.abs().double().pow(norm_type).sum()

    def operation(self, norm_type: float) -> dist.ReduceOp.RedOpType:
        return dist.ReduceOp.MAX if math.isinf(norm_type) else dist.ReduceOp.SUM

    def groups(self, gradient: Tensor) -> list[dist.ProcessGroup]:
        """Groups of the axes that it is sharded along."""
        if not isinstance(gradient, DTensor):
            return []
        mesh = gradient.device_mesh
        return [mesh.get_group(dim) for dim, each in enumerate(gradient.placements) if self.cuts(each)]

    def cuts(self, placement: Placement) -> bool:
        return not (placement.is_replicate() or placement.is_partial())

    def together(self, powers: list[Tensor], norm_type: float) -> Tensor:
        if not powers:
            return torch.zeros(())
        every = torch.stack(powers)
        return every.max() if math.isinf(norm_type) else every.sum() ** (1 / norm_type)


@defect(cause="communication", caught_by="test_each_parameter_counts_once[SumsOverEveryAxis")
class SumsOverEveryAxis(ByEach):
    """NVIDIA-NeMo/RL#3788: squares are summed over every axis, those of copies too."""

    def groups(self, gradient: Tensor) -> list[dist.ProcessGroup]:
        mesh = gradient.device_mesh if isinstance(gradient, DTensor) else None
        return [] if mesh is None else [mesh.get_group(dim) for dim in range(mesh.ndim)]


@defect(cause="communication", caught_by="test_each_parameter_counts_once[ForgetsAnAxis-dp2_tp2")
class ForgetsAnAxis(ByEach):
    """pytorch/torchtitan#596: the norm is that of the innermost axis's part, and each rank has another."""

    def groups(self, gradient: Tensor) -> list[dist.ProcessGroup]:
        return super().groups(gradient)[:1] if isinstance(gradient, DTensor) and gradient.device_mesh.ndim == 1 else []


@defect(cause="communication", caught_by="test_each_parameter_counts_once[AddsTheLargest")
class AddsTheLargest(ByEach):
    """The norm of type infinity is added over the ranks, as all other norms are."""

    def operation(self, norm_type: float) -> dist.ReduceOp.RedOpType:
        return dist.ReduceOp.SUM


@defect(cause="shapes", caught_by="test_each_parameter_counts_once[LeavesOutWhatIsNoDTensor")
class LeavesOutWhatIsNoDTensor(ByEach):
    """Gradients that are no DTensors are neither counted nor scaled."""

    def gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        return [g for g in super().gradients(parameters) if isinstance(g, DTensor)]


@defect(cause="two calls", caught_by="test_gradients_of_all_kinds_count_once")
class ReturnsOneTensor(ByEach):
    """Every call writes its norm into the tensor that the calls before it returned."""

    returned: ClassVar[dict[torch.dtype, Tensor]] = {}

    def __call__(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        norm = super().__call__(parameters, max_norm, norm_type)
        return self.returned.setdefault(norm.dtype, torch.empty_like(norm)).copy_(norm)


@defect(cause="numerics", caught_by="test_in_few_bits[SquaresInTheirOwnDtype")
class SquaresInTheirOwnDtype(ByEach):
    """Squares are summed in the gradient's own dtype: in float16 they overflow."""

    def own(self, local: Tensor, norm_type: float) -> Tensor:
        return local.abs().pow(norm_type).sum().double()


@defect(cause="numerics", caught_by="test_in_few_bits[NormInTheirDtype")
class NormInTheirDtype(ByEach):
    """The norm is summed in float32 and returned in the gradients' dtype: in float16, above 65,504, infinite."""

    def together(self, powers: list[Tensor], norm_type: float) -> Tensor:
        return super().together(powers, norm_type).to(self.dtype)

    def gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        found = super().gradients(parameters)
        half = bool(found) and all(gradient.dtype == torch.float16 for gradient in found)
        self.dtype = torch.float16 if half else torch.float64
        return found


@defect(cause="numerics", caught_by="test_below_the_norm_nothing_changes[ScalesUp")
class ScalesUp(ByEach):
    """Gradients below the norm are scaled up to it."""

    def scale(self, gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
        for g in gradients:
            g.mul_(max_norm / (norm.item() + 1e-6))


@defect(cause="communication", caught_by="test_each_parameter_counts_once[ScalesByItsOwnNorm")
class ScalesByItsOwnNorm(ByEach):
    """huggingface/accelerate#4219: what is returned is the norm of all, and each rank scales by that of its part."""

    def scale(self, gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
        local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
        scale_(local, self.together([self.own(each, 2.0) for each in local], 2.0), max_norm)


@defect(cause="numerics", caught_by="test_what_is_not_finite_is_seen_by_every_rank[LeavesOutNaN")
class LeavesOutNaN(ByEach):
    """A gradient that is not a number counts as zero: training goes on with it."""

    def own(self, local: Tensor, norm_type: float) -> Tensor:
        return super().own(local.nan_to_num(0.0, 0.0, 0.0), norm_type)


@defect(cause="gradients", caught_by="test_sums_that_are_still_to_be_made_count_as_sums[TakesPartsForSums")
class TakesPartsForSums(ByEach):
    """Sums over ranks that are still to be made are taken as if they had been."""

    def gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        return [p.grad for p in parameters if p.grad is not None]


@defect(cause="gradients", caught_by="test_parameters_may_be_an_iterator[ReadsAnIteratorTwice")
class ReadsAnIteratorTwice(ByEach):
    """The parameters are gone over twice, and an iterator, as `model.parameters()` is, has nothing left."""

    def __call__(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        self.scale(self.gradients(parameters), super().__call__(parameters, math.inf, norm_type), max_norm)
        return super().__call__(parameters, math.inf, norm_type)


@defect(cause="gradients", caught_by="test_parameters_may_be_an_iterator[ScalesWhatIsLeft")
class ScalesWhatIsLeft(ByEach):
    """pytorch/torchtitan#1258: the norm is right, and what is scaled is what an iterator has left after it."""

    def __call__(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        norm = super().__call__(parameters, math.inf, norm_type)
        self.scale(self.gradients(parameters), norm, max_norm)
        return norm


@defect(cause="options", caught_by="test_each_parameter_counts_once[AlwaysTwo")
class AlwaysTwo(ByEach):
    """The type of the norm changes nothing."""

    def __call__(self, parameters: Iterable[nn.Parameter], max_norm: float, norm_type: float = 2.0) -> Tensor:
        return super().__call__(parameters, max_norm, 2.0)


@defect(cause="communication", caught_by="test_each_parameter_counts_once[AveragesNorms")
class AveragesNorms(ByEach):
    """deepspeedai/DeepSpeed#8478: the ranks' norms are averaged, which is right where all have the same gradients."""

    def together(self, powers: list[Tensor], norm_type: float) -> Tensor:
        norm = super().together(powers, norm_type)
        dist.all_reduce(norm)
        return norm / dist.get_world_size()

    def groups(self, gradient: Tensor) -> list[dist.ProcessGroup]:
        return []


@defect(cause="gradients", caught_by="test_each_parameter_counts_once[ScalesNothing")
class ScalesNothing(ByEach):
    """huggingface/transformers#46113: the norm is right, and nothing is scaled by it."""

    def scale(self, gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
        pass


@defect(cause="errors", caught_by="test_without_a_gradient_the_norm_is_zero[NeedsAGradient")
class NeedsAGradient(ByEach):
    """No parameter with a gradient is an error."""

    def together(self, powers: list[Tensor], norm_type: float) -> Tensor:
        return super().together(powers, norm_type) if powers else torch.stack(powers)


@defect(cause="numerics", caught_by="test_what_is_not_finite_is_seen_by_every_rank[PythonsLargest")
class PythonsLargest(ByEach):
    """pytorch/pytorch#53843: the norm of type infinity is Python's largest of the gradients' norms, which keeps what it
    has where that is compared with NaN.
    """

    def together(self, powers: list[Tensor], norm_type: float) -> Tensor:
        return max(powers) if powers and math.isinf(norm_type) else super().together(powers, norm_type)


@defect(cause="numerics", caught_by="test_what_is_not_finite_is_seen_by_every_rank[LargestOfMeshes")
class LargestOfMeshes(ByEach):
    """The norm of type infinity is Python's largest of the meshes' norms: right where there is one mesh."""

    def gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        found = super().gradients(parameters)
        self.meshes = [getattr(gradient, "device_mesh", None) for gradient in found]
        return found

    def together(self, powers: list[Tensor], norm_type: float) -> Tensor:
        if not powers or not math.isinf(norm_type):
            return super().together(powers, norm_type)
        every = [*zip(self.meshes, powers, strict=True)]
        return max(torch.stack([p for of, p in every if of == mesh]).max() for mesh in dict.fromkeys(self.meshes))


@defect(cause="communication", caught_by="test_gradients_of_all_kinds_count_once")
class FirstAndLastAxis(ByEach):
    """Sums over the first and the last axis of a mesh, and over none between the two."""

    def groups(self, gradient: Tensor) -> list[dist.ProcessGroup]:
        if not isinstance(gradient, DTensor):
            return []
        mesh, ends = gradient.device_mesh, {0, gradient.device_mesh.ndim - 1}
        return [mesh.get_group(dim) for dim, each in enumerate(gradient.placements) if self.cuts(each) and dim in ends]


@defect(cause="shapes", caught_by="test_gradients_of_all_kinds_count_once")
class LeavesScalarsOut(ByEach):
    """A parameter of one number, such as a temperature, is neither counted nor scaled."""

    def gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        return [gradient for gradient in super().gradients(parameters) if gradient.ndim]


@defect(cause="numerics", caught_by="test_gradients_of_all_kinds_count_once")
class DividesByTheLargest(ByEach):
    """PaddlePaddle/Paddle#30777: zeros alone are divided by zero, here by the largest, which keeps powers in range."""

    def own(self, local: Tensor, norm_type: float) -> Tensor:
        if math.isinf(norm_type) or not local.numel():
            return super().own(local, norm_type)
        largest = local.double().abs().max()
        return super().own(local.double() / largest, norm_type) * largest**norm_type


@defect(cause="numerics", caught_by="test_gradients_of_all_kinds_count_once")
class DividesByTheLarger(ByEach):
    """Scales by the limit over the larger of norm and limit: where there is no limit, infinity over infinity."""

    def scale(self, gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
        limit = torch.tensor(max_norm, dtype=norm.dtype)
        by = limit / torch.maximum(norm + 1e-6, limit)
        for gradient in gradients:
            gradient.mul_(by.item())


@defect(cause="gradients", caught_by="test_gradients_of_all_kinds_count_once")
class TakesAveragesForSums(ByEach):
    """Whatever is still to be made over the ranks is made as a sum, an average too."""

    def gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        kept = list(parameters)
        for p in kept:
            if isinstance(p.grad, DTensor):
                sums = [Partial() if each.is_partial() else each for each in p.grad.placements]
                shape, stride = p.grad.shape, p.grad.stride()
                p.grad = DTensor.from_local(
                    p.grad.to_local(), p.grad.device_mesh, sums, run_check=False, shape=shape, stride=stride
                )
        return super().gradients(kept)
