"""Planted defects: right until a hook of the caller's raises an error, or another step is made on the same model."""

from typing import Any

from torch import Tensor, nn

from correctness.support.planting import defect
from impl.training_step import EagerStep


@defect(cause="errors", caught_by="test_orders_that_trainings_have")
class ScalerStaysUnscaled(EagerStep):
    """Ours did so: after an error of the optimizer's step the scaler takes the next gradients for unscaled, and the
    step is taken with those of the scaled loss."""

    def update(self) -> None:
        if not (self._scaled and self._gradients()):
            super().update()
            return
        self.scaler.unscale_(self.optimizer)
        unscaled = self.scaler._per_optimizer_states[id(self.optimizer)]
        try:
            super().update()
        except Exception:
            self.scaler._per_optimizer_states[id(self.optimizer)] = unscaled
            raise


@defect(cause="errors", caught_by="test_orders_that_trainings_have")
class GuardsBackward(EagerStep):
    """Refuses a backward inside of another by a flag, which an error leaves set."""

    inside = False

    def backward(self, loss: Tensor) -> None:
        if self.inside:
            raise RuntimeError("backward is called inside of another")
        self.inside = True
        super().backward(loss)
        self.inside = False


@defect(cause="two calls", caught_by="test_any_history_is_that_of_autograd_and_sgd")
class HooksAccumulate(EagerStep):
    """Takes gradients by hooks of parameters, and gives them back at the end of backward: those of a step that is no
    longer called take them from the next one's."""

    def __init__(self, model: nn.Module, *arguments: Any, **options: Any) -> None:
        super().__init__(model, *arguments, **options)
        self.taken: dict[nn.Parameter, Tensor | None] = {}
        for p in model.parameters():
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._take)

    def _take(self, p: Any) -> None:
        self.taken[p], p.grad = p.grad, None

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        for p, grad in self.taken.items():
            p.grad = grad
        self.taken.clear()
