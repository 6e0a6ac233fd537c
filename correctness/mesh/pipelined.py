"""A right trainer whose model is cut into stages by hand: the base of planted defects of pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.mesh.manual import Manual
from correctness.mesh.operators import summed
from impl.mesh.decoder import Batch
from shardmark.api import Unsupported

EMBEDDINGS = "tok_embeddings.weight"


class Passed(nn.Module):
    """Stands for a module of another stage."""

    def forward(self, x: Tensor, *more: Tensor) -> Tensor:
        return x


class Pipelined(Manual):
    """Each rank of `pp` has a stage: the same share of the layers, the first with the embeddings and the last with the
    norm and the logits. All forward passes come before the backward passes (Huang et al., "GPipe", 2019)."""

    axes = ("pp", "dp", "shard", "cp")

    @property
    def is_first(self) -> bool:
        return self.rank("pp") == 0

    @property
    def is_last(self) -> bool:
        return self.rank("pp") == self.size("pp") - 1

    # The stage.

    def cut(self) -> None:
        model = self.model
        if len(model.layers) < self.size("pp"):
            raise Unsupported(f"{len(model.layers)} layers are fewer than {self.size('pp')} stages")
        self.is_tied = model.output.weight is model.tok_embeddings.weight
        own = torch.arange(len(model.layers)).tensor_split(self.size("pp"))[self.rank("pp")].tolist()
        for index in range(len(model.layers)):
            if index not in own:
                model.layers[index] = Passed()
        for name, _ in list(model.named_children()):
            if name != "layers" and not (self.is_last if name in ("norm", "output") else self.is_first):
                setattr(model, name, Passed())
        super().cut()

    def named(self) -> dict[str, nn.Parameter]:
        """The last stage has a copy of tied embeddings, under their name."""
        return {
            EMBEDDINGS if self.is_tied and name == "output.weight" else name: parameter
            for name, parameter in super().named().items()
        }

    # Passes.

    def run(self, batches: Sequence[Batch], tokens: Tensor) -> Tensor:
        self.total = torch.zeros((), dtype=torch.float64)
        self.under_way: list[tuple[Any, Tensor]] = []
        self.run_passes(batches, tokens)
        for work, _ in self.under_way:
            work.wait()
        return self.total

    def run_passes(self, batches: Sequence[Batch], tokens: Tensor) -> None:
        passes = [self.forward_pass(index, batches, tokens) for index in range(len(batches))]
        for index, (x, out) in enumerate(passes):
            self.backward_pass(x, out, index == len(batches) - 1)

    def forward_pass(self, index: int, batches: Sequence[Batch], tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The stage's input and output, which is this micro-batch's part of the loss on the last stage."""
        batch = batches[index]
        x = batch[0] if self.is_first else self.receive(batch)
        if self.is_last:
            losses = self.losses((x, *batch[1:]))
            self.total += losses.detach()
            return x, self.weighted(losses, batch, batches, tokens)
        out = self.model(x, batch[1])
        self.send(out.detach(), self.rank("pp") + 1)
        return x, out

    def send(self, x: Tensor, to: int) -> None:
        """Two stages may send to one another at once, so that neither waits here."""
        x = x.contiguous()
        self.under_way.append((dist.isend(x, group=self.group("pp"), group_dst=to), x))

    def receive(self, batch: Batch) -> Tensor:
        """The stage before sends its output of a micro-batch."""
        like = next(iter(self.parameters.values()))
        x = torch.empty(*batch[0].shape, self.model.size.dim, dtype=like.dtype, device=like.device)
        dist.recv(x, group=self.group("pp"), group_src=self.rank("pp") - 1)
        return x.requires_grad_()

    def backward_pass(self, x: Tensor, out: Tensor, last: bool) -> None:
        if self.is_last:
            self.backward(out, last)
        else:
            gradient = torch.empty_like(out)
            dist.recv(gradient, group=self.group("pp"), group_src=self.rank("pp") + 1)
            if out.requires_grad:
                out.backward(gradient)
        if not self.is_first:
            self.give_back(x)

    def give_back(self, x: Tensor) -> None:
        """Send the gradient of the stage's input to the stage before."""
        assert x.grad is not None
        self.send(x.grad, self.rank("pp") - 1)

    def reported(self, total: Tensor, tokens: Tensor) -> float:
        return super().reported(self.over(total, ("pp",)), tokens)

    # Gradients.

    def reduce_gradients(self) -> None:
        super().reduce_gradients()
        if self.is_tied:
            self.share_tied()

    def share_tied(self) -> None:
        """Add the gradients of both copies of the embeddings."""
        own = self.parameters.get(EMBEDDINGS)
        size, like = self.model.size, next(iter(self.parameters.values()))
        zeros = torch.zeros(size.vocabulary, size.dim, dtype=like.dtype, device=like.device)
        both = summed(zeros if own is None or own.grad is None else own.grad, self.group("pp"))
        if own is not None:
            own.grad = both

    def norm(self) -> Tensor:
        squares = [self.square(name) for name in self.pieces if self.is_counted(name)]
        return self.over(torch.stack(squares).sum(), ("pp",)).sqrt()

    def is_counted(self, name: str) -> bool:
        """Whether the norm has the parameter from this stage."""
        return name != EMBEDDINGS or self.is_first

    # Results for others.

    def full_parameters(self) -> dict[str, Tensor]:
        return self.of_all_stages(super().full_parameters())

    def full_gradients(self) -> dict[str, Tensor]:
        return self.of_all_stages(super().full_gradients())

    def of_all_stages(self, own: dict[str, Tensor]) -> dict[str, Tensor]:
        stages = [own] * self.size("pp")
        if self.group("pp") is not None:
            dist.all_gather_object(stages, own, group=self.group("pp"))
        return {name: tensor for stage in reversed(stages) for name, tensor in stage.items()}
