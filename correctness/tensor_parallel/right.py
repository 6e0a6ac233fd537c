"""Right ways of tensor parallelism that work in unusual ways: the tests must accept them."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from torch.nn.functional import linear

from correctness.mesh.operators import Gather, equal_part
from correctness.support.planting import right
from correctness.tensor_parallel.wrong import Planted
from correctness.tensor_parallel.wrong_losses import BySteps
from impl.tensor_parallel import Plain, Sliced
from impl.tensor_parallel.communication import Group
from impl.tensor_parallel.vocabulary import VocabularyLoss


class _ByAllReduce(Sliced):
    def column(self, x: Tensor, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        every = Gather.apply(x, 0, self.group, True)
        return [linear(every, weight) for weight in weights]

    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        out = self.reduce(linear(x, weight))
        return out if bias is None else out + self.whole(bias)

    def reduce(self, summand: Tensor) -> Tensor:
        return equal_part(summand, 0, self.group, True)


@right("slices are taken of what an all-reduce sums, and gathered ones are kept for backward")
class SlicesOfSums(Planted):
    products_of = _ByAllReduce


class _StraightThrough(Plain):
    def row(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None:
            bias = bias + (bias / self.group.size() - bias).detach()
        return self.reduce(linear(x, weight, bias))


@right("each rank adds its share of the bias, whose gradient is that of the whole (pytorch/torchtitan#4332)")
class SharesTheBias(Planted):
    products_of = _StraightThrough


class _ThreeChunks(Sliced):
    def __init__(self, group: Group) -> None:
        super().__init__(group, 3)


@right("three chunks, for which the tokens are padded")
class InThreeChunks(Planted):
    products_of = _ThreeChunks


@right("the loss of a few tokens after the other")
class LossesByTokens(Planted):
    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        parts = zip(logits.split(5), targets.split(5), strict=True)
        each = [VocabularyLoss.apply(own, aim, self.first, self.products.group) for own, aim in parts]
        return sum(each[1:], each[0])


@right("the loss by operators that autograd differentiates, in chunks so that their memory is small")
class LossesBySteps(BySteps):
    def losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        parts = zip(logits.split(5), targets.split(5), strict=True)
        each = [super(LossesBySteps, self).losses(*part) for part in parts]
        return sum(each[1:], each[0])
