"""Defects of tensor parallelism that show by what a call is given: positions, targets, frozen weights, a mesh."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from correctness.support.planting import defect
from correctness.tensor_parallel.wrong import Planted
from impl.mesh.decoder import IGNORED, Decoder
from impl.tensor_parallel import Plain, Sliced
from impl.tensor_parallel.vocabulary import VocabularyLoss


@defect(cause="options", caught_by="test_steps_are_those_of_one_process[CountsPositions-tp2-even")
class CountsPositions(Planted):
    """NVIDIA/Megatron-LM#453: rotary positions are those in the row, whatever positions are given."""

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor | None = None) -> Tensor:
        counted = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        return super().forward(tokens, counted, targets)


@defect(cause="shapes", caught_by="test_steps_are_those_of_one_process[KeepsTheFirstContext-tp2-even")
class KeepsTheFirstContext(Planted):
    """TattaBio/gLM2#3: a table that has an entry for each position of a row is made in the first call, and kept."""

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor | None = None) -> Tensor:
        table = self.__dict__.setdefault("table", positions.new_zeros(tokens.shape[1]))
        return super().forward(tokens, positions + table, targets)


@defect(cause="state", caught_by="test_two_calls_before_their_backward_passes[KeepsATableOfInference-tp2-at_once")
class KeepsATableOfInference(Planted):
    """Dao-AILab/flash-attention#299: a table is made in the first call, and kept; made under inference mode, it cannot
    be saved for backward."""

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        table = self.__dict__.setdefault("table", torch.ones(logits.shape[1], dtype=logits.dtype, device=logits.device))
        return super().losses(logits * table, targets)


@defect(cause="numerics", caught_by="test_bfloat16_is_as_near_as_in_one_process[ReturnsAHalf")
class ReturnsAHalf(Planted):
    """The loss is in the dtype of autocast's products."""

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        loss, kind = super().losses(logits, targets), logits.device.type
        return loss.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else loss


@defect(cause="shapes", caught_by="test_steps_are_those_of_one_process[ClampsPositions-tp2-even")
class ClampsPositions(Planted):
    """A table of rotary angles has an entry for each position of a row, and positions behind take the last."""

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor | None = None) -> Tensor:
        return super().forward(tokens, positions.clamp(max=tokens.shape[1] - 1), targets)


@defect(cause="numerics", caught_by="test_bfloat16_is_as_near_as_in_one_process[RoundsPositions-tp2-bfloat16")
class RoundsPositions(Planted):
    """EleutherAI/gpt-neox#1003: positions are rounded to the dtype of queries and keys before their rotary angles."""

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor | None = None) -> Tensor:
        dtype = self.layers[0].attention_norm.weight.dtype  # type: ignore[union-attr]
        return super().forward(tokens, positions.to(dtype).long(), targets)


class _InTheSoftmax(VocabularyLoss):
    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        shares, columns, own = ctx.saved_tensors
        found = shares.data.mul_(gradient)
        return found.scatter_add_(1, columns[:, None], (-gradient * own)[:, None]), None, None, None


@defect(cause="gradients", caught_by="test_two_calls_before_their_backward_passes[SpoilsTheSoftmax-tp2-at_once")
class SpoilsTheSoftmax(Planted):
    """unslothai/unsloth#5002: the gradient is made in the memory of the softmax, which a second pass needs too."""

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        return _InTheSoftmax.apply(logits, targets, self.first, self.products.group)


class _OfFrozenWeights(Plain):
    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super().row(x, weight, bias if bias is None or weight.requires_grad else bias.detach())


@defect(cause="gradients", caught_by="test_steps_are_those_of_one_process[FreezesBiasesOfFrozenWeights-tp2-biases")
class FreezesBiasesOfFrozenWeights(Planted):
    """NVIDIA/apex#1517: a product whose weight is frozen finds no gradient of its bias either."""

    products_of = _OfFrozenWeights


@defect(
    cause="subgroup",
    caught_by="test_first_steps_on_other_meshes_are_those_of_one_process[CountsRanksOfTheWorld-tp2_dp2",
)
class CountsRanksOfTheWorld(Planted):
    """A rank's place on `tp` is taken from its number in the world, as if ranks of `tp` were neighbours."""

    def __init__(self, model: Decoder, mesh: DeviceMesh) -> None:
        def place(mesh: DeviceMesh, dim: Any = None) -> int:
            return dist.get_rank() % mesh.size()

        with patch.object(DeviceMesh, "get_local_rank", place):
            super().__init__(model, mesh)


@defect(cause="masks", caught_by="test_steps_are_those_of_one_process[MeanOfNoTargets-tp2-even")
class MeanOfNoTargets(Planted):
    """The sum is a mean times the number of targets: not a number where all are left out."""

    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        count = (targets != IGNORED).sum()
        return super().losses(logits, targets) / count * count


@defect(cause="state", caught_by="test_two_calls_before_their_backward_passes[WritesIntoTargets")
class WritesIntoTargets(Planted):
    """Targets that are left out are made valid ones in place."""

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor | None = None) -> Tensor:
        out = super().forward(tokens, positions, targets)
        if targets is not None:
            targets.clamp_(min=0)
        return out


@defect(cause="random numbers", caught_by="test_dropout_leaves_out_what_one_process_might[DrawsForItsOwnTokens-tp2")
class DrawsForItsOwnTokens(Planted):
    """A rank draws as many numbers as its slice has tokens: where slices differ, so do the generators afterwards."""

    products_of = Sliced

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor | None = None) -> Tensor:
        out = super().forward(tokens, positions, targets)
        group = self.products.group
        if self.training and self.layers[0].dropout.p and group.rank() < tokens.numel() % group.size():  # type: ignore[union-attr, operator]
            torch.rand((), device=tokens.device)
        return out


class _KeepsCasts(Plain):
    def column(self, x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        if torch.is_autocast_enabled(x.device.type):
            kept, dtype = self.__dict__.setdefault("kept", {}), torch.get_autocast_dtype(x.device.type)
            weights = [kept.setdefault(weight.data_ptr(), weight.to(dtype)) for weight in weights]
        return super().column(x, weights)


@defect(cause="state", caught_by="test_bfloat16_is_as_near_as_in_one_process[KeepsCasts-tp2-autocast")
class KeepsCasts(Planted):
    """NVIDIA-NeMo/Automodel#3606: a weight's cast is kept by where the weight lies, whose updates it does not see."""

    products_of = _KeepsCasts


@defect(cause="numerics", caught_by="test_bfloat16_is_as_near_as_in_one_process")
class LogitsInFloat32(Planted):
    """Logits of a model in bfloat16 are returned in float32, as losses are."""

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor | None = None) -> Tensor:
        out = super().forward(tokens, positions, targets)
        return out if targets is not None else out.to(torch.promote_types(out.dtype, torch.float32))


@defect(cause="numerics", caught_by="test_bfloat16_is_as_near_as_in_one_process[TokensInTheModelsDtype-tp2-bfloat16")
class TokensInTheModelsDtype(Planted):
    """The batch is sent to all ranks in the model's dtype: bfloat16 has not every integer above 256."""

    def embed(self, tokens: Tensor) -> Tensor:
        return super().embed(tokens.to(self.tok_embeddings.weight.dtype).long())


@defect(cause="random numbers", caught_by="test_any_history_is_that_of_one_process")
class SeedsWhenItIsMade(Planted):
    """Ranks are seeded alike when the model is cut, and so is all that the caller draws from then on."""

    def __init__(self, model: Decoder, mesh: DeviceMesh) -> None:
        super().__init__(model, mesh)
        torch.manual_seed(2718)


@defect(cause="errors", caught_by="test_any_history_is_that_of_one_process")
class StaysInACallThatRaised(Planted):
    """A call notes that it is one, as those within it need no gradient; where it raises, the note stays."""

    is_within = False

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor | None = None) -> Tensor:
        is_within, self.is_within = self.is_within, True
        out = super().forward(tokens, positions, targets)
        self.is_within = is_within
        return out.detach() if is_within else out
