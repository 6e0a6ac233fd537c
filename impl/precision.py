"""Mixed precision as one policy: the dtypes of parameters, computation, gradient reduction and master weights.

    precision = PRECISIONS["bfloat16"]          # float32 parameters, products in bfloat16
    with precision.autocast("cuda"):
        loss = model(tokens)
    scaler = precision.scaler("cuda")           # scales the loss in float16 only

Micikevicius et al., "Mixed Precision Training", 2018.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

_HALVES = (torch.float16, torch.bfloat16)
_DTYPES = (*_HALVES, torch.float32, torch.float64)


@dataclass(frozen=True)
class Precision:
    """The dtypes of a training step. ValueError, in one line, for dtypes that do not go together.

    `parameter` is the dtype of the model's parameters; `compute` that of its matrix products, by autocast where it is
    not `parameter`; `reduction` that in which gradients are summed over ranks; `master` that of the optimizer's own
    copy of the parameters, None where it updates the parameters directly.
    """

    parameter: torch.dtype = torch.float32
    compute: torch.dtype = torch.float32
    reduction: torch.dtype = torch.float32
    master: torch.dtype | None = None

    def __post_init__(self) -> None:
        dtypes = {field.name: getattr(self, field.name) for field in fields(self)}
        dtypes = {role: dtype for role, dtype in dtypes.items() if dtype is not None}
        for role, dtype in dtypes.items():
            if dtype not in _DTYPES:
                raise ValueError(f"{role} is torch.float16, bfloat16, float32 or float64, got {dtype}")
        if set(_HALVES) <= set(dtypes.values()):
            raise ValueError(f"float16 and bfloat16 do not mix, as neither holds the other: got {self}")
        if self.compute != self.parameter and (self.parameter, self.compute in _HALVES) != (torch.float32, True):
            raise ValueError(
                f"compute is the parameters' own dtype, or float16 or bfloat16 for float32 parameters (what autocast "
                f"casts): got {self}"
            )
        if self.master is not None and torch.promote_types(self.parameter, self.master) != self.master:
            raise ValueError(f"master weights are at least as wide as the parameters: got {self}")
        if self.parameter == torch.float16 and self.master is None:
            raise ValueError(
                f"float16 parameters need master weights, as updates below 2^-24 vanish in them: got {self}"
            )

    def __str__(self) -> str:
        names = (f"{field.name} {getattr(self, field.name)}" for field in fields(self))
        return ", ".join(names).replace("torch.", "")

    def autocast(self, device: str) -> torch.autocast:
        """Context for forward; it does nothing if the parameters have the compute dtype already."""
        enabled = self.compute != self.parameter
        return torch.autocast(device, dtype=self.compute if enabled else None, enabled=enabled)

    def scaler(self, device: str) -> torch.amp.GradScaler:
        """Return a gradient scaler, enabled in float16, where gradients below 6e-8 would be rounded to zero."""
        return torch.amp.GradScaler(device, enabled=self.compute == torch.float16)


FLOAT32 = Precision()

PRECISIONS = {
    "float32": FLOAT32,
    "bfloat16": Precision(compute=torch.bfloat16),
    "float16": Precision(compute=torch.float16),
    "bfloat16_parameters": Precision(torch.bfloat16, torch.bfloat16, torch.bfloat16, master=torch.float32),
}
"""Precisions by their names in cases. `bfloat16` and `float16` are autocast: float32 parameters, products in that
dtype."""
