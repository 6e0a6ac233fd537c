"""Defects of mixtures of experts on a mesh, most from reports: experts that count as all other parameters, and routers
whose gradients are parts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from correctness.mesh.manual import Manual
from correctness.mesh.operators import Gather
from correctness.mesh.right_trainers import RoutesSlices
from correctness.support.planting import defect
from impl.mesh.decoder import Experts


@defect(cause="communication", caught_by="tp2-experts]")
class ReducesReplicatedAgain(Manual):
    """inclusionAI/AReno#496: the gradient of a replicated projection is whole on each rank, and is summed again."""

    def reduced_over(self, name: str) -> tuple[str, ...]:
        return (*super().reduced_over(name), *(("tp",) if "router" in name else ()))


@defect(cause="communication", caught_by="[ForgetsTheRouter-tp2-experts]")
class ForgetsTheRouter(RoutesSlices):
    """NVIDIA/Megatron-LM#619: the router sees this rank's tokens, and its gradient is not summed over tp."""

    def is_router(self, name: str) -> bool:
        return False


@defect(cause="gradients", caught_by="tp2-experts]")
class OneMoreReductionAtTheMixture(Manual):
    """pytorch/torchtitan#2106: the gradient of work that every rank does alike is marked as a summand."""

    def enter_whole(self, x: Tensor) -> Tensor:
        return self.enter(x)


@defect(cause="gradients", caught_by="tp2-experts]")
class DividesByTheGroup(Manual):
    """pytorch/pytorch#115967: a replicated gradient becomes a summand by division by the group's size."""

    def leave_whole(self, x: Tensor) -> Tensor:
        scaled = x / self.size("tp")
        return super().leave_whole(scaled + (x - scaled).detach())


@defect(cause="gradients", caught_by="dp2_ep2-experts]")
class MultipliesExperts(Manual):
    """pytorch/pytorch#160285: an expert's gradient has the tokens of all ranks of ep, and is averaged over the
    others."""

    def reduce(self, name: str, parameter: nn.Parameter) -> None:
        super().reduce(name, parameter)
        if self.is_expert(name) and parameter.grad is not None:
            parameter.grad *= self.size("ep")


@defect(cause="gradients", caught_by="dp2_shard2_ep2-experts]")
class DividesDenseByExperts(Manual):
    """NVIDIA/Megatron-LM#7160: an axis takes ranks from the data axis, and the division of dense gradients shrinks."""

    def reduce(self, name: str, parameter: nn.Parameter) -> None:
        super().reduce(name, parameter)
        if not self.is_expert(name) and parameter.grad is not None:
            parameter.grad /= self.size("ep")


@defect(cause="gradients", caught_by="dp2_ep2-experts]")
class NoFactorInAGroupOfOne(Manual):
    """pytorch/pytorch#167178: the factor of experts' gradients is ignored where their group of shards has one rank."""

    def reduce(self, name: str, parameter: nn.Parameter) -> None:
        super().reduce(name, parameter)
        alone = self.is_expert(name) and not any(self.group(axis) for axis in ("shard", "cp"))
        if alone and parameter.grad is not None:
            parameter.grad /= self.size("ep")


@defect(cause="gradients", caught_by="dp2_ep2-experts]")
class SharesOfItsOwnExperts(Manual):
    """huggingface/transformers#48205: each rank's gradient of the scores is that by its own experts, and they are not
    added."""

    def to_experts(self, x: Tensor) -> Tensor:
        return Gather.apply(x, 0, self.group("ep"), x.shape[-1] != self.model.size.experts)


@defect(cause="gradients", caught_by="dp2_ep2-experts]")
class GathersSharesWithoutABackward(Manual):
    """NVIDIA-NeMo/Automodel#2995: routing probabilities are gathered by a collective that has no backward."""

    def to_experts(self, x: Tensor) -> Tensor:
        return super().to_experts(x.detach() if x.shape[-1] == self.model.size.experts else x)


@defect(cause="gradients", caught_by="dp2_ep2-experts]")
class TokensOfOthersHaveNoBackward(Manual):
    """Tokens that came from other ranks send no gradient back to them."""

    def to_experts(self, x: Tensor) -> Tensor:
        return Gather.apply(x, 0, self.group("ep"), False)


@defect(cause="communication", caught_by="dp2_shard2_ep2-experts]")
class ExpertsOverEveryAxis(Manual):
    """Experts are reduced as all other parameters are, over ranks that have other experts."""

    def reduced_over(self, name: str) -> tuple[str, ...]:
        return self.data_axes() if self.is_expert(name) else super().reduced_over(name)


@defect(cause="gradients", caught_by="dp2_ep2-experts]")
class OutputsOfTheFirstRank(Manual):
    """huggingface/transformers#48689: slots of experts that are not on this rank point at one that is, whose output the
    weight of zero hides in forward and the weight's gradient does not."""

    def run_experts(self, experts: Experts, x: Tensor, shares: Tensor) -> Tensor:
        out = super().run_experts(experts, x, shares)
        stray = torch.einsum("td,hd->th", x, experts.w1[0]).sum() * shares
        return out + (stray - stray.detach()).sum(-1, keepdim=True)
