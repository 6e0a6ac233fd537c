"""Defects of clipping that show in which gradients there are: many, large ones, complex ones, and how they are cut."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Placement
from torch.utils.weak import WeakIdKeyDictionary

from correctness.clipping.wrong import ByEach
from correctness.support.planting import defect
from impl.distributed import local


@defect(cause="shapes", caught_by="test_any_number_of_gradients_counts")
class CountsTheLastLaunch(ByEach):
    """pytorch/pytorch#140066: a launch takes 110 tensors, and writes over the norms of the one before."""

    def together(self, powers: list[Tensor], norm_type: float) -> Tensor:
        return super().together(powers[(len(powers) - 1) // 110 * 110 :] if powers else powers, norm_type)


@defect(cause="shapes", caught_by="test_any_number_of_gradients_counts")
class ScalesTheFirstLaunch(ByEach):
    """A launch takes 256 tensors; the norm is of all gradients, and those behind are not scaled."""

    def scale(self, gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
        super().scale(gradients[:256], norm, max_norm)


@defect(cause="shapes", caught_by="test_any_number_of_gradients_counts")
class CountsWholeChunks(ByEach):
    """pytorch/pytorch#15602: norms by chunks of 65,536 elements, without the last one where it is not whole."""

    def own(self, local: Tensor, norm_type: float) -> Tensor:
        whole = local.numel() // 65536 * 65536
        return super().own(local.reshape(-1)[:whole] if whole else local, norm_type)


@defect(cause="numerics", caught_by="test_any_number_of_gradients_counts")
class SumsPowersInBfloat16(ByEach):
    """NVIDIA-NeMo/Automodel#3625: powers of bfloat16 gradients are added up in bfloat16, one after the other."""

    def own(self, local: Tensor, norm_type: float) -> Tensor:
        self.rounds = local.dtype == torch.bfloat16
        return super().own(local, norm_type)

    def together(self, powers: list[Tensor], norm_type: float) -> Tensor:
        if not powers or not self.rounds or math.isinf(norm_type):
            return super().together(powers, norm_type)
        total = torch.zeros((), dtype=torch.bfloat16)
        for power in powers:
            total += power.bfloat16()
        return total.double() ** (1 / norm_type)


@defect(cause="numerics", caught_by="test_complex_gradients_count")
class CountsRealParts(ByEach):
    """google-deepmind/optax#144: complex gradients count with their real parts."""

    def own(self, local: Tensor, norm_type: float) -> Tensor:
        return super().own(local.real if local.is_complex() else local, norm_type)


@defect(cause="numerics", caught_by="test_complex_gradients_count")
class SumsSquaresOfComplexNumbers(ByEach):
    """google/jaxopt#169: the norm of type 2 is by squares, and those of complex numbers are not of absolute values."""

    def own(self, local: Tensor, norm_type: float) -> Tensor:
        if local.is_complex() and norm_type == 2:
            return (local * local).sum().real.double().abs()
        return super().own(local, norm_type)


@defect(cause="gradients", caught_by="test_complex_gradients_count")
class ScalesRealGradients(ByEach):
    """Complex gradients are counted, and stay as they are."""

    def scale(self, gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
        super().scale([each for each in gradients if not each.is_complex()], norm, max_norm)


@defect(cause="communication", caught_by="test_gradients_of_all_kinds_count_once")
class AsksForShards(ByEach):
    """pytorch/pytorch#167887: what FSDP2 cuts where tensor parallelism has cut before is no `Shard`, and counts by one
    rank's part."""

    def cuts(self, placement: Placement) -> bool:
        return placement.is_shard()


@defect(cause="communication", caught_by="test_gradients_of_all_kinds_count_once")
class RemembersGroups(ByEach):
    """Groups are remembered by an axis's name and size; along that of another mesh lie other ranks."""

    known: ClassVar[dict[tuple[str, int], dist.ProcessGroup]] = {}

    def groups(self, gradient: Tensor) -> list[dist.ProcessGroup]:
        if not isinstance(gradient, DTensor):
            return []
        mesh, names = gradient.device_mesh, gradient.device_mesh.mesh_dim_names or ()
        dims = [dim for dim, each in enumerate(gradient.placements) if self.cuts(each)]
        return [self.known.setdefault((names[dim], mesh.size(dim)), mesh.get_group(dim)) for dim in dims]


@defect(cause="numerics", caught_by="test_gradients_of_all_kinds_count_once")
class SquaresByAProduct(ByEach):
    """The caller's autocast is round the whole step, and takes the product of a gradient with itself in bfloat16."""

    def own(self, local: Tensor, norm_type: float) -> Tensor:
        if norm_type != 2.0:
            return super().own(local, norm_type)
        flat = local.flatten().to(torch.promote_types(local.dtype, torch.float32))
        return (flat @ flat).double()


@defect(cause="numerics", caught_by="test_gradients_of_all_kinds_count_once")
class ScalesInTheFirstsDtype(ByEach):
    """NVIDIA/Megatron-LM#7279: all gradients are scaled by a number in the dtype of the first one."""

    def scale(self, gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
        factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
        for gradient in gradients:
            gradient.mul_(factor.to(gradients[0].dtype.to_real()))


@defect(cause="state", caught_by="test_gradients_of_all_kinds_count_once")
class LearnsWhichHaveGradients(ByEach):
    """Notes in the first call which parameters have a gradient: one that is thawed later is never clipped."""

    trained: ClassVar[WeakIdKeyDictionary] = WeakIdKeyDictionary()

    def gradients(self, parameters: Iterable[nn.Parameter]) -> list[Tensor]:
        return super().gradients([p for p in parameters if self.trained.setdefault(p, p.grad is not None)])


@defect(cause="numerics", caught_by="test_in_few_bits")
class ScalesInTheGradientsDtype(ByEach):
    """unslothai/unsloth-zoo#1261: the scale is in the gradients' dtype; float16 has few digits below 6e-5."""

    def scale(self, gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
        for g in gradients:
            g.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0).to(g.dtype))


@defect(cause="gradients", caught_by="test_gradients_of_all_kinds_count_once")
class ScalesEachMemoryOnce(ByEach):
    """Gradients that share memory are taken for those of tied parameters, and the first is scaled alone."""

    def scale(self, gradients: list[Tensor], norm: Tensor, max_norm: float) -> None:
        of_memory: dict[int, Tensor] = {}
        for gradient in gradients:
            memory = local(gradient).untyped_storage().data_ptr() or id(gradient)
            of_memory.setdefault(memory, gradient)
        super().scale([*of_memory.values()], norm, max_norm)
