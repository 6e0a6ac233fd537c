"""The contract of tensor parallelism, the check that a target meets it, and the family."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from impl.mesh.decoder import Decoder
from impl.mesh.objective import Objective
from shardmark.api import Family, Refusable, RegistryError, add_family


class Parallelize(Protocol):
    """`parallelize(model, mesh) -> model`, called on every rank with the same whole `Decoder` (`impl.mesh.decoder`),
    whose linear layers may have biases and whose queries, keys and values may be one product, and a `DeviceMesh` of
    one axis, `tp`, which may be a part of a larger mesh, in any order of its axes.

    The returned module is called in two ways, with the same batch on every rank; tokens, positions and targets are
    (rows, context) int64, contiguous or not, of other sizes in each call (with a token for each rank at least, and in
    models whose sizes the ranks divide as many for each), with positions that begin at any number, and again:

        model(tokens, positions)           # the whole logits, (rows, context, vocabulary), on every rank
        model(tokens, positions, targets)  # the sum of the cross entropies of all targets but those that are -100

    Must:

    - Losses, logits and gradients are those of one process, in float64 to 1e-12 at the first step; the loss is bitwise
      equal on all ranks. Under autocast and in bfloat16 models it is float32, as half precision is too coarse for a
      sum, and errors are at most four times one process's, or 2^-7 of a tensor's largest, at any position.
      Logits may be minus infinity, all of one rank's too.
    - Parameters keep the model's own names. Those of attention, of the feed-forward networks, of the embedding and of
      the output are DTensors of which each rank has a part; every rank has the others whole, as DTensors or plain
      tensors. Biases that are added to a sum over ranks may be whole, and so may keys' and values' weights whose heads
      the ranks do not divide.
    - After a backward pass the gradient of a DTensor is one, in which a sum over ranks may still be to be made
      (`Partial`). Whole parameters stay bitwise equal on all ranks.
    - Frozen parameters keep their values, also those that are frozen or thawed between calls; tied ones stay one.
      Several calls may wait for their backward passes, in any order, of which one that keeps its graph may have more;
      what a call has returned stays as it is. Other calls may come before and between them, without autograd or under
      `torch.inference_mode()`, other models' calls, and calls that raise.
    - Dropout draws from the default generators, which ranks of `tp` have in the same state before a call and after it.
      Copies of a value are dropped on all ranks or on none; other tokens, heads and layers draw independently; a call
      that is recomputed drops the same values.
    - A call leaves its arguments as they are, and the model that is returned is in the given one's mode. Nothing moves
      the random state but dropout.
    - With targets, no rank has the whole logits (Shoeybi et al., "Megatron-LM", 2019).
    - FSDP2 over another axis may be put around the module and its layers, and `torch.utils.checkpoint` around a call.

    A size that cannot be cut (heads that the ranks do not divide) is refused as `Unsupported`, as experts are. Others
    than a plain model may be refused: see `_kind`.
    """

    def __call__(self, model: Decoder, mesh: DeviceMesh) -> nn.Module: ...


TOKENS = Objective(losses=lambda model, batch: model(*batch))
"""The objective of `impl.mesh.MeshTrainer` by which no rank has the whole logits."""


def _check(target: Any, device: str) -> None:
    """Check the signature; correctness tests check the rest."""
    if not callable(target):
        raise RegistryError(f"{target!r} is not callable; it is parallelize(model, mesh)")
    try:
        inspect.signature(target).bind(None, None)
    except TypeError as error:
        raise RegistryError(f"it is not called as parallelize(model, mesh): {error}") from None


def _kind(model: Decoder, mesh: DeviceMesh) -> str | None:
    """Words for what is unusual about a model on a mesh; None for one that every implementation must take."""
    size, ranks = model.size, mesh.size()
    found = {
        "experts": size.experts > 0,
        "tied embeddings": model.output.weight is model.tok_embeddings.weight,
        "frozen parameters": not all(parameter.requires_grad for parameter in model.parameters()),
        "biases": any(name.endswith("bias") for name, _ in model.named_parameters()),
        "heads of queries that do not divide": size.heads % ranks > 0,
        "heads of keys and values that do not divide": size.kv_heads % ranks > 0,
        "fused products": size.fused,
        "dropout": size.hidden_dropout > 0,
        "dropout of attention": size.attention_dropout > 0,
        "sizes that do not divide": size.hidden % ranks > 0 or size.vocabulary % ranks > 0,
    }
    return " and ".join(words for words, there in found.items() if there) or None


FAMILY = add_family(
    Family("tensor_parallel", Parallelize, reference="plain", check=_check, may_refuse=(Refusable("models", _kind),))
)
