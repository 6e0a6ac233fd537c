"""Stages of a decoder, for pipelines."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from impl.mesh.decoder import Decoder, DecoderSize
from shardmark.api import Unsupported

EMBEDDINGS, OUTPUT = "tok_embeddings.weight", "output.weight"


class Numbered(nn.ModuleList):
    """Layers under their numbers in the whole model, which need not begin at 0."""

    def __init__(self, numbered: Iterable[tuple[int, nn.Module]]) -> None:
        super().__init__()
        for number, layer in numbered:
            self.add_module(str(number), layer)


def layers_of(stage: int, stages: int, layers: int) -> range:
    """The numbers of a stage's layers."""
    return range(stage * layers // stages, (stage + 1) * layers // stages)


def cut_to_stage(model: Decoder, stage: int, stages: int) -> Decoder:
    """Leave one stage of the model, in place, under the names that it has in the whole: an equal share of the layers,
    in the first stage the embeddings, and in the last one all else. Tied embeddings are then two parameters."""
    layers = len(model.layers)
    if layers < stages:
        raise Unsupported(f"{layers} layers are fewer than {stages} stages")
    model.layers = Numbered((number, model.layers[number]) for number in layers_of(stage, stages, layers))
    if model.output.weight is model.tok_embeddings.weight:
        model.output.weight = nn.Parameter(model.output.weight.detach().clone(), model.output.weight.requires_grad)
    for name, _ in list(model.named_children()):
        belongs = 0 if name == "tok_embeddings" else stages - 1
        if name != "layers" and stage != belongs:
            setattr(model, name, nn.Identity())
    return model


def passed_on(dim: int, dtype: torch.dtype, inputs: Sequence[torch.Size]) -> list[tuple[torch.Size, torch.dtype]]:
    """Shape and dtype of the tensor between two stages, by the shape of the first input: tokens (rows, context)."""
    return [(torch.Size((*inputs[0], dim)), dtype)]


class DecoderStage(nn.Module):
    """A stage of a decoder of its own, which counts positions from 0: tokens (rows, context) or what the stage before
    returned, (rows, context, dim), to the same, or to logits (rows, context, vocabulary)."""

    def __init__(self, size: DecoderSize, stage: int, stages: int) -> None:
        super().__init__()
        self.decoder = cut_to_stage(Decoder(size), stage, stages)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device).expand(x.shape[:2])
        logits: Tensor = self.decoder(x, positions)
        return logits
