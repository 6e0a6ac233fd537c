"""Planted defects that show under the caller's autocast, which is about the module's products and nothing else."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from correctness.data_parallel.wrappers import Overlapped, Plain
from correctness.support.planting import defect


def _rounded(tensor: Tensor) -> Tensor:
    device = tensor.device.type
    narrow = torch.get_autocast_dtype(device)
    return tensor.to(narrow) if torch.is_autocast_enabled(device) and tensor.dtype == torch.float32 else tensor


@defect(cause="numerics", caught_by="test_any_history_averages_gradients")
class SendsGradientsInAutocastsDtype(Overlapped):
    """Where a backward pass runs under autocast too, float32 gradients are communicated in bfloat16."""

    def launch(self, parameter: nn.Parameter) -> None:
        if parameter.grad is not None:
            parameter.grad = _rounded(parameter.grad).to(parameter.dtype)
        super().launch(parameter)


@defect(cause="numerics", caught_by="test_any_history_averages_gradients")
class CastsInputsAsAutocast(Plain):
    """Casts what it is given, as to its module's dtype: products that autocast leaves alone are of rounded numbers."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*tree_map(lambda x: _rounded(x) if isinstance(x, Tensor) else x, args), **kwargs)


@defect(cause="numerics", caught_by="test_any_history_averages_gradients")
class CallsOnAThread(Plain):
    """A thread of its own does not know the caller's autocast."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        graded, inferred = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

        def call() -> Any:
            with torch.set_grad_enabled(graded), torch.inference_mode(inferred):
                return super(CallsOnAThread, self).forward(*args, **kwargs)

        with ThreadPoolExecutor(1) as thread:
            return thread.submit(call).result()
