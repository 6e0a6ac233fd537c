"""Parameters by unit, as the programs read them and strategies shard them, and the sizes of dtypes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from impl.model.sizes import TransformerSize

FLOAT = 4  # bytes of a float32, which parameters, gradients and moments are unless a program says otherwise
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Parameter:
    """`unit` counts in the order of forward: 0 is the root, whose own is the final norm."""

    name: str
    shape: tuple[int, ...]
    unit: int

    @property
    def values(self) -> int:
        return math.prod(self.shape)


ROOT, EMBEDDING = 0, 1
"""The first units. Blocks follow, and the output projection is the last."""

Units = list[list[Parameter]]


def transformer_units(size: TransformerSize) -> Units:
    """The root's own is the final norm."""
    d, f, table = size.d_model, size.d_ff, (size.vocab, size.d_model)
    of_block: dict[str, tuple[int, ...]] = {
        "attention_norm": (d,),
        **dict.fromkeys(("attention.query", "attention.key", "attention.value", "attention.output"), (d, d)),
        "feed_forward_norm": (d,),
        "feed_forward.w1": (f, d),
        "feed_forward.w2": (d, f),
        "feed_forward.w3": (f, d),
    }
    first, output = EMBEDDING + 1, EMBEDDING + 1 + size.layers
    return [
        [Parameter("norm", (d,), ROOT)],
        [Parameter("embedding", table, EMBEDDING)],
        *([Parameter(name, shape, unit) for name, shape in of_block.items()] for unit in range(first, output)),
        [Parameter("output", table, output)],
    ]


def with_norms_in_root(units: Units) -> Units:
    """The same units, but that the root has all parameters with fewer than two dimensions."""
    norms = [parameter for unit in units for parameter in unit if len(parameter.shape) < 2]
    return [norms, *([parameter for parameter in unit if parameter not in norms] for unit in units[ROOT + 1 :])]


def values(units: Units) -> int:
    """How many values the parameters of these units have."""
    return sum(parameter.values for unit in units for parameter in unit)


def padded(count: int, ranks: int) -> int:
    """So many values, and as many more as make them divide by the ranks."""
    return -(-count // ranks) * ranks
