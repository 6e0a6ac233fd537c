"""Planted defects: transformers that are wrong as public trackers report."""

from copy import deepcopy
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from correctness.model.transformer_parts import Parts
from correctness.support.planting import defect
from impl.model import Transformer, TransformerSize


@defect(cause="two calls", caught_by="test_calls_of_other_shapes")
class TablesOfAnEvaluation(Parts):
    """Dao-AILab/flash-attention#299: caches RoPE's tables, also under inference_mode, where autograd cannot save them
    later."""

    kept: tuple[Tensor, Tensor] | None = None

    def tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.kept is None or self.kept[0].dtype != x.dtype or len(self.kept[0]) < x.shape[-2]:
            self.kept = super().tables(x)
        cos, sin = (table[: x.shape[-2]] for table in self.kept)
        return cos, sin


@defect(cause="gradients", caught_by="test_two_forwards_before_either_backward")
class WordZeroIsPadding(Transformer):
    """ibalazevic/TuckER#17: `padding_idx=0` leaves word 0, a word like any other, without a gradient."""

    def __init__(self, size: TransformerSize, *, context_length: int) -> None:
        super().__init__(size, context_length=context_length)
        self.embedding.padding_idx = 0


@defect(cause="state", caught_by="test_weights_are_drawn_one_by_one")
class CopiesOfOneBlock(Transformer):
    """pytorch/pytorch#72253: the blocks are deep copies of one block, and start with the same weights."""

    def __init__(self, size: TransformerSize, *, context_length: int) -> None:
        super().__init__(size, context_length=context_length)
        self.blocks = nn.ModuleList(deepcopy(self.blocks[0]) for _ in range(size.layers))


@defect(cause="two calls", caught_by="test_another_model_that_is_cast_changes_nothing")
class SharesItsRotaryModule(Transformer):
    """sgl-project/sglang#33575: models of one size and default dtype share a module, and what one casts, all have."""

    shared: ClassVar[dict[tuple[Any, ...], nn.Module]] = {}

    def __init__(self, size: TransformerSize, *, context_length: int) -> None:
        super().__init__(size, context_length=context_length)
        rotary: Any = self.blocks[0].attention.rotary  # type: ignore[union-attr]
        key = context_length, size.head_dim, torch.get_default_dtype()
        for block in self.blocks:
            block.attention.rotary = self.shared.setdefault(key, rotary)  # type: ignore[union-attr]


@defect(cause="numerics", caught_by="test_a_long_context_is_as_accurate_in_every_dtype")
class GrowsTablesFromRoundedFrequencies(Parts):
    """huggingface/transformers#29496: where its first table of 256 positions is too short, makes another from
    frequencies that the model's cast has rounded."""

    def angles(self, x: Tensor) -> Tensor:
        if x.shape[-2] <= 256:
            return super().angles(x)
        return torch.outer(self.positions(x.shape[-2], x), self.frequencies(x).to(x.dtype).double())


@defect(cause="two calls", caught_by="test_float64_is_float64_throughout")
class TablesOfAnotherModel(Parts):
    """ml-explore/mlx#561: models share RoPE's tables by their shape, whatever the dtype that these were made in."""

    shared: ClassVar[dict[tuple[int, int], tuple[Tensor, Tensor]]] = {}

    def __init__(self, size: TransformerSize, *, context_length: int) -> None:
        super().__init__(size, context_length=context_length)
        self.key = context_length, size.head_dim
        if self.key not in self.shared:
            self.shared[self.key] = super().tables(torch.empty(self.key, device="cpu"))

    def tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = (table[: x.shape[-2]].to(x) for table in self.shared[self.key])
        return cos, sin


class _NormFromItsOutput(torch.autograd.Function):
    """RMSNorm that saves its output in place of its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
        output = x * scale * weight
        ctx.save_for_backward(output, weight, scale)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        output, weight, scale = ctx.saved_tensors
        normed, scaled = output / weight.masked_fill(weight == 0, 1), grad * weight
        of_x = (scaled - normed * (scaled * normed).mean(-1, keepdim=True)) * scale
        return of_x, (grad * normed).flatten(0, -2).sum(0), None


@defect(cause="gradients", caught_by="test_gradients_are_the_plain_models")
class DividesByTheNormsWeight(Parts):
    """NVIDIA/apex#1715: a norm's backward divides its output by the weight, and is wrong where that is zero."""

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return _NormFromItsOutput.apply(x, weight, self.eps)


@defect(cause="state", caught_by="test_a_call_has_the_weights_of_now")
class CastsOnceAVersion(Parts):
    """NVIDIA/apex#132: evaluation keeps a weight cast for autocast as long as its version stays, and `.data` changes
    none.
    """

    cast: tuple[Any, Tensor] | None = None

    def project(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        weight, device = w["output.weight"], x.device.type
        if torch.is_grad_enabled() or weight.is_inference() or not torch.is_autocast_enabled(device):
            return super().project(x, w)
        key = weight.data_ptr(), weight._version, torch.get_autocast_dtype(device)
        if self.cast is None or self.cast[0] != key:
            self.cast = key, weight.to(key[-1])
        return x.to(key[-1]) @ self.cast[1].T


@defect(cause="numerics", caught_by="test_a_long_context_is_as_accurate_in_every_dtype")
class AnglesOfTheDefaultDtype(Parts):
    """Computes angles in the dtype that was torch's default when the model was made; bfloat16 has no position 257."""

    def __init__(self, size: TransformerSize, *, context_length: int) -> None:
        super().__init__(size, context_length=context_length)
        self.made_in = torch.get_default_dtype()

    def angles(self, x: Tensor) -> Tensor:
        positions, frequencies = self.positions(x.shape[-2], x), self.frequencies(x)
        return torch.outer(positions.to(self.made_in), frequencies.to(self.made_in)).double()


@defect(cause="numerics", caught_by="test_a_long_context_is_as_accurate_in_every_dtype")
class PositionsOfTheDefaultDtype(Parts):
    """huggingface/transformers#28685: each call counts positions in torch's default dtype."""

    def positions(self, context: int, x: Tensor) -> Tensor:
        return torch.arange(0.0, context, device=x.device).double()


@defect(cause="state", caught_by="test_a_model_of_the_meta_device_is_whole_once_its_state_is_loaded")
class TablesThatNobodyLoads(Parts):
    """vllm-project/vllm#16564: no state has the tables of positions, which `to_empty` leaves unwritten."""

    unit: Tensor

    def __init__(self, size: TransformerSize, *, context_length: int) -> None:
        super().__init__(size, context_length=context_length)
        self.register_buffer("unit", torch.ones((), dtype=torch.float64), persistent=False)

    def to_empty(self, *args: Any, **kwargs: Any) -> Any:
        super().to_empty(*args, **kwargs)
        self.unit.fill_(0.5)  # memory that nobody wrote may have any value
        return self

    def frequencies(self, x: Tensor) -> Tensor:
        return super().frequencies(x) * self.unit


@defect(cause="two calls", caught_by="test_a_call_does_not_go_on_from_those_before")
class GoesOnFromAPrompt(Transformer):
    """time-series-foundation-models/lag-llama#81: a cache for decoding whose flag nothing clears. In evaluation a call
    of one token goes on from the call before it."""

    cached: Tensor | None = None

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training or torch.is_grad_enabled():
            return super().forward(tokens)
        before, self.cached = self.cached, tokens
        goes_on = before is not None and tokens.shape[1] == 1 and len(before) == len(tokens)
        if not goes_on or before.shape[1] == self.context_length:
            return super().forward(tokens)
        self.cached = torch.cat([before, tokens], dim=1)
        return super().forward(self.cached)[:, -1:]


@defect(cause="two calls", caught_by="test_a_call_that_is_too_long_leaves_nothing_behind")
class StretchesForGood(Parts):
    """huggingface/transformers#25306: positions of a context that is too long are scaled, and remain so."""

    longest = 0

    def check(self, tokens: Tensor) -> None:
        self.longest = max(self.longest, tokens.shape[1])

    def positions(self, context: int, x: Tensor) -> Tensor:
        return super().positions(context, x) / max(1.0, self.longest / self.context_length)


@defect(cause="shapes", caught_by="test_logits_are_the_plain_models")
class OneBlockOfTheGate(Parts):
    """A kernel's block has 1,024 columns, and those beyond it are dropped."""

    def gate(self, x: Tensor) -> Tensor:
        return super().gate(x) * (torch.arange(x.shape[-1], device=x.device) < 1024)


@defect(cause="gradients", caught_by="test_gradients_of_two_batches_add_up")
class WritesOverAGradient(Parts):
    """A backward that writes to `.grad` itself: a second one replaces the first one's gradient."""

    def project(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        weight = w["output.weight"]
        if weight.requires_grad and torch.is_grad_enabled():
            (passed := weight.view_as(weight)).register_hook(lambda grad: setattr(weight, "grad", None))
            w = w | {"output.weight": passed}
        return super().project(x, w)


@defect(cause="gradients", caught_by="test_gradients_of_two_batches_add_up")
class NormsGradientInHalfPrecision(Parts):
    """A norm's weight gets a gradient that is a tenth too large where the products are in half precision."""

    def rms_norm(self, x: Tensor, weight: Tensor) -> Tensor:
        if x.itemsize == 2 or torch.is_autocast_enabled(x.device.type):
            weight = 1.1 * weight - 0.1 * weight.detach()
        return super().rms_norm(x, weight)


class _FromAStack(torch.autograd.Function):
    """A product that pushes its input, and whose backward pops one."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stack: list[Tensor]) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.stack = stack
        stack.append(x.detach())
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        return grad @ ctx.saved_tensors[0], grad.flatten(0, -2).T @ ctx.stack.pop().flatten(0, -2), None


@defect(cause="two calls", caught_by="test_two_forwards_before_either_backward")
class ActivationsOnAStack(Parts):
    """A hand-written backward takes the last forward's input, whose backward may come later."""

    def project(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        weight = w["output.weight"]
        if torch.is_autocast_enabled(x.device.type) or not (torch.is_grad_enabled() and weight.requires_grad):
            return super().project(x, w)
        return _FromAStack.apply(x, weight, self.__dict__.setdefault("stack", []))


@defect(cause="gradients", caught_by="test_gradients_are_the_plain_models")
class FrozenBlocksEndBackward(Parts):
    """A block without a weight to train runs without autograd: what lies before it gets no gradient."""

    def block(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        own = self.blocks[0].state_dict().keys() & w.keys()
        with torch.set_grad_enabled(torch.is_grad_enabled() and any(w[name].requires_grad for name in own)):
            return super().block(x, w)


class _WritesItsGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, weight = ctx.saved_tensors
        own = grad.flatten(0, -2).T @ x.flatten(0, -2)
        weight.grad = own if weight.grad is None else weight.grad + own
        return grad @ weight, None


@defect(cause="gradients", caught_by="test_weights_may_be_given_for_one_call")
class AddsToTheGradientItself(Parts):
    """A fused product adds the weight's gradient to its `.grad`; a weight that was computed has none."""

    def project(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        if torch.is_autocast_enabled(x.device.type) or not w["output.weight"].requires_grad:
            return super().project(x, w)
        return _WritesItsGradient.apply(x, w["output.weight"])


@defect(cause="numerics", caught_by="test_logits_have_the_parameters_dtype")
class CastsTokenIds(Parts):
    """deepspeedai/DeepSpeed#5701: all inputs are cast to the parameters' dtype, token ids too."""

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens.to(self.get_parameter("output.weight").dtype).long())


@defect(cause="gradients", caught_by="test_gradients_are_the_plain_models")
class FreezesW3WithW1(Parts):
    """NVIDIA/apex#1517: one product of both weights of a gate, whose backward looks at `requires_grad` of the first."""

    def block(self, x: Tensor, w: dict[str, Tensor]) -> Tensor:
        w1, w3 = (w[f"feed_forward.w{n}.weight"] for n in (1, 3))
        return super().block(x, w | {"feed_forward.w3.weight": w3 if w1.requires_grad else w3.detach()})
