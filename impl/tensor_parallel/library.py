"""PyTorch's own: `parallelize_module`, and `loss_parallel` for the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module
from torch.nn.functional import cross_entropy

from impl.mesh.decoder import IGNORED, Decoder, FeedForward
from impl.mesh.library import FEED_FORWARD, attention_plan
from shardmark.api import Race, Unsupported, register


class LossByTorch(torch.autograd.Function):
    """The sum of cross entropies by logits (rows, context, own columns). `loss_parallel` must be on in backward too, so
    that the gradient is found at once."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, mesh: DeviceMesh, columns: int) -> Tensor:
        shape = torch.Size((*logits.shape[:-1], columns))
        stride = (shape[1] * columns, columns, 1)
        with torch.inference_mode(False), torch.enable_grad(), loss_parallel():  # needs autograd's dispatch
            own = logits.clone() if logits.is_inference() else logits.detach()
            own = own.to(torch.promote_types(own.dtype, torch.float32))  # a half has no digits for a sum of thousands
            every: Any = DTensor.from_local(
                own, mesh, [Shard(2)], run_check=False, shape=shape, stride=stride
            ).requires_grad_()
            loss: Any = cross_entropy(every.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
            (gradient,) = torch.autograd.grad(loss, every)
        ctx.save_for_backward(gradient.to_local().to(logits.dtype))
        return loss.full_tensor().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        (of_logits,) = ctx.saved_tensors
        return of_logits * gradient, None, None, None


class WithLoss(Decoder):
    """The decoder, which returns the loss where it is given targets."""

    mesh: DeviceMesh

    def forward(self, tokens: Tensor, positions: Tensor, targets: Tensor | None = None) -> Tensor:
        logits: Any = super().forward(tokens, positions)
        if targets is None:
            return logits.full_tensor()
        return LossByTorch.apply(logits.to_local(), targets, self.mesh, self.output.out_features)


def refuse(model: Decoder, mesh: DeviceMesh) -> None:
    """Unsupported for models that PyTorch's plan cannot cut."""
    size = model.size
    if size.experts:
        raise Unsupported("it cuts no experts")
    if model.output.weight is model.tok_embeddings.weight:
        raise Unsupported("parallelize_module would cut tied embeddings apart")
    for heads in (size.heads, size.kv_heads):
        if heads % mesh.size():
            raise Unsupported(f"{heads} heads cannot be cut over {mesh.size()} ranks")
    if size.attention_dropout:
        raise Unsupported("each rank's heads would lose the same shares, as ranks are seeded alike")
    if size.hidden % mesh.size() or size.vocabulary % mesh.size():
        raise Unsupported("RowwiseParallel takes a rank's columns for as many as each other rank's")


def with_loss(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    """The model, whose output is a DTensor of logits, with a loss."""
    model.__class__ = WithLoss
    model.mesh = mesh  # type: ignore[assignment]
    return model


def parallelize_by_torch(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    """See `impl.tensor_parallel.Parallelize`."""
    refuse(model, mesh)
    for layer in model.layers:
        assert isinstance(layer.feed_forward, FeedForward)
        plan = {f"attention.{name}": style for name, style in attention_plan(model).items()}
        parallelize_module(layer, mesh, plan | {f"feed_forward.{name}": style for name, style in FEED_FORWARD.items()})
    logits = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(model, mesh, {"tok_embeddings": RowwiseParallel(input_layouts=Replicate()), "output": logits})
    return with_loss(model, mesh)


register(
    "tensor_parallel",
    "library",
    parallelize_by_torch,
    time=Race("plain"),
    tested_briefly=True,
    called="PyTorch's tensor parallelism",
)
