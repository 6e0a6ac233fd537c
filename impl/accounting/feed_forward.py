"""A large model in short: its feed-forward networks, without attention, embeddings and biases.

Master weights, accumulated gradients and Adam's two states are float32; activations, the weights that products take and
everything communicated are bfloat16. `tokens` counts those whose activations one device keeps, unless stated otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass

from impl.accounting.beside import FLOAT
from impl.accounting.ledger import Bytes
from impl.collectives.accounting import all_reduce_bytes_sent, bytes_sent

HALF = 2
"""Bytes of an element of bfloat16."""


@dataclass(frozen=True)
class FeedForwards:
    """Blocks of two linears, `dim` to `ffn_dim` and back; or, with `linears=3, hidden_saved=4`, of SwiGLU."""

    blocks: int
    dim: int
    ffn_dim: int
    linears: int = 2
    """Linears of a block; all but the last one have the same input."""
    hidden_saved: int = 1
    """Tensors of `ffn_dim` that forward saves: the last linear's input, and of SwiGLU (Shazeer, 2020) the gate, what
    SiLU makes of it, and what that is multiplied with."""

    @property
    def parameters(self) -> int:
        return self.blocks * self.linears * self.dim * self.ffn_dim

    @property
    def state(self) -> Bytes:
        """Bytes of all parameters' weights, gradients and Adam moments."""
        return Bytes(
            {
                "master weights": FLOAT * self.parameters,
                "accumulated gradients": FLOAT * self.parameters,
                "Adam's first moments": FLOAT * self.parameters,
                "Adam's second moments": FLOAT * self.parameters,
            }
        )

    @property
    def saved_per_token(self) -> int:
        """Bytes that forward saves for backward: the input of each linear, whose weight's gradient needs it, once, and
        what the activation function needs."""
        return HALF * self.blocks * (self.dim + self.hidden_saved * self.ffn_dim)

    def sharded(self, tokens: int, devices: int) -> float:
        """Bytes of a device: state and half of the activations, every second linear's, are sharded over `devices`."""
        half = self.saved_per_token * tokens / 2
        return (self.state + half) / devices + half

    def least_devices(self, tokens: int, nbytes: int) -> int | None:
        """The fewest devices on which `sharded` is below `nbytes`; None where the unsharded half alone is not."""
        twice_left = 2 * nbytes - self.saved_per_token * tokens
        twice_sharded = 2 * self.state + self.saved_per_token * tokens
        return twice_sharded // twice_left + 1 if twice_left > 0 else None

    def tensor_parallel_saved_per_token(self, devices: int, sequence_parallel: bool = False) -> int:
        """`saved_per_token` on one of `devices` under tensor parallelism: each holds a part of the `ffn_dim`.

        Each device also saves the block's whole input, or its part of the tokens under sequence parallelism.
        """
        dim = self.dim // devices if sequence_parallel else self.dim
        return HALF * self.blocks * (dim + self.hidden_saved * self.ffn_dim // devices)

    def tensor_parallel_sent(self, tokens: int, devices: int, sequence_parallel: bool = False) -> int:
        """Bytes that a device sends in a step.

        In each block forward sums the output over the devices, and backward the gradient of the input. Each sum is an
        all-reduce or, under sequence parallelism, a reduce-scatter and an all-gather, which send as many bytes. There
        backward also gathers the input once more, of which forward saved a part.
        """
        every = HALF * tokens * self.dim
        again = bytes_sent("all_gather", every, devices) if sequence_parallel else 0
        return self.blocks * (2 * all_reduce_bytes_sent(every, devices) + again)
