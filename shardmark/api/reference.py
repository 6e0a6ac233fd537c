"""A plain PyTorch step that formulas stand beside, and the bytes of it from moment to moment.

`impl` defines the plain step, and what a technique takes or frees at each of its moments. The bytes of the step itself
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
"""Names of bytes; the other names say which module's forward or backward took them."""

BEGIN, AFTER_FORWARD, AFTER_BACKWARD = "begin", "after forward", "after backward"
ENTER, LEAVE, BACKWARD = "enter", "leave", "backward"
"""Of a module: its forward begins, has ended; the gradient of its output is there, and of what it returned alone."""
READ, READ_END, GRADIENT = "read", "read end", "gradient"
"""Of a parameter: an operator is about to read it; that one, in backward its autograd node's last of that kind, has
returned; its gradient is there, and what only that needed is freed."""


@dataclass
class PlainStep:
    """`loss()` is the forward pass; its backward and the optimizer's step follow, where there is an optimizer."""

    module: nn.Module
    loss: Callable[[], Tensor]
    optimizer: Optimizer | None = None


class Plain(Protocol):
    """Sizes and dtypes of a plain step. Hashable: equal ones are followed once."""

    def make(self) -> PlainStep:
        """The module and its batch on the default device."""
        ...


@dataclass(frozen=True)
class Moment:
    """One moment of the step, until the next one."""

    kind: str
    name: str
    """Of the module or the parameter; "" of the root module, and where the kind has none."""
    live: Mapping[str, int]
    """Bytes by name when the moment begins."""
    peak: Mapping[str, int]
    """Bytes by name at the peak between it and the next."""


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
    """Have `followed` ask `follow`."""
    _installed[:] = [follow]


@cache  # many implementations stand beside the same step
def followed(plain: Plain, device: str) -> Followed:
    """The moments of the plain step on "cpu" or "cuda", without running its kernels.

    RuntimeError where no simulation is installed.
    """
    if not _installed:
        raise RuntimeError("this formula stands beside a simulated step: `import shardmark.predict` first")
    return _installed[0](plain, device)
