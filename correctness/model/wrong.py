"""Planted defects: a transformer with one wrong part each."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from correctness.model.transformer_parts import Parts
from correctness.support.planting import defect
from impl.model import TransformerSize

LOGITS = "test_logits_are_the_plain_models"


@defect(cause="masks", caught_by=LOGITS)
class SeesTheNextToken(Parts):
    def mask(self, context: int, device: Any) -> Tensor:
        return torch.ones(context, context, dtype=torch.bool, device=device).tril(1)


@defect(cause="masks", caught_by="test_large_scores")
class AddsMinusTenThousand(Parts):
    """Masks by adding -10,000 (BERT's mask): a large score outweighs it."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        scores = q @ k.mT / math.sqrt(self.scale())
        scores = torch.where(self.mask(q.shape[-2], q.device), scores, scores - 1e4)
        return (scores.softmax(-1) @ v).transpose(1, 2).flatten(-2)


@defect(cause="two calls", caught_by="test_calls_of_other_shapes")
class MaskOfTheFirstCall(Parts):
    def mask(self, context: int, device: Any) -> Tensor:
        if not hasattr(self, "kept"):
            self.kept = super().mask(context, device)
        return self.kept[:context, :context]


@defect(cause="numerics", caught_by=LOGITS)
class HalvesOfAHead(Parts):
    """Rotates x[i] with x[i + head_dim / 2], the pairing of GPT-NeoX's weights."""

    def rotate(self, x: Tensor) -> Tensor:
        pairs = torch.stack(x.chunk(2, dim=-1), dim=-1).flatten(-2)
        return torch.cat(super().rotate(pairs).unflatten(-1, (-1, 2)).unbind(-1), dim=-1)


@defect(cause="options", caught_by=LOGITS)
class AnotherBase(Parts):
    base = 500_000.0


@defect(cause="shapes", caught_by="test_a_long_context")
class PositionsStartAgain(Parts):
    def positions(self, context: int, x: Tensor) -> Tensor:
        return super().positions(context, x) % 1024


@defect(cause="numerics", caught_by="test_a_long_context")
class PositionsInBfloat16(Parts):
    """Computes positions in bfloat16, which represents only even integers beyond 256."""

    def positions(self, context: int, x: Tensor) -> Tensor:
        return super().positions(context, x).bfloat16().double()


@defect(cause="numerics", caught_by="test_float64_is_float64_throughout")
class AnglesInFloat32(Parts):
    def angles(self, x: Tensor) -> Tensor:
        return super().angles(x).float()


@defect(cause="numerics", caught_by="test_small_activations")
class SmallerEpsilon(Parts):
    eps = 1e-6


@defect(cause="numerics", caught_by="test_small_activations")
class EpsilonOfHalfPrecision(Parts):
    """That of `torch.nn.RMSNorm` without one, which is the dtype's own, where activations are in half precision."""

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        eps = torch.finfo(x.dtype).eps if x.itemsize == 2 else self.eps
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


@defect(cause="numerics", caught_by="test_small_activations")
class EpsilonOutside(Parts):
    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True).sqrt() + self.eps) * weight


@defect(cause="numerics", caught_by="test_float64_is_float64_throughout")
class NormInFloat32(Parts):
    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return super().rms_norm(x.float(), weight.float()).to(x.dtype)


@defect(cause="numerics", caught_by="test_logits_have_the_parameters_dtype")
class LogitsInFloat32(Parts):
    def project(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        return super().project(x, w).float()


@defect(cause="gradients", caught_by="test_gradients_are_the_plain_models")
class NormIsConstant(Parts):
    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.detach().square().mean(-1, keepdim=True) + self.eps) * weight


@defect(cause="communication", caught_by=LOGITS)
class NormOverTheBatch(Parts):
    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean((0, -1), keepdim=True) + self.eps) * weight


@defect(cause="numerics", caught_by=LOGITS)
class ScaleOfTheModel(Parts):
    def scale(self) -> int:
        return self.size.d_model


@defect(cause="options", caught_by=LOGITS)
class TiedWeights(Parts):
    def project(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        return x @ w["embedding.weight"].T


@defect(cause="numerics", caught_by=LOGITS)
class GeluGate(Parts):
    def gate(self, x: Tensor) -> Tensor:
        return gelu(x)


@defect(cause="shapes", caught_by=LOGITS)
class HeadsInterleaved(Parts):
    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.size.heads)).permute(0, 3, 1, 2)


class _Into(torch.autograd.Function):
    """Copies into the given memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, memory: Tensor) -> Tensor:
        return memory.copy_(x).view_as(memory)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


@defect(cause="two calls", caught_by="test_two_forwards_before_either_backward")
class WritesIntoOneOutput(Parts):
    """All calls of one shape return the same memory."""

    kept: Tensor | None = None

    def project(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        logits = super().project(x, w)
        if self.kept is None or self.kept.shape != logits.shape or self.kept.dtype != logits.dtype:
            self.kept = torch.empty_like(logits)
        return _Into.apply(logits, self.kept.detach())


@defect(cause="errors", caught_by="test_a_context_too_long")
class CutsLongContexts(Parts):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens[:, : self.context_length])


@defect(cause="errors", caught_by="test_token_ids_out_of_range")
class CountsFromTheEnd(Parts):
    def check(self, tokens: Tensor) -> None:
        super().check(tokens.clamp(min=0))


@defect(cause="state", caught_by="test_any_history")
class ClampsInPlace(Parts):
    def check(self, tokens: Tensor) -> None:
        super().check(tokens)
        tokens.clamp_(max=self.size.vocab - 2)


@defect(cause="state", caught_by="test_any_history")
class DropsOut(Parts):
    def gate(self, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(silu(x), 0.1, self.training)


@defect(cause="state", caught_by="test_a_call_has_the_weights_of_now")
class RemembersAPrompt(Parts):
    """In evaluation, returns the last call's logits if the tokens are the same."""

    last: tuple[Tensor, Tensor] | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training or torch.is_grad_enabled():
            return super().forward(tokens)
        if self.last is None or not torch.equal(self.last[0], tokens):
            self.last = tokens.clone(), super().forward(tokens)
        return self.last[1]


@defect(cause="state", caught_by="test_a_call_has_the_weights_of_now")
class CastsOnce(Parts):
    cast: Tensor | None = None

    def project(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        if not torch.is_autocast_enabled(x.device.type):
            return super().project(x, w)
        dtype = torch.get_autocast_dtype(x.device.type)
        if self.cast is None or self.cast.dtype != dtype:
            self.cast = w["output.weight"].to(dtype)
        return x.to(dtype) @ self.cast.T


@defect(cause="gradients", caught_by="test_its_own_weights_learn")
class NothingToAskFor(Parts):
    """Initializes query and key with zeros: neither ever has a gradient."""

    def __init__(self, size: TransformerSize, *, context_length: int) -> None:
        super().__init__(size, context_length=context_length)
        for name, p in self.named_parameters():
            if "query" in name or "key" in name:
                torch.nn.init.zeros_(p)


@defect(cause="shapes", caught_by="test_contexts_beside_heads_and_head_dim")
class TakesTheLongerForTheContext(Parts):
    """RoPE takes the longer of two dimensions for the context."""

    def rotate(self, x: Tensor) -> Tensor:
        if 1 < x.shape[2] < x.shape[1]:
            return super().rotate(x.transpose(1, 2)).transpose(1, 2)
        return super().rotate(x)


@defect(cause="state", caught_by="test_weights_load_into_the_plain_model_and_back")
class TableInTheStateDict(Parts):
    """The state dict has a table that other implementations cannot load."""

    def __init__(self, size: TransformerSize, *, context_length: int) -> None:
        super().__init__(size, context_length=context_length)
        self.register_buffer("cos", torch.zeros(context_length))


@defect(cause="numerics", caught_by="test_positions_under_autocast_are_not_rounded_to_it")
class AnglesByAProductUnderAutocast(Parts):
    """huggingface/transformers#29285: angles are a matrix product, which autocast does in bfloat16."""

    def angles(self, x: Tensor) -> Tensor:
        return self.positions(x.shape[-2], x).float()[:, None] @ self.frequencies(x).float()[None, :]


@defect(cause="state", caught_by="test_any_history_has_the_plain_models_logits_and_gradients")
class TablesInTheDefaultDtype(Parts):
    """Keeps RoPE's frequencies in the default dtype of the call that first needs them, as those without a dtype are."""

    kept: Tensor | None = None

    def frequencies(self, x: Tensor) -> Tensor:
        if self.kept is None:
            with torch.inference_mode(False):
                self.kept = super().frequencies(x).to(torch.get_default_dtype())
        return self.kept.to(torch.float64)
