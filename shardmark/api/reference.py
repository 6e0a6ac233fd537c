"""A plain PyTorch step and its live bytes at each moment; memory formulas add a technique's bytes to these.

`impl` defines the plain step, and the bytes that a technique allocates or frees at each moment. The step's own bytes
come from `shardmark.predict`, which runs PyTorch's own code without kernels and installs itself here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

PARAMETERS, GRADIENTS, INPUTS = "parameters", "gradients", "inputs and constants"
"""Names of bytes; all other names say which module's forward or backward allocated them."""

BEGIN, AFTER_FORWARD, AFTER_BACKWARD = "begin", "after forward", "after backward"
ENTER, LEAVE, BACKWARD = "enter", "leave", "backward"
"""Moments of a module: forward begins; forward has ended; backward has computed the gradient of its output tensor."""
READ, READ_END, GRADIENT = "read", "read end", "gradient"
"""Moments of a parameter: an operator is about to read it; that operator has returned (in backward, the last equal one
of the autograd node); its gradient is accumulated, and tensors that only the gradient needed are freed."""


@dataclass
class PlainStep:
    """`loss()` is the forward pass; its backward and the optimizer's step follow, where there is an optimizer."""

    module: nn.Module
    loss: Callable[[], Tensor]
    optimizer: Optimizer | None = None


class Plain(Protocol):
    """Sizes and dtypes of a plain step. Hashable: equal steps are simulated once."""

    def make(self) -> PlainStep:
        """The module and its batch on the default device."""
        ...


@dataclass(frozen=True)
class Moment:
    """One moment of the step, until the next one."""

    kind: str
    name: str
    """Name of the module or the parameter; "" for the root module, and for moments of the whole step."""
    live: Mapping[str, int]
    """Bytes by name when the moment begins."""
    peak: Mapping[str, int]
    """Bytes by name at the peak between this moment and the next."""


@dataclass(frozen=True)
class Followed:
    """A step's forward and backward, moment by moment, before the optimizer has state."""

    moments: Sequence[Moment]
    parameters: Mapping[str, tuple[int, ...]]
    """Shapes by name in the module's order; a tied parameter comes once."""
    state: int
    """Bytes of state that the optimizer's first step leaves."""


Follow = Callable[[Plain, str], Followed]

_installed: list[Follow] = []


def install(follow: Follow) -> None:
    """Make `followed` call `follow`."""
    _installed[:] = [follow]


@cache  # many formulas use the same step
def followed(plain: Plain, device: str) -> Followed:
    """The moments of the plain step on "cpu" or "cuda", without running its kernels.

    RuntimeError where no simulation is installed.
    """
    if not _installed:
        raise RuntimeError("this formula stands beside a simulated step: `import shardmark.predict` first")
    return _installed[0](plain, device)
