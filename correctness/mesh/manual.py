"""A right trainer with a step of its own, by hand: the base of planted defects, each of which changes one method.

Each rank of `shard` updates a part of every parameter (Rajbhandari et al., "ZeRO", 2020).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import cross_entropy
from torch.optim import Optimizer

from correctness.mesh.cut_model import CutModel
from correctness.mesh.operators import SumForward, joined
from impl.mesh import Decoder
from impl.mesh.decoder import IGNORED, Batch, token_count
from impl.mesh.trainer import Named
from shardmark.api import Mesh


class Manual(CutModel):
    """See `impl.mesh.Trainer`."""

    def __init__(
        self,
        model_fn: Callable[[], nn.Module],
        optimizer_fn: Callable[[Named], Optimizer],
        mesh: DeviceMesh,
        *,
        max_norm: float = 1.0,
    ) -> None:
        model = model_fn()
        assert isinstance(model, Decoder)
        super().__init__(model, mesh)
        self.max_norm = max_norm
        self.parameters = self.named()
        self.pieces = {name: self.piece(name, p) for name, p in self.parameters.items() if p.requires_grad}
        self.optimizer = self.make_optimizer(optimizer_fn)

    def named(self) -> dict[str, nn.Parameter]:
        """This rank's parameters, each once, under the names of the whole model's."""
        return dict(self.model.named_parameters())

    # A step.

    def step(self, batches: Sequence[Batch]) -> tuple[float, float]:
        for parameter in self.parameters.values():
            parameter.grad = None
        tokens = self.tokens(batches)
        total = self.run(batches, tokens)
        self.reduce_gradients()
        self.give_pieces()
        norm = self.norm()
        if self.is_finite(norm):
            self.clip(norm)
            self.update()
        return self.reported(total, tokens), float(norm)

    def run(self, batches: Sequence[Batch], tokens: Tensor) -> Tensor:
        """Every forward and backward pass; returns the sum of the losses of this rank's targets."""
        total = torch.zeros((), dtype=torch.float64)
        for index, batch in enumerate(batches):
            losses = self.losses(batch)
            self.backward(self.weighted(losses, batch, batches, tokens), index == len(batches) - 1)
            total = total + losses.detach()
        return total

    def count(self, batch: Batch) -> Tensor:
        return token_count(batch)

    def tokens(self, batches: Sequence[Batch]) -> Tensor:
        """Targets of the step, over all ranks and micro-batches."""
        return self.over(torch.stack([self.count(batch) for batch in batches]).sum(), self.data_axes())

    def losses(self, batch: Batch) -> Tensor:
        """The sum of the losses of this rank's targets."""
        tokens, positions, targets = batch
        logits = self.model(tokens, positions).flatten(0, 1)
        if self.group("tp") is None:
            return cross_entropy(logits, targets.flatten(), ignore_index=IGNORED, reduction="sum")
        return self.vocabulary_loss(logits, targets.flatten())

    def vocabulary_loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss by logits of which each rank has the columns of its part of the vocabulary."""
        group, first = self.group("tp"), self.rank("tp") * logits.shape[1]
        largest = logits.detach().amax(1)
        if group is not None:
            dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        sums = SumForward.apply((logits - largest[:, None]).exp().sum(1), group)
        own = (targets >= first) & (targets < first + logits.shape[1])
        picked = logits.gather(1, torch.where(own, targets - first, 0)[:, None]).squeeze(1)
        return ((sums.log() + largest - self.correct(picked, own)) * (targets != IGNORED)).sum()

    def correct(self, picked: Tensor, own: Tensor) -> Tensor:
        """The targets' logits, of which this rank has picked its own, and others anything."""
        return SumForward.apply(picked * own, self.group("tp"))

    def weighted(self, losses: Tensor, batch: Batch, batches: Sequence[Batch], tokens: Tensor) -> Tensor:
        """The summand of the step's loss. Gradients are added over the ranks, not averaged."""
        return losses / tokens

    def backward(self, loss: Tensor, last: bool) -> None:
        loss.backward()

    def reported(self, total: Tensor, tokens: Tensor) -> float:
        return float(self.over(total, self.data_axes()) / tokens)

    # Gradients.

    def is_expert(self, name: str) -> bool:
        return self.cuts.get(name, ("", 0))[0] == "ep"

    def is_on_slices(self, name: str) -> bool:
        """Whether each rank of `tp` used the whole parameter on its part of the sequence alone."""
        return "norm" in name

    def reduced_over(self, name: str) -> tuple[str, ...]:
        """The axes over which a gradient is added."""
        axes = self.data_axes()
        if self.is_expert(name):  # it has the tokens of all ranks of ep already
            axes = tuple(axis for axis in axes if axis not in self.below_experts())
        return (*axes, "tp") if self.is_on_slices(name) else axes

    def below_experts(self) -> tuple[str, ...]:
        names = self.mesh.mesh_dim_names or ()
        return Mesh(tuple((name, self.size(name)) for name in names), self.size("ep")).below_experts()

    def reduce_gradients(self) -> None:
        for name, parameter in self.parameters.items():
            if parameter.requires_grad:
                self.reduce(name, parameter)

    def reduce(self, name: str, parameter: nn.Parameter) -> None:
        """All ranks take part, with zeros if need be."""
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.grad = self.over(own, self.reduced_over(name))

    # Norm and update.

    def summed_over(self, name: str) -> tuple[str, ...]:
        """The axes along which ranks have other parts of a gradient: over these the norm's squares are added."""
        axes = ("shard",) * self.is_sharded(name) + (self.cuts.get(name, ("", 0))[0],)
        return tuple(axis for axis in axes if self.group(axis) is not None)

    def square(self, name: str) -> Tensor:
        gradient = self.pieces[name].grad
        assert gradient is not None
        return self.over(gradient.square().sum(), self.summed_over(name))

    def norm(self) -> Tensor:
        return torch.stack([self.square(name) for name in self.pieces]).sum().sqrt()

    def is_finite(self, norm: Tensor) -> bool:
        return bool(torch.isfinite(norm))

    def clip(self, norm: Tensor) -> None:
        scale = (self.max_norm / (norm + 1e-6)).clamp(max=1.0)
        for piece in self.pieces.values():
            assert piece.grad is not None
            piece.grad.mul_(scale)

    def is_sharded(self, name: str) -> bool:
        """Whether ranks of `shard` update a part each: each has other experts where ep lies over them."""
        return self.group("shard") is not None and not (self.is_expert(name) and "shard" in self.below_experts())

    def piece(self, name: str, parameter: nn.Parameter) -> nn.Parameter:
        """The part of a parameter that this rank of `shard` updates."""
        if not self.is_sharded(name):
            return parameter
        return nn.Parameter(self.own_piece(parameter.detach()).clone())

    def own_piece(self, whole: Tensor) -> Tensor:
        return whole.flatten().tensor_split(self.size("shard"))[self.rank("shard")]

    def give_pieces(self) -> None:
        """Each piece gets its part of the gradient."""
        for name, piece in self.pieces.items():
            gradient = self.parameters[name].grad
            if piece is not self.parameters[name] and gradient is not None:
                piece.grad = self.own_piece(gradient).clone()

    def make_optimizer(self, optimizer_fn: Callable[[Named], Optimizer]) -> Optimizer:
        return optimizer_fn(list(self.pieces.items()))

    def update(self) -> None:
        self.optimizer.step()
        self.take_pieces()

    @torch.no_grad()
    def take_pieces(self) -> None:
        """Gather the updated pieces."""
        for name, piece in self.pieces.items():
            parameter = self.parameters[name]
            if piece is not parameter:
                parameter.copy_(joined(piece, 0, self.group("shard")).view_as(parameter))

    # Results for others.

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        axis, dim = self.cuts.get(name, ("", 0))
        return joined(tensor.detach(), dim, self.group(axis)).clone()

    def full_parameters(self) -> dict[str, Tensor]:
        return {name: self.whole(name, parameter) for name, parameter in self.parameters.items()}

    def full_gradients(self) -> dict[str, Tensor]:
        found = {}
        for name, piece in self.pieces.items():
            assert piece.grad is not None
            gradient = piece.grad
            if piece is not self.parameters[name]:
                gradient = joined(gradient, 0, self.group("shard")).view_as(self.parameters[name])
            found[name] = self.whole(name, gradient)
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        for name, piece in self.pieces.items():
            if piece is not self.parameters[name]:
                piece.data.copy_(self.own_piece(self.parameters[name].detach()))
