"""Stages of a decoder, for pipelines."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

from impl.mesh.decoder import Decoder
from shardmark.api import Unsupported

EMBEDDINGS, OUTPUT = "tok_embeddings.weight", "output.weight"


class Numbered(nn.ModuleList):
    """Layers under their numbers in the whole model, which need not begin at 0."""

    def __init__(self, numbered: Iterable[tuple[int, nn.Module]]) -> None:
        super().__init__()
        for number, layer in numbered:
            self.add_module(str(number), layer)


def cut_to_stage(model: Decoder, stage: int, stages: int) -> Decoder:
    """Leave one stage of the model, in place, under the names that it has in the whole: an equal share of the layers,
    in the first stage the embeddings, and in the last one all else. Tied embeddings are then two parameters."""
    layers = len(model.layers)
    if layers < stages:
        raise Unsupported(f"{layers} layers are fewer than {stages} stages")
    own = range(stage * layers // stages, (stage + 1) * layers // stages)
    model.layers = Numbered((number, model.layers[number]) for number in own)
    if model.output.weight is model.tok_embeddings.weight:
        model.output.weight = nn.Parameter(model.output.weight.detach().clone(), model.output.weight.requires_grad)
    for name, _ in list(model.named_children()):
        belongs = 0 if name == "tok_embeddings" else stages - 1
        if name != "layers" and stage != belongs:
            setattr(model, name, nn.Identity())
    return model
