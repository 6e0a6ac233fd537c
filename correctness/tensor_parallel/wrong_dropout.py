"""Defects of tensor parallelism: dropout that is alike where it must differ, or differs where it must be alike."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import dropout

from correctness.support.planting import defect
from correctness.tensor_parallel.wrong import Planted
from correctness.tensor_parallel.wrong_parts import WithAttention
from impl.mesh.decoder import Decoder, causal_attention
from impl.tensor_parallel import Plain, Sliced
from impl.tensor_parallel.drawing import drawing_apart


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


class _AlikeOnSlices(Sliced):
    def dropped(self, x: Tensor, p: float) -> Tensor:
        return dropout(x, p)


@defect(cause="random numbers", caught_by="test_dropout_leaves_out_what_one_process_might[DropsAlikeOnSlices-tp2-att")
class DropsAlikeOnSlices(Planted):
    """NVIDIA/TransformerEngine#1272: under sequence parallelism dropout draws from the generator that is alike on all
    ranks, and so each slice loses the same values."""

    products_of = _AlikeOnSlices


class _ApartOnCopies(Plain):
    def dropped(self, x: Tensor, p: float) -> Tensor:
        with drawing_apart(x.device, self.group):
            return dropout(x, p)


@defect(cause="random numbers", caught_by="test_dropout_leaves_out_what_one_process_might[DropsApartOnCopies-tp2-att")
class DropsApartOnCopies(Planted):
    """InternLM/InternLM#405: ranks draw apart also where each has the same tokens, whose copies differ from then on."""

    products_of = _ApartOnCopies


@defect(cause="random numbers", caught_by="test_dropout_leaves_out_what_one_process_might[DropsAlikeOfHeads-tp2-heads")
class DropsAlikeOfHeads(WithAttention):
    """NVIDIA/Fuser#3123: the heads of each rank lose the shares that those of the first one lose."""

    def change(self, attention: Any) -> None:
        def attend(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return causal_attention(q, k, v, self.dropout if self.training else 0.0)

        attention.attend = MethodType(attend, attention)


@defect(cause="state", caught_by="test_dropout_leaves_out_what_one_process_might[LeavesItsOwnState-tp2-heads")
class LeavesItsOwnState(WithAttention):
    """A rank draws apart for its heads and goes on from there, so that later draws differ on copies."""

    def change(self, attention: Any) -> None:
        def attend(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            if not self.training:
                return causal_attention(q, k, v, 0.0)
            torch.manual_seed(int(torch.randint(2**62, ())) + self.products.group.rank())
            return causal_attention(q, k, v, self.dropout)

        attention.attend = MethodType(attend, attention)


class _ByPlace(Sliced):
    def dropped(self, x: Tensor, p: float) -> Tensor:
        with _seeded(1234 + self.group.rank()):
            return dropout(x, p)


@defect(cause="random numbers", caught_by="test_dropout_leaves_out_what_one_process_might[DropsByPlace-dp2_tp2-att")
class DropsByPlace(Planted):
    """tenstorrent/tt-metal#55947: the seed is that of the place along tp, so that groups with rows of their own lose
    the same values, as do two calls."""

    products_of = _ByPlace


class _Counting(Sliced):
    calls = 0

    def dropped(self, x: Tensor, p: float) -> Tensor:
        _Counting.calls += 1
        with _seeded(torch.initial_seed() + 1000 * _Counting.calls + self.group.rank()):
            return dropout(x, p)


@defect(cause="random numbers", caught_by="test_dropout_leaves_out_what_one_process_might[CountsCalls-tp2-att")
class CountsCalls(Planted):
    """Seeds are counted by the rank itself, which checkpointing knows nothing of: a call that is recomputed loses other
    values than the one that it repeats."""

    products_of = _Counting


@defect(cause="state", caught_by="test_dropout_leaves_out_what_one_process_might[DropsInEvaluation-tp2-heads")
class DropsInEvaluation(WithAttention):
    """Attention is called as a function, which asks nobody whether the model is trained."""

    def change(self, attention: Any) -> None:
        def attend(self: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with drawing_apart(q.device, self.products.group):
                return causal_attention(q, k, v, self.dropout)

        attention.attend = MethodType(attend, attention)


class _FromTheCallsSeed(Sliced):
    seed = 0

    def dropped(self, x: Tensor, p: float) -> Tensor:
        with _seeded(self.seed + self.group.rank()):
            return dropout(x, p)


@defect(cause="random numbers", caught_by="test_dropout_leaves_out_what_one_process_might[OneSeedForACall-tp2-att")
class OneSeedForACall(Planted):
    """A call draws one seed, from whose beginning each of its dropouts draws: all layers lose the same values."""

    products_of = _FromTheCallsSeed

    def forward(self, *args: Any) -> Tensor:
        self.products.seed = int(torch.randint(2**62, ()))  # type: ignore[attr-defined]
        return super().forward(*args)


class _FromTheSameState(Sliced):
    def dropped(self, x: Tensor, p: float) -> Tensor:
        with _seeded(torch.initial_seed() + self.group.rank()):
            return dropout(x, p)


@defect(cause="random numbers", caught_by="test_dropout_leaves_out_what_one_process_might[BeginsAnew-tp2-att")
class BeginsAnew(Planted):
    """Each rank has a seed of its own, and draws from its beginning in every layer and call."""

    products_of = _FromTheSameState


@defect(cause="state", caught_by="test_dropout_leaves_out_what_one_process_might[DropsInNewModules-tp2-att")
class DropsInNewModules(Planted):
    """New modules are in training mode, also where those were not that they stand for."""

    def __init__(self, model: Decoder, mesh: DeviceMesh) -> None:
        super().__init__(model, mesh)
        for module in self.modules():
            module.training = True
