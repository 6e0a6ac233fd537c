"""Planted defects: right for the dtypes and kinds of gradients that most trainings have."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from correctness.support.planting import defect
from correctness.training_step.wrong_reported import _FindsOverflows
from impl.training_step import EagerStep


@defect(cause="gradients", caught_by="test_gradients_add_up_until_the_caller_changes_them")
class GradientsInFloat32OfItsOwn(EagerStep):
    """As NVIDIA/Megatron-LM's `main_grad`: sums of half-precision gradients outside of `.grad`, cleared by updates."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.sums: dict[Tensor, Tensor] = {}

    def backward(self, loss: Tensor) -> None:
        params = [p for p in self.model.parameters() if p.requires_grad and p.dtype == torch.bfloat16]
        for p in params:
            if p.grad is not None:
                self.sums.setdefault(p, p.grad.float())
            p.grad = None
        super().backward(loss)
        for p in params:
            if p.grad is not None:
                self.sums[p] = self.sums.get(p, 0) + p.grad.float()
                p.grad = self.sums[p].to(p.dtype)

    def update(self) -> None:
        super().update()
        self.sums.clear()


@defect(cause="gradients", caught_by="test_a_sparse_gradient_is_unscaled_too")
class LeavesSparseGradientsScaled(_FindsOverflows):
    """pytorch/pytorch#35810: what unscales has no kernel for sparse gradients, and leaves them out."""

    def _gradients(self) -> list[Tensor]:
        return [gradient for gradient in super()._gradients() if not gradient.is_sparse]


@defect(cause="numerics", caught_by="test_a_gradient_that_is_not_finite_is_stepped_on")
class SkipsWhatIsNotFiniteInHalf(EagerStep):
    """deepspeedai/DeepSpeed#8035: a step whose bfloat16 gradients are not finite is skipped, as in float16, where no
    scale falls: nothing tells of it, and training stands still."""

    def update(self) -> None:
        half = [grad for grad in self._gradients() if grad.dtype == torch.bfloat16]
        if all(bool(grad.isfinite().all()) for grad in half):
            super().update()


@defect(cause="gradients", caught_by="test_any_history_is_that_of_autograd_and_sgd")
class ForgetsBfloat16GradientsOfTheFrozen(EagerStep):
    """Sums bfloat16 gradients in float32, and begins anew with those that a backward pass gives: a parameter that was
    frozen since the last one loses its own."""

    def backward(self, loss: Tensor) -> None:
        params = [p for p in self.model.parameters() if p.dtype == torch.bfloat16]
        before = {p: p.grad.float() for p in params if p.grad is not None}
        for p in params:
            p.grad = None
        super().backward(loss)
        for p in params:
            if p.grad is not None:
                p.grad = (before.get(p, 0) + p.grad.float()).to(p.dtype)


@defect(cause="options", caught_by="test_any_history_is_that_of_autograd_and_sgd")
class OneOfTheFirstForward(EagerStep):
    """Keeps a number in the default dtype of the first forward: after one in float64 losses are of float64."""

    one: Tensor | None = None

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = super().forward(tokens, targets)
        if self.one is None:
            with torch.inference_mode(False):
                self.one = torch.ones((), device=tokens.device)
        return loss * self.one if torch.get_default_dtype() == torch.float32 else loss


@defect(cause="state", caught_by="test_any_history_is_that_of_autograd_and_sgd")
class ForwardOfTheModelItself(EagerStep):
    """Once it runs, the model's forward is another function, and a deep copy of the model calls the model itself."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if "forward" not in vars(self.model):
            own = self.model.forward
            self.model.forward = lambda tokens: own(tokens)  # type: ignore[method-assign]
        return super().forward(tokens, targets)


@defect(cause="state", caught_by="test_buffers_of_blocks_change_once_in_a_forward_without_backward")
class CountsInTheRecomputation(EagerStep):
    """facebookresearch/fairscale#1035: batch norms of recomputed blocks do not count a batch twice, nor one whose loss
    is only read."""

    def __init__(self, model: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(model, *arguments, **options)
        for block in getattr(model, "blocks", ()):
            contexts = partial(self._contexts, [each for each in block.modules() if isinstance(each, nn.BatchNorm1d)])
            block.forward = partial(checkpoint, block.forward, use_reentrant=False, context_fn=contexts)

    def _contexts(self, norms: list[nn.BatchNorm1d]) -> Any:
        return self._uncounted(norms), nullcontext()

    @contextmanager
    def _uncounted(self, norms: list[nn.BatchNorm1d]) -> Iterator[None]:
        rates = [norm.momentum for norm in norms]
        for norm in norms:
            norm.momentum = 0.0
        yield
        for norm, rate in zip(norms, rates, strict=True):
            norm.momentum = rate
