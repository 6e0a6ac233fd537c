"""PyTorch's own: `fully_shard` over `dp` and `shard`, around `parallelize_module` over `tp`."""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from impl.mesh.decoder import Decoder, FeedForward
from impl.mesh.replicated import refuse_but
from shardmark.api import Race, Unsupported, find_blocks, register

ATTENTION = {"wq": ColwiseParallel(), "wk": ColwiseParallel(), "wv": ColwiseParallel(), "wo": RowwiseParallel()}
FUSED = {"wqkv": ColwiseParallel(), "wo": RowwiseParallel()}
FEED_FORWARD = {"w1": ColwiseParallel(), "w2": RowwiseParallel(), "w3": ColwiseParallel()}


def attention_plan(model: Decoder) -> dict[str, ParallelStyle]:
    """Styles of attention's products, by name."""
    return dict(FUSED if model.size.fused else ATTENTION)


def torch_parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """FSDP2, or HSDP where there is `dp` beside `shard`, of each layer, whose products are cut over `tp`. Other models
    than `Decoder` are not cut: each has a plan of its own."""
    names = refuse_but(mesh, "dp", "shard", *(["tp"] if isinstance(model, Decoder) else []))
    if "tp" in names and isinstance(model, Decoder):
        _cut_products(model, mesh["tp"])
    rows = tuple(name for name in ("dp", "shard") if name in names)
    if rows:
        for block in find_blocks(model):
            fully_shard(block, mesh=mesh[rows])
        fully_shard(model, mesh=mesh[rows])
    return model


def _cut_products(model: Decoder, tp: DeviceMesh) -> None:
    """Column-parallel and row-parallel products; norms, and a mixture's experts, are whole on each rank."""
    if model.size.kv_heads % tp.size():
        raise Unsupported(f"{model.size.kv_heads} heads of keys and values cannot be cut over {tp.size()} ranks")
    for layer in model.layers:
        plan = {f"attention.{name}": style for name, style in attention_plan(model).items()}
        if isinstance(layer.feed_forward, FeedForward):
            plan |= {f"feed_forward.{name}": style for name, style in FEED_FORWARD.items()}
        parallelize_module(layer, tp, plan)
    if _weight(model.output) is not _weight(model.tok_embeddings):
        plan = {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate()),
            "output": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(
            model, tp, {name: each for name, each in plan.items() if _weight(getattr(model, name)) is not None}
        )


def _weight(module: nn.Module) -> nn.Parameter | None:
    """The module's weight; a stage of a decoder has modules without."""
    return getattr(module, "weight", None)


register(
    "mesh",
    "library",
    torch_parallel,
    time=Race("naive"),
    tested_briefly=True,
    called="PyTorch's FSDP2 and tensor parallelism",
)
