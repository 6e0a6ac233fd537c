"""Parameters of two dtypes in one unit, which keep theirs, or are an error."""

import torch
from torch import Tensor, nn

from correctness.fsdp.checks import (
    as_expected,
    averaged_gradients,
    full,
    gradients_of,
    parameters_as_expected,
    parameters_of,
    wrap,
)
from correctness.support.whole_batch import DIM
from impl.fsdp import whole
from shardmark.api import Implementation


class OfTwoDtypes(nn.Module):
    """A layer of float32, and a scale of another dtype; of complex numbers backward reads views."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.randn(DIM, dtype=dtype)), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, DIM) -> (rows, DIM), real."""
        hidden = self.layer(x)
        out: Tensor = hidden * self.scale.conj()
        return out.imag + hidden * self.scale.real if out.is_complex() else out


def wrong_of_two_dtypes(
    implementation: Implementation, dtype: torch.dtype, device: str, compute: torch.dtype | None = None
) -> str:
    """A line if a parameter, an output or a gradient is rounded to another's dtype. Each rank has the same rows, so
    that averages are the gradients of one process."""
    modules = []
    for _ in range(2):
        torch.manual_seed(0)
        modules.append(OfTwoDtypes(dtype).to(device))
    plain, x = modules[0], torch.rand(3, DIM, device=device)
    model = wrap(implementation, modules[1], wrap=whole, compute_dtype=compute)
    output, expected = model(x), plain(x)
    output.sum().backward()
    model.finish_gradient_synchronization()
    expected.sum().backward()
    if problem := parameters_as_expected("beside others of another dtype, the gathered", model, plain, 0):
        return problem
    dtypes, kept = ({name: x.dtype for name, x in each.items()} for each in (full(model), parameters_of(plain)))
    if dtypes != kept:
        return f"the gathered parameters are of {dtypes}, expected {kept}"
    gradients = averaged_gradients(model)
    for name, gradient in gradients_of(plain).items():
        rounded = torch.bfloat16 in (compute, gradient.dtype)
        close = 4 * torch.finfo(torch.bfloat16).eps if rounded else 1e-5
        if problem := as_expected("the gradient of", {name: gradients[name]}, {name: gradient}, close):
            return problem
    close = 1e-5 if compute is None else 4 * torch.finfo(compute).eps
    return as_expected("of two dtypes,", {"the output": output.detach()}, {"the output": expected.detach()}, close)
