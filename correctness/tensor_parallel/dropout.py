"""Dropout of a parallel model, read off its logits: models whose values say which of them were left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from correctness.tensor_parallel.calls import WITHIN
from impl.distributed import full
from impl.mesh import Decoder, DecoderSize, token_losses
from impl.mesh.decoder import Batch
from shardmark.api import Implementation, Mesh

DIM, HEADS, SHARE = 48, 24, 0.25
SHAPES = {"attention.wo": (2, 12), "feed_forward.w2": (5, 5), "heads": (64, 1)}
"""Rows and context by the place of dropout: behind a product, or on attention's shares, of which a token alone has one
for each head."""
OTHER = {"attention.wo": ("feed_forward.w2", 0), "feed_forward.w2": ("feed_forward.w2", 1), "heads": ("heads", 1)}
"""Place and layer of another dropout, whose values must not be those of layer 0 at this place."""


def revealing(place: str, device: str, number: int = 0) -> Decoder:
    """A decoder of two layers, in float64: its residual is 1, to which one network of layer `number` adds 1 to each
    value, or a head's values, where dropout leaves it in, and the others nothing. The output shows the residual,
    normalized."""
    hidden, attention = (0.0, SHARE) if place == "heads" else (SHARE, 0.0)
    size = DecoderSize(DIM, 2, HEADS, HEADS // 2, DIM, DIM, hidden_dropout=hidden, attention_dropout=attention)
    model = Decoder(size).double()
    shown = model.get_submodule(f"layers.{number}.{weight_of(place)}")
    silent = [linear for layer in model.layers for linear in (layer.attention.wo, layer.feed_forward.w2)]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0 if parameter.ndim == 1 else 1 / DIM)
        model.tok_embeddings.weight.fill_(1.0)
        for linear in (*silent, model.output):
            linear.weight.copy_(torch.eye(DIM) * (linear in (shown, model.output)))
    return model.to(device)


def weight_of(place: str) -> str:
    """The product whose gradient shows what dropout behind it, or before it, has left out."""
    return "attention.wo" if place == "heads" else place


def left_in(place: str, logits: Tensor) -> Tensor:
    """(rows, context, dim) or, of heads, (rows, heads): where dropout leaves a value in."""
    middle = (logits.amax(-1, keepdim=True) + logits.amin(-1, keepdim=True)) / 2
    found = logits > middle
    return found[:, 0].unflatten(-1, (HEADS, -1))[..., 0] if place == "heads" else found


def batch_of(place: str, device: str = "cpu") -> Batch:
    rows, context = SHAPES[place]
    tokens = torch.arange(rows * context, device=device).view(rows, context) % DIM
    return tokens, torch.arange(context, device=device).expand(rows, -1), tokens


@dataclass
class Dropped:
    """Results of a rank. Two calls, one of which is recomputed in backward, begin in the same state."""

    logits: list[Tensor]
    """Logits of two calls, and of one that shows another dropout."""
    evaluated: list[Tensor]
    """Logits in eval mode: of a model set to it, and of one that was in it when it was given."""
    losses: list[Tensor]
    """By the logits of these calls."""
    gradients: list[Tensor]
    state: bytes
    """State of the device's generator after a call with targets, the last one."""


def drop_on_rank(implementation: Implementation, mesh: Mesh, place: str, device: str) -> Dropped:
    """Ranks with the same rows are seeded alike."""
    on = mesh.device_mesh(torch.device(device).type)["tp"]
    model, other = (implementation.watched(revealing(*of), on) for of in ((place, device), _other(place, device)))
    *inputs, targets = batch_of(place, device)
    seed = 100 + mesh.row_group(dist.get_rank())
    model(*inputs)  # DTensor gives all ranks the first one's state when it first draws on a GPU
    losses, gradients, logits = [], [], []
    for call in (model, partial(checkpoint, model, use_reentrant=False)):
        torch.manual_seed(seed)
        model.zero_grad()
        logits.append(call(*inputs))
        losses.append(cross_entropy(logits[-1].flatten(0, 1), targets.flatten(), reduction="sum"))
        losses[-1].backward()
        weight = dict(model.named_parameters())[f"layers.0.{weight_of(place)}.weight"]
        gradients.append(full(weight.grad).cpu())
    with torch.no_grad():
        logits[1] = model(*inputs)
        torch.manual_seed(seed)
        logits.append(other(*inputs))
        evaluated = model.eval()(*inputs).cpu()
        given_so = implementation.watched(revealing(place, device).eval(), on)(*inputs).cpu()
    model.train()(*inputs, targets)
    state = torch.cuda.get_rng_state() if torch.device(device).type == "cuda" else torch.get_rng_state()
    calls = [each.detach().cpu() for each in logits]
    return Dropped(
        calls, [evaluated, given_so], [loss.detach().cpu() for loss in losses], gradients, state.numpy().tobytes()
    )


def _other(place: str, device: str) -> tuple[str, str, int]:
    other, number = OTHER[place]
    return other, device, number


class LeavesIn(nn.Module):
    """Dropout that leaves in what it is told."""

    def __init__(self, place: str, kept: Tensor) -> None:
        super().__init__()
        self.left = {"attention.wo": [kept, 1], "feed_forward.w2": [1, kept], "heads": [1, 1]}[place]
        """For each call, in their order; 1 where dropout was not asked to leave anything out."""

    def forward(self, x: Tensor) -> Tensor:
        kept = self.left.pop(0)
        return x * kept / (1 - SHARE) if isinstance(kept, Tensor) else x


def _attend(kept: Tensor, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A token alone has its own value."""
    return v.repeat_interleave(2, 1) * kept[..., None, None] / (1 - SHARE)


def in_one_process(place: str, kept: Tensor) -> tuple[Tensor, Tensor]:
    """The loss and the gradient of a decoder whose dropout leaves in what it is told."""
    model = revealing(place, "cpu")
    layer = model.layers[0]
    layer.dropout = LeavesIn(place, kept)
    if place == "heads":
        layer.attention.attend = partial(_attend, kept)  # type: ignore[method-assign]
    loss = token_losses(model, batch_of(place))
    loss.backward()
    gradient = model.get_parameter(f"layers.0.{weight_of(place)}.weight").grad
    assert gradient is not None
    return loss.detach(), gradient


def complaints(ranks: Sequence[Dropped], mesh: Mesh, place: str) -> Iterator[str]:
    """A line for each way in which the ranks' dropout is not that of one process."""
    drawn: dict[bytes, str] = {}  # what was left in, and of what
    for rank, own in enumerate(ranks):
        for logits, when in zip(own.evaluated, ("", ", as the model that it was given is in"), strict=True):
            if logits.std(-1).max() > WITHIN:
                yield f"rank {rank} leaves values out in eval mode{when}"
        kept = left_in(place, own.logits[0])
        loss, gradient = in_one_process(place, kept)
        for call, *found in zip(("a call", "one that is recomputed"), own.losses, own.gradients, strict=True):
            for name, value, right in zip(("loss", "gradient"), found, (loss, gradient), strict=True):
                if not (value - right).abs().max() <= WITHIN * right.abs().max():
                    yield f"the {name} of {call} on rank {rank} is not that of the values that logits show as left in"
        share = 1 - kept.double().mean().item()
        if abs(share - SHARE) > 6 * (SHARE * (1 - SHARE) / kept.numel()) ** 0.5:
            yield f"rank {rank} leaves out {share:.3f} of the values, and not {SHARE}"
        first = next(r for r in range(len(ranks)) if mesh.row_group(r) == mesh.row_group(rank))
        if own.state != ranks[first].state:
            yield f"rank {rank} has its generator in another state after its calls than rank {first}"
        if rank != first:
            continue  # the logits of ranks with the same rows are one: each has its own columns
        for call, logits in enumerate(own.logits):
            found = left_in(place, logits)
            units = found.T if place == "heads" else found.flatten(0, 1)
            for number, unit in enumerate(units):
                name = f"{'head' if place == 'heads' else 'token'} {number} of call {call} on rank {rank}"
                other = drawn.setdefault(unit.numpy().tobytes(), name)
                if other != name:
                    yield f"{name} loses the same values as {other}"
