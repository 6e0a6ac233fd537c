"""CS336's leaderboard of 2026: a step of its 8B model that fits two B200s, and the model as predictions take it.

python -m perf.verify examples/leaderboard.py:make --mesh shard=2
python -m shardmark.predict examples/leaderboard.py:plain --hardware b200 --ranks 2 --own-batch
"""

import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from impl.mesh import Decoder, MeshTrainer, Objective, torch_parallel
from impl.mesh.cases import SIZES
from impl.mesh.decoder import IGNORED

CHUNK = 2048
"""Tokens whose logits are in memory at a time."""


class Chunked(Decoder):
    """Returns the sum of the losses: a chunk of logits at a time, again in backward, as the first layers are."""

    recomputed = 0

    def forward(self, tokens, positions, targets):
        x = self.tok_embeddings(tokens)
        for index, layer in enumerate(self.layers):
            x = checkpoint(layer, x, positions, use_reentrant=False) if index < self.recomputed else layer(x, positions)
        hidden, targets = self.norm(x).flatten(0, 1), targets.flatten()  # (tokens, dim), (tokens)
        parts = zip(hidden.split(CHUNK), targets.split(CHUNK), strict=True)
        return torch.stack([checkpoint(self.losses, *part, use_reentrant=False) for part in parts]).sum()

    def losses(self, hidden, targets):
        logits = self.output(hidden)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return cross_entropy(logits, targets, ignore_index=IGNORED, reduction="sum")


def make(model_fn, optimizer_fn, mesh, *, max_norm=1.0):
    """The entry: FSDP2 around it, with 12 of 34 layers recomputed."""

    def model():
        made = model_fn()
        made.__class__, made.recomputed = Chunked, len(made.layers) * 12 // 34
        return made

    objective = Objective(lambda model, batch: model(*batch))
    return MeshTrainer(torch_parallel, model, optimizer_fn, mesh, max_norm=max_norm, objective=objective)


def plain():
    """For predictions: a rank's row, and all its logits."""
    return (
        Decoder(SIZES["8b"]).bfloat16(),
        _row(),
        lambda model, tokens, positions, targets: cross_entropy(
            model(tokens, positions).flatten(0, 1), targets.flatten()
        ),
    )


def chunked():
    """For predictions: logits by chunks."""
    return _chunked(0)


def recomputing_12():
    return _chunked(12)


def recomputing_all():
    return _chunked(34)


def _chunked(layers):
    model = Chunked(SIZES["8b"]).bfloat16()
    model.recomputed = layers
    return model, _row(), lambda model, *batch: model(*batch) / batch[0].numel()


def _row():
    tokens = torch.zeros((1, 32_768), dtype=torch.long)
    return tokens, torch.arange(32_768).expand(1, -1), tokens
