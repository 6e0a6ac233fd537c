"""A residual MLP language model. Without attention, a step is only matrix products, pointwise operators and the loss.

from impl.model.mlp import MLP_SIZES, MLPLanguageModel

model = MLPLanguageModel(MLP_SIZES["mlp-1024"])
logits = model(tokens)  # (batch, context) -> (batch, context, vocab)
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True)
class MLPSize:
    """Width and depth; a block's hidden width is four times the model's."""

    dim: int
    layers: int
    vocab: int = 32_768

    @property
    def hidden(self) -> int:
        """Width inside a block."""
        return 4 * self.dim

    @property
    def parameters(self) -> int:
        """The number of parameters: embedding, blocks with biases, final norm, output projection."""
        block = 2 * self.dim * self.hidden + self.hidden + self.dim
        return 2 * self.vocab * self.dim + self.layers * block + 2 * self.dim


MLP_SIZES = {
    #                   dim  layers
    "mlp-tiny": MLPSize(32, 2, vocab=512),
    "mlp-short": MLPSize(128, 1, vocab=4_096),  # one block: each adds to compile time
    "mlp-mini": MLPSize(128, 3, vocab=4_096),
    "mlp-1024": MLPSize(1024, 3),
    "mlp-4096": MLPSize(4096, 4),
}


class MLPBlock(nn.Module):
    """x + W2 gelu(W1 x + b1) + b2 (He et al., 2016; Hendrycks and Gimpel, 2016, tanh form); (..., dim) in and out."""

    def __init__(self, size: MLPSize) -> None:
        super().__init__()
        self.w1 = nn.Linear(size.dim, size.hidden)
        self.gelu = nn.GELU(approximate="tanh")
        self.w2 = nn.Linear(size.hidden, size.dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.w2(self.gelu(self.w1(x)))


def square_linears(width: int, linears: int) -> nn.Sequential:
    """(rows, width) -> (rows, width): linear layers with bias, a ReLU between each two, nested in three Sequentials."""
    layers = [[nn.Linear(width, width), nn.ReLU()] for _ in range(linears)]
    layers[-1].pop()
    third = -(-linears // 3)
    parts = (layers[start : start + third] for start in range(0, linears, third))
    return nn.Sequential(*(nn.Sequential(*(layer for pair in part for layer in pair)) for part in parts))


class MLPLanguageModel(nn.Module):
    """tokens (batch, context) int64 -> logits (batch, context, vocab) in the parameters' dtype.

    Each position's logits depend only on its own token, so the context may have any length. ValueError for tokens that
    are not two-dimensional and, eager on CPU, for token ids that the vocabulary does not have.
    """

    def __init__(self, size: MLPSize) -> None:
        super().__init__()
        self.size = size
        self.embedding = nn.Embedding(size.vocab, size.dim)
        self.blocks = nn.ModuleList(MLPBlock(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.dim)
        self.output = nn.Linear(size.dim, size.vocab, bias=False)

    def init_weights(self) -> None:
        """Draw every parameter as the constructor does; for a model made on the meta device, after `to_empty`."""
        for module in self.modules():
            if isinstance(module, nn.Embedding | nn.Linear | nn.LayerNorm):
                module.reset_parameters()

    def forward(self, tokens: Tensor) -> Tensor:
        if tokens.ndim != 2:
            raise ValueError(f"tokens are (batch, context), got {tuple(tokens.shape)}")
        try:
            x = self.embedding(tokens)  # (batch, context, dim)
        except IndexError:
            raise ValueError(f"token ids go from 0 to {self.size.vocab - 1}, got one that does not") from None
        for block in self.blocks:
            x = block(x)
        return self.output(self.norm(x))  # (batch, context, vocab)
