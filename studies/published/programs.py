"""Programs of write-ups that publish their memory.

Each program runs to its end and marks the moments at which its author asked the allocator. The models that the suite
has (MLP ladder, nine linears) are the suite's. Equal arguments give the same program object.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.functional import cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel

from impl.fsdp.simple import data_parallel, init_weights
from impl.model.mlp import MLP_SIZES, MLPLanguageModel, square_linears
from impl.model.sizes import SIZES, TransformerSize
from shardmark.meter.recording import mark

Program = Callable[[], None]
Softmax = Callable[[Tensor], Tensor]


def fused_softmax(x: Tensor) -> Tensor:
    """Softmax over the last dim by PyTorch's kernel, which saves its result."""
    return x.softmax(-1)


def softmax_by_parts(x: Tensor) -> Tensor:
    """Softmax over the last dim as the course's students write it: saves exponentials, sums and indices of maxima."""
    exponentials = torch.exp(x - x.max(dim=-1, keepdim=True).values)
    return exponentials / exponentials.sum(dim=-1, keepdim=True)


@cache
def attention(width: int, length: int, softmax: Softmax, *, first: bool = False) -> Program:
    """Attention of 8 sequences without heads or mask: forward passes, then passes with backward; gradients add up.

    Unless it is the `first` configuration of its process, cuBLAS has both workspaces from the beginning.
    """

    def passes() -> None:
        q, k, v = (torch.randn(8, length, width, requires_grad=True) for _ in range(3))

        def forward() -> Tensor:
            return softmax(q @ k.transpose(-1, -2) / math.sqrt(width)) @ v

        if not first:
            forward().sum().backward()
            q.grad = k.grad = v.grad = None
        output = forward()
        mark("memory before backward")
        for _ in range(2):
            output = forward()
            output.backward(torch.ones_like(output))
        mark("done")

    return passes


class _Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("...i,oi->...o", x, self.weight)


class _RMSNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


class _Block(nn.Module):
    def __init__(self, size: TransformerSize, softmax: Softmax) -> None:
        super().__init__()
        self.heads, self.softmax = size.heads, softmax
        self.norm_1, self.norm_2 = _RMSNorm(size.d_model), _RMSNorm(size.d_model)
        self.query, self.key, self.value, self.output = (_Linear(size.d_model, size.d_model) for _ in range(4))
        self.w1, self.w3 = _Linear(size.d_model, size.d_ff), _Linear(size.d_model, size.d_ff)
        self.w2 = _Linear(size.d_ff, size.d_model)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        x = x + self._attend(self.norm_1(x), rotations)
        return x + self._feed_forward(self.norm_2(x))

    def _attend(self, x: Tensor, rotations: Tensor) -> Tensor:
        q, k, v = (
            layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        positions = torch.arange(x.size(1))
        q, k = (_rotated(each, rotations[:, positions]) for each in (q, k))
        scores = torch.einsum("...qd,...kd->...qk", q, k) / math.sqrt(q.size(-1))
        scores = torch.where(positions[:, None] >= positions, scores, float("-inf"))
        mixed = torch.einsum("...qk,...kd->...qd", self.softmax(scores), v)
        return self.output(mixed.transpose(1, 2).flatten(2).contiguous())

    def _feed_forward(self, x: Tensor) -> Tensor:
        gate = self.w1(x)
        return self.w2(gate * torch.sigmoid(gate) * self.w3(x))


def _rotated(x: Tensor, rotations: Tensor) -> Tensor:
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = rotations
    first, second = cos * even - sin * odd, sin * even + cos * odd
    return torch.stack([first, second], -1).flatten(-2)


class Transformer(nn.Module):
    """The course's language model: operations are written out, so that autograd saves the parts of each."""

    def __init__(self, size: TransformerSize, length: int, softmax: Softmax) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(size.vocab, size.d_model))
        self.register_buffer("rotations", torch.empty(2, length, size.head_dim // 2))
        self.blocks = nn.ModuleList(_Block(size, softmax) for _ in range(size.layers))
        self.norm = _RMSNorm(size.d_model)
        self.output = _Linear(size.d_model, size.vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding[tokens]
        for block in self.blocks:
            x = block(x, self.rotations)
        return self.output(self.norm(x))


class AdamW(torch.optim.Optimizer):
    """The course's AdamW: one parameter after another; old and new moments are live together."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta_1, beta_2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                old_m, old_v = (state.get(name, torch.zeros_like(p)) for name in ("m", "v"))
                m = beta_1 * old_m + (1 - beta_1) * p.grad.data
                v = beta_2 * old_v + (1 - beta_2) * torch.square(p.grad.data)
                p.data -= group["lr"] * m / (torch.sqrt(v) + group["eps"])
                p.data -= group["lr"] * group["weight_decay"] * p.data
                state["m"], state["v"] = m, v


def loss_by_parts(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy by parts."""
    logits = logits - logits.max(-1, keepdim=True).values
    chosen = torch.gather(logits, -1, targets[..., None]).squeeze(-1)
    return -(chosen - torch.log(torch.sum(torch.exp(logits), -1))).mean()


@cache
def transformer(size: str, length: int, softmax: Softmax, until: str, *, steps: int = 1) -> Program:
    """The first steps of the course's model of that size, on 4 sequences. Each step ends `until` after "forward", after
    "backward", or as a whole "training step".
    """

    def run() -> None:
        model = Transformer(SIZES[size], length, softmax)
        tokens, targets = torch.zeros(2, 4, length, dtype=torch.long)
        optimizer = AdamW(model.parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            logits = model(tokens)
            if until != "forward":
                loss_by_parts(logits, targets).backward()
            if until == "training step":
                optimizer.step()
        mark("done")

    return run


@cache
def nine_linears(strategy: Callable[[nn.Module], nn.Module]) -> Program:
    """The FSDP tutorial's steps of SGD: 8 linears of 16384 x 16384, wrapped by `strategy`, on 8192 rows a rank."""

    def run() -> None:
        inputs, targets = torch.randn(8_192, 16_384), torch.randn(8_192, 16_384)
        model = square_linears(16_384, linears=8)
        mark("after model creation")
        wrapped = strategy(model)
        del model
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)

        def step() -> None:
            optimizer.zero_grad()
            output = wrapped(inputs)
            loss = mse_loss(output, targets)
            loss.backward()
            optimizer.step()

        for _ in range(3):
            step()
        mark("after warmup")

    return run


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp(model: nn.Module) -> nn.Module:
    """PyTorch's FSDP with a unit for each linear."""
    for parent in list(model):
        for name, child in parent.named_children():
            if isinstance(child, nn.Linear):
                setattr(parent, name, FullyShardedDataParallel(child, device_id=torch.device("cpu")))
    return FullyShardedDataParallel(model, device_id=torch.device("cpu"))


@cache
def mlp_ladder(*, autocast: bool = False, sharded: bool = False, meta: bool = False) -> Program:
    """Steps of the MLP ladder's larger model with fused AdamW on 8 sequences of 4096 tokens, each predicted from
    itself, on one device or by SimpleFSDP. Its gathered parameters stay until backward, as nothing is compiled.
    `autocast` to bfloat16 is around model and loss.
    """

    def run() -> None:
        with torch.device("meta" if meta else "cpu"):
            model = MLPLanguageModel(MLP_SIZES["mlp-4096"])
        mark("after model")
        if sharded:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            data_parallel(model, mesh, reshard_after_forward=False)
            mark("after data_parallel")
        if meta:
            model.to_empty(device="cpu")
            mark("after to_empty")
            init_weights(model)
            mark("after init_weights")
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        tokens = torch.zeros(8, 4_096, dtype=torch.long)

        def loss() -> Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                logits = model(tokens)
                return cross_entropy(logits.flatten(0, 1), tokens.flatten())

        for _ in range(2):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        mark("done")

    return run
