"""When communication hides behind a forward pass of a feed-forward network that is FSDP along one dimension of a mesh,
tensor parallel along the other.

Austin et al., "How to Scale Your Model", part 5, "How to Parallelize a Transformer for Training", 2025, whose letters
these are: D and F of the linears, B tokens over the whole mesh, N = X Y devices. As there, a collective of n devices
counts all of its bytes for (n-1)/n of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from impl.accounting.feed_forward import HALF


@dataclass(frozen=True)
class Mesh:
    """A mesh of X devices for FSDP by Y for tensor parallelism, with the number of link axes of each dimension."""

    fsdp: int
    """X."""
    tensor: int
    """Y."""
    flops: float
    """C, FLOP/s of a device."""
    bandwidth: float
    """W, bytes/s of one axis, in both directions together."""
    fsdp_axes: int = 1
    """M_X."""
    tensor_axes: int = 1
    """M_Y."""
    weight_bytes: int = HALF
    """Bytes of an element of a weight on the links."""
    activation_bytes: int = HALF
    """Bytes of an element of an activation on the links."""

    linears: int = 2
    """L, linears of a feed-forward network: 3 with SwiGLU."""

    @property
    def devices(self) -> int:
        """N."""
        return self.fsdp * self.tensor

    @property
    def intensity(self) -> float:
        """α = C / W: FLOPs for which there is time while one byte is sent."""
        return self.flops / self.bandwidth

    def compute_seconds(self, tokens: float, dim: int, ffn_dim: int) -> float:
        """2 L B D F / (N C): L products, 2 where there is no gate."""
        return 2 * self.linears * tokens * dim * ffn_dim / (self.devices * self.flops)

    def weights_seconds(self, dim: int, ffn_dim: int) -> float:
        """2 L D F / (Y M_X W) in bfloat16: FSDP gathers this device's part of L weights."""
        return self.linears * self.weight_bytes * dim * ffn_dim / (self.tensor * self.fsdp_axes * self.bandwidth)

    def activations_seconds(self, tokens: float, dim: int) -> float:
        """4 B D / (X M_Y W) in bfloat16: the input is gathered, the output reduced and scattered."""
        return 2 * self.activation_bytes * tokens * dim / (self.fsdp * self.tensor_axes * self.bandwidth)

    def least_tokens(self, ffn_dim: int, overlapped: bool = False) -> float:
        """B from which on compute hides communication: where the two take as long. Infinite where none is enough.

        The two kinds of communication take turns; `overlapped`, each has its own axes at the same time.
        """
        hidden = self.linears * ffn_dim
        weights = self.weight_bytes * self.intensity * hidden / 2 * self.fsdp / self.fsdp_axes
        activations = self.activation_bytes * self.intensity * self.tensor / self.tensor_axes
        left = hidden - (0 if overlapped else activations)
        return weights / left if activations <= hidden and left > 0 else math.inf

    def most_tensor(self, ffn_dim: int) -> float:
        """Y up to which compute hides what activations send: F M_Y / α in bfloat16, half more with SwiGLU."""
        return self.linears * ffn_dim * self.tensor_axes / (self.activation_bytes * self.intensity)

    def best_tensor(self, ffn_dim: int, overlapped: bool = False) -> float:
        """Y that needs the fewest tokens of all meshes of N devices: all that is allowed, or, where the two kinds take
        turns, half of it, at which they take as long as each other."""
        return self.most_tensor(ffn_dim) / (1 if overlapped else 2)

    def least_tokens_per_device(self, ffn_dim: int, overlapped: bool = False) -> float:
        """B / N at `best_tensor`: 8 α² / (L M_X M_Y F) in bfloat16, or overlapped 2 α² / (L M_X M_Y F)."""
        squared = self.weight_bytes * self.activation_bytes * self.intensity**2
        hidden = self.linears * ffn_dim
        return 2 * squared / (self.fsdp_axes * self.tensor_axes * hidden) / (4 if overlapped else 1)

    def pipelined(self, stages: int) -> Mesh:
        """The mesh of each stage, where so many stages share the same devices: FSDP's dimension gets shorter."""
        return replace(self, fsdp=self.fsdp // stages)


def pipeline_utilization(stages: int, microbatches: int) -> float:
    """The share of the time in which a stage has a microbatch, after Narayanan et al., "Efficient Large-Scale Language
    Model Training on GPU Clusters Using Megatron-LM", SC 2021."""
    return microbatches / (microbatches + stages - 1)
