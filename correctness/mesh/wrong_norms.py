"""Defects of the norm and of clipping by it, most from reports: a parameter that counts n times, not at all, or by
its rank's part alone."""

from __future__ import annotations

import torch
from torch import Tensor

from correctness.mesh.manual import Manual
from correctness.support.planting import defect


@defect(cause="communication", caught_by="[SumsReplicatedOverTp-tp2-plain]")
class SumsReplicatedOverTp(Manual):
    """NVIDIA-NeMo/RL#3788: every square is summed over tp, those of whole parameters too."""

    def summed_over(self, name: str) -> tuple[str, ...]:
        return tuple({*super().summed_over(name), *(("tp",) if self.group("tp") else ())})


@defect(cause="communication", caught_by="[TrustsAMarkOfAWholeLinear-tp2-experts]")
class TrustsAMarkOfAWholeLinear(Manual):
    """ROCm/TransformerEngine#715: a linear that is whole on each rank is marked as cut."""

    def summed_over(self, name: str) -> tuple[str, ...]:
        return ("tp",) if "router" in name else super().summed_over(name)


@defect(cause="communication", caught_by="[SumsWholeOverShard-shard2-plain]")
class SumsWholeOverShard(Manual):
    """mindspore-ai/hyper-parallel#279: parameters that are not sharded are in the sum over the shards."""

    def is_sharded(self, name: str) -> bool:
        return super().is_sharded(name) and "norm" not in name

    def summed_over(self, name: str) -> tuple[str, ...]:
        return ("shard",) if self.group("shard") is not None else super().summed_over(name)


@defect(cause="communication", caught_by="[CountsExpertsOfOneRank-dp2_ep2-experts]")
class CountsExpertsOfOneRank(Manual):
    """NVIDIA/Megatron-LM#5916: experts are taken for copies, of which the first rank's count."""

    def square(self, name: str) -> Tensor:
        if not self.is_expert(name):
            return super().square(name)
        own = self.pieces[name].grad.square().sum()  # type: ignore[union-attr]
        return self.over(own * (self.rank("ep") == 0), self.summed_over(name))


@defect(cause="communication", caught_by="[NeverSumsExperts-dp2_ep2-experts]")
class NeverSumsExperts(Manual):
    """NVIDIA-NeMo/Automodel#3817: the experts' part of the norm is not summed over ep, so that each rank has its own
    norm, by which it scales the parameters that all have."""

    def summed_over(self, name: str) -> tuple[str, ...]:
        return () if self.is_expert(name) else super().summed_over(name)


@defect(cause="gradients", caught_by="[ScalesNothing-dp2-plain]")
class ScalesNothing(Manual):
    """huggingface/transformers#46113: the norm is right, and nothing is scaled by it."""

    def clip(self, norm: Tensor) -> None:
        pass


@defect(cause="communication", caught_by="[SumsShardsOverAllData-dp2_shard2-plain]")
class SumsShardsOverAllData(Manual):
    """ByteDance-Seed/VeOmni#184: in hybrid sharding, squares of shards are summed over the copies as well."""

    def summed_over(self, name: str) -> tuple[str, ...]:
        found = super().summed_over(name)
        return ("dp", *found) if "shard" in found else found


@defect(cause="communication", caught_by="[AveragesNorms-dp2_ep2-experts]")
class AveragesNorms(Manual):
    """deepspeedai/DeepSpeed#8478: the ranks' norms are averaged, which is right where all have the same parameters."""

    def square(self, name: str) -> Tensor:
        return self.pieces[name].grad.square().sum()  # type: ignore[union-attr]

    def norm(self) -> Tensor:
        own = super().norm()
        return self.over(own, self.data_axes()) / self.data_ranks()


@defect(cause="gradients", caught_by="[LeavesOutExperts-dp2_ep2-experts]")
class LeavesOutExperts(Manual):
    """deepspeedai/DeepSpeed#8613: gradients are split into the experts' and the others', and the experts' half is
    forgotten."""

    def norm(self) -> Tensor:
        return torch.stack([self.square(name) for name in self.pieces if not self.is_expert(name)]).sum().sqrt()


@defect(cause="communication", caught_by="[CountsPartsOfOneRank-shard2_tp2-plain]")
class CountsPartsOfOneRank(Manual):
    """deepspeedai/DeepSpeed#5411: a flat group of cut and whole parameters has one mark, by which the first rank of tp
    alone counts."""

    def square(self, name: str) -> Tensor:
        own = self.pieces[name].grad.square().sum() * (self.rank("tp") == 0)  # type: ignore[union-attr]
        return self.over(own, ("shard", "tp"))


@defect(cause="communication", caught_by="[OfTheLocalShard-shard2-plain]")
class OfTheLocalShard(Manual):
    """Modalities/modalities#206: a plain norm of flat parameters, which are this rank's shard."""

    def summed_over(self, name: str) -> tuple[str, ...]:
        return tuple(axis for axis in super().summed_over(name) if axis != "shard")


@defect(cause="gradients", caught_by="[CountsTiedTwice-dp2-tied]")
class CountsTiedTwice(Manual):
    """deepspeedai/DeepSpeed#1252: a tied parameter counts once for each place that has it."""

    def norm(self) -> Tensor:
        names = {id(parameter): name for name, parameter in self.parameters.items()}
        everywhere = self.model.named_parameters(remove_duplicate=False)
        found = [names[id(p)] for _, p in everywhere if p.requires_grad]
        return torch.stack([self.square(name) for name in found]).sum().sqrt()


@defect(cause="handles", caught_by="not_finite")
class DecidesAlone(Manual):
    """facebookresearch/fairseq2#1374: whether a step is finite is decided by some of the ranks that share it."""

    def norm(self) -> Tensor:
        norm = super().norm()
        return norm if self.rank("dp") == 0 else torch.nan_to_num(norm, nan=1.0)


@defect(cause="handles", caught_by="not_finite")
class TakesAStepThatIsNotFinite(Manual):
    """pytorch/pytorch#115710: the flag that gradients are infinite is read before it has arrived."""

    def is_finite(self, norm: Tensor) -> bool:
        return True


@defect(cause="numerics", caught_by="-infinite]")
class LooksForNaNAlone(Manual):
    """A step whose norm is infinite is taken, by a scale of 0: infinite gradients times that are NaN."""

    def is_finite(self, norm: Tensor) -> bool:
        return not bool(norm.isnan())


@defect(cause="numerics", caught_by="[OfScaledGradients-dp2-plain]")
class OfScaledGradients(Manual):
    """deepspeedai/DeepSpeed#8588: the norm is that of gradients before the loss scale is divided out of them."""

    LOSS_SCALE = 8.0

    def norm(self) -> Tensor:
        return super().norm() * self.LOSS_SCALE


@defect(cause="communication", caught_by="[CombinesNormsNotSquares-shard2-plain]")
class CombinesNormsNotSquares(Manual):
    """Adds the norms of the ranks' parts, and squares the sum."""

    def square(self, name: str) -> Tensor:
        own = self.pieces[name].grad.norm()  # type: ignore[union-attr]
        return self.over(own, self.summed_over(name)).square()


@defect(cause="communication", caught_by="[ClipsByItsOwnNorm-dp2_tp2-plain]")
class ClipsByItsOwnNorm(Manual):
    """Returns the norm of all ranks, and scales each rank's gradients by its own."""

    def clip(self, norm: Tensor) -> None:
        own = torch.stack([piece.grad.square().sum() for piece in self.pieces.values()])  # type: ignore[union-attr]
        super().clip(own.sum().sqrt())


@defect(cause="communication", caught_by="[CountsExpertsOverEveryCopy-dp2_shard2_ep2-experts]")
class CountsExpertsOverEveryCopy(Manual):
    """Copies of an expert count as parts of it."""

    def summed_over(self, name: str) -> tuple[str, ...]:
        return ("dp", *super().summed_over(name)) if self.is_expert(name) else super().summed_over(name)


@defect(cause="communication", caught_by="in_one_row")
class SkipsAloneWhatIsNotFinite(Manual):
    """hpcaitech/ColossalAI#1175: a rank that finds infinite gradients leaves out the norm, for which others wait."""

    def norm(self) -> Tensor:
        own = [piece.grad for piece in self.pieces.values() if piece.grad is not None]
        finite = all(bool(torch.isfinite(each).all()) for each in own)
        return super().norm() if finite else torch.full((), torch.inf)


@defect(cause="state", caught_by="test_any_history_is_that_of_one_process")
class CountsStepsThatItSkips(Manual):
    """AdamW's bias corrections go on in steps that are skipped."""

    def is_finite(self, norm: Tensor) -> bool:
        finite = super().is_finite(norm)
        for state in () if finite else self.optimizer.state.values():
            if "step" in state:
                state["step"] += 1
        return finite
