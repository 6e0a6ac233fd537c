"""Defects of how a model is cut, most from reports: heads, slices, frozen and tied parameters, groups of an optimizer;
and of what is saved."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from correctness.mesh.manual import Manual, Named
from correctness.mesh.operators import Gather
from correctness.support.planting import defect
from impl.mesh.decoder import Batch


@defect(cause="masks", caught_by="cp2-plain]")
class CausalWithinASlice(Manual):
    """huggingface/accelerate#4177: attention is set to causal, whatever the mask was: the first query of a slice sees
    the first key."""

    def seen(self, queries: int, keys: int) -> Tensor:
        return torch.ones(queries, keys, dtype=torch.bool).tril()


@defect(cause="gradients", caught_by="cp2-plain]")
class KeysOfOthersHaveNoBackward(Manual):
    """huggingface/diffusers#14265: backward reads this rank's keys and values in place of those that went round."""

    def gather_keys(self, x: Tensor) -> Tensor:
        return Gather.apply(x, 2, self.group("cp"), False)


@defect(cause="world size", caught_by="test_any_history_is_that_of_one_process")
class TakesTheRingTheOtherWay(Manual):
    """Keys that arrive after s steps of a ring are taken for those of rank + s, not rank - s: on two ranks the same."""

    def gather_keys(self, x: Tensor) -> Tensor:
        ranks, own = self.size("cp"), self.rank("cp")
        every = super().gather_keys(x).chunk(ranks, 2)
        return torch.cat([every[(2 * own - rank) % ranks] for rank in range(ranks)], 2)


@defect(cause="shapes", caught_by="cp2-plain]")
class PositionsFromZero(Manual):
    """NVIDIA/Megatron-LM#5243: rotary frequencies of each slice are taken from the beginning of the table."""

    def losses(self, batch: Batch) -> Tensor:
        tokens, positions, targets = batch
        return super().losses((tokens, positions - positions[:, :1], targets))


@defect(cause="shapes", caught_by="tp2-plain]")
class KeysOfOtherHeads(Manual):
    """NVIDIA-NeMo/Automodel#1324 in its effect: a fused weight is cut as it lies, and queries meet keys of other
    heads."""

    def part(self, weight: Tensor, axis: str, dim: int) -> Tensor:
        heads = self.model.size.kv_heads * self.model.size.dim // self.model.size.heads
        if axis == "tp" and weight.shape[0] == heads:
            return weight.chunk(self.size(axis), dim)[-1 - self.rank(axis)]
        return super().part(weight, axis, dim)

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        found = super().whole(name, tensor)
        if "wk" in name or "wv" in name:
            return torch.cat(found.chunk(self.size("tp"))[::-1])
        return found


@defect(cause="state", caught_by="tp2-frozen_and_unused]")
class ThawsWhatItCuts(Manual):
    """NVIDIA-NeMo/Automodel#547: cutting a model makes its parameters anew, and all of them are trained."""

    def cut_parameter(self, module: nn.Module, name: str, prefix: str, axis: str, dim: int) -> None:
        super().cut_parameter(module, name, prefix, axis, dim)
        getattr(module, name).requires_grad_()


@defect(cause="state", caught_by="shard2-tied]")
class UntiesWhatItShards(Manual):
    """verl-project/verl#7834: each parameter gets new memory, and tied ones are two from then on."""

    def cut(self) -> None:
        if self.group("shard") is not None and self.model.size.tied:
            self.model.output.weight = nn.Parameter(self.model.output.weight.detach().clone())
        super().cut()


@defect(cause="shapes", caught_by="shard3-tied]")
class NeverUpdatesTheLastShard(Manual):
    """pytorch/pytorch#176076: of a tied parameter whose size does not divide, the last rank's shard is not updated."""

    def give_pieces(self) -> None:
        super().give_pieces()
        last = self.rank("shard") == self.size("shard") - 1
        if last and self.size("shard") == 3 and self.model.size.tied:
            self.pieces["tok_embeddings.weight"].grad = None

    def square(self, name: str) -> Tensor:
        if self.pieces[name].grad is None:
            self.pieces[name].grad = torch.zeros_like(self.pieces[name])
        return super().square(name)


@defect(cause="state", caught_by="shard2-plain]")
class GroupsByDimensions(Manual):
    """mlfoundations/open_clip#358: whether a parameter decays is decided by its dimensions, once all are flat."""

    def make_optimizer(self, optimizer_fn: Callable[[Named], Optimizer]) -> Optimizer:
        return optimizer_fn(
            [(name if piece.ndim > 1 else f"norm.{name}", piece) for name, piece in self.pieces.items()]
        )


@defect(cause="state", caught_by="shard2-plain]")
class OneGroup(Manual):
    """verl-project/verl#7215: all parameters are one collection once they are sharded."""

    def make_optimizer(self, optimizer_fn: Callable[[Named], Optimizer]) -> Optimizer:
        sharded = self.group("shard") is not None
        return optimizer_fn([("weight" if sharded else name, piece) for name, piece in self.pieces.items()])


@defect(cause="communication", caught_by="tp2-plain]")
class EmbedsWordsOfOthers(Manual):
    """A word of another rank's part of the vocabulary adds this rank's first one."""

    def embed(self, tokens: Tensor) -> Tensor:
        weight = self.model.tok_embeddings.weight
        first = self.rank("tp") * weight.shape[0]
        own = (tokens >= first) & (tokens < first + weight.shape[0])
        return self.leave(weight[torch.where(own, tokens - first, 0)])


@defect(cause="shapes", caught_by="dp2_ep2-experts]")
class SharesOfTheFirstExperts(Manual):
    """huggingface/transformers#45473: scores are cut to the local experts and the indices that go with them are not."""

    def own_shares(self, shares: Tensor, experts: int) -> Tensor:
        return shares.narrow(1, 0, experts)


@defect(cause="state", caught_by="test_training_goes_on")
class SavesNoMoments(Manual):
    """KempnerInstitute/KempnerForge#115: an optimizer's state is loaded into one without any, and is dropped."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        optimizer = dict(state["optimizer"], state={})
        super().load_state_dict(dict(state, optimizer=optimizer))


@defect(cause="state", caught_by="test_training_goes_on")
class KeepsPiecesFromBefore(Manual):
    """NVIDIA/apex#42: the copies that are updated are made before the model is loaded."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        before = {name: piece.detach().clone() for name, piece in self.pieces.items()}
        super().load_state_dict(state)
        for name, piece in self.pieces.items():
            if piece is not self.parameters[name]:
                piece.data.copy_(before[name])


@defect(cause="state", caught_by="test_training_goes_on")
class SavesRoundedWeights(Manual):
    """TensorAuto/OpenTau#185: what is saved are weights in bfloat16, and the full ones are made of them."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state | {"model": {name: each.bfloat16() for name, each in state["model"].items()}}


@defect(cause="state", caught_by="test_training_goes_on")
class SavesNoStep(Manual):
    """deepspeedai/DeepSpeed#4396: the number of steps is not saved."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        moments = {
            index: {name: torch.zeros_like(value) if name == "step" else value for name, value in each.items()}
            for index, each in state["optimizer"]["state"].items()
        }
        return state | {"optimizer": dict(state["optimizer"], state=moments)}


@defect(cause="state", caught_by="test_training_goes_on")
class LoadsTheFirstRanksExperts(Manual):
    """KempnerInstitute/KempnerForge#202: each rank numbers its experts from zero, and the file has one rank's."""

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        first = {
            name: self.whole(name, each)[: len(each)] if self.is_expert(name) else each
            for name, each in state["model"].items()
        }
        return state | {"model": first}


@defect(cause="two calls", caught_by="another_order")
class WeighsTheFirstMore(Manual):
    """Micro-batches count by their place in the step."""

    def weighted(self, losses: Tensor, batch: Batch, batches: Sequence[Batch], tokens: Tensor) -> Tensor:
        place = next(index for index, each in enumerate(batches) if each is batch)
        return losses / tokens * (1 + 1e-6 * place)
