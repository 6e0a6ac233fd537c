"""PyTorch's own `SequenceParallel`: norms on slices of each sequence."""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from impl.mesh.decoder import Decoder
from impl.mesh.library import FEED_FORWARD, attention_plan
from impl.tensor_parallel.library import WithLoss, refuse, with_loss
from shardmark.api import Race, Unsupported, register


def parallelize_sequence_by_torch(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    """See `impl.tensor_parallel.Parallelize`. Each row's context must be a multiple of the ranks: others raise."""
    refuse(model, mesh)
    if not all(parameter.requires_grad for parameter in model.parameters()):
        raise Unsupported("PyTorch's SequenceParallel thaws frozen norms")
    if model.size.hidden_dropout and mesh.device_type == "cpu":
        raise Unsupported("DTensor draws the same for each slice on a CPU")
    slices = RowwiseParallel(output_layouts=Shard(1))
    plan = {
        "attention_norm": SequenceParallel(),
        "ffn_norm": SequenceParallel(),
        **({"dropout": SequenceParallel(use_local_output=True)} if model.size.hidden_dropout else {}),
        "attention": PrepareModuleInput(
            input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None), use_local_output=True
        ),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        **{f"attention.{name}": style for name, style in (attention_plan(model) | {"wo": slices}).items()},
        **{f"feed_forward.{name}": style for name, style in (FEED_FORWARD | {"w2": slices}).items()},
    }
    for layer in model.layers:
        parallelize_module(layer, mesh, plan)
    logits = ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False)
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    parallelize_module(model, mesh, {"tok_embeddings": embedding, "norm": SequenceParallel(), "output": logits})
    model.register_forward_pre_hook(_refuse_contexts)
    return with_loss(model, mesh)


def _refuse_contexts(model: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    context, ranks = inputs[0].shape[1], cast(WithLoss, model).mesh.size()
    if context % ranks:
        raise ValueError(f"a context of {context} tokens cannot be cut over {ranks} ranks")


register(
    "tensor_parallel",
    "library_sequence",
    parallelize_sequence_by_torch,
    time=Race("sequence"),
    tested_briefly=True,
    called="PyTorch's sequence parallelism",
)
