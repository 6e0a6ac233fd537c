"""Seconds of an operator on a GPU: its products and its bytes, at rates that such a device reaches.

Products run in tiles, as many at once as there are multiprocessors: with a small or narrow product, multiprocessors
stand idle or tiles are partly empty. All else is bound by the device's memory (Williams, Waterman, Patterson,
"Roofline", CACM 2009).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import ceil

import torch

from shardmark.meter.hardware import Hardware
from shardmark.predict.simulation.costs import Cost, Product
from shardmark.predict.simulation.links import collective_seconds, least_collective_seconds

WIDE = ((256, 128), (128, 256), (128, 128))
TILES = (*WIDE, (128, 64), (64, 128), (64, 64), (128, 32), (32, 128), (64, 32), (32, 64))
"""Rows and columns of the result that a multiprocessor makes at once. Before Hopper float32 takes only
the wide ones, as published times show: a narrow product takes as long there as one of 128 columns.
"""
FULL = 64
"""Multiplications for each value read that keep a tile's multiprocessor busy: a tile of 128 x 128 has as many."""
SPLIT = 256
"""The shortest part of k that a multiprocessor gets where several share a tile; tiles of batches are not shared."""

WITHIN = (0.75, 1.52)
"""Nine of ten published times lie between these multiples of the predicted time, one in twenty below and one in twenty
above: of the times in `docs/published-times.md`, those that no rate was fitted to.
"""

RATIO_WITHIN = 1.45
"""The ratio of two predicted times is right within this factor nine times of ten: for pairs of one table, GPU and
measured part in `docs/published-times.md`, held out, whose published times differ by less than a factor of 1.5. Such a
pair shares host and device, so part of their errors cancels. That two intervals `WITHIN` overlap would say so only of a
factor of 2.03.

The pairs were chosen after looking: six ways were tried (one part or any; all pairs, those within a factor of 2, within
1.5) and gave 1.44 to 1.63; all pairs of one part give 1.58. Pairs within 1.5 count, as strategies worth comparing are
near each other. By source it is 1.22 and 1.47. No pair is of two strategies.
"""


class GPU:
    """`Rates` of a GPU; of a CPU too, whose products take their FLOPs' time, as it has no multiprocessors."""

    def __init__(self, hardware: Hardware) -> None:
        self.hardware = hardware
        self.on_host = hardware.device == "cpu"

    def seconds(self, cost: Cost) -> float:
        reached = self.hardware.reached
        bandwidth = self.hardware.bandwidth * reached.bandwidth
        if cost.reduces:
            bandwidth *= reached.reduction
        if cost.scattered:
            bandwidth *= reached.scattered
        moving = cost.nbytes / bandwidth
        if not cost.flops:
            return reached.kernel + moving
        dtype = dtype_of_products(cost, self.hardware)
        rate = self.hardware.flops[dtype] * reached.products[dtype]
        if cost.products and self.hardware.sm_count:
            tiles = WIDE if dtype == "float32" and self._is_before_hopper else TILES
            making = sum(
                _product_seconds(each, rate, self.hardware.sm_count, tiles)
                / (reached.narrow if each.is_narrow else 1.0)
                for each in cost.products
            )
        else:
            making = cost.flops / (rate * (reached.attention if cost.attends else 1.0))
        return reached.kernel + max(moving, making)

    def copy(self, nbytes: float) -> float:
        return nbytes / (self.hardware.host_link * self.hardware.reached.host_link)

    def of_host(self, cost: Cost) -> float:
        return cost.nbytes / self.hardware.host_bandwidth

    @property
    def _is_before_hopper(self) -> bool:
        return self.hardware.capability is not None and self.hardware.capability < (9, 0)

    def least(self, cost: Cost) -> float:
        """Seconds at the data sheet's FLOP/s. Bytes do not count: they could be in a cache."""
        return cost.flops / self.hardware.flops[dtype_of_products(cost, self.hardware)]

    def launch(self, in_backward: bool) -> float:
        return self.hardware.reached.backward_launch if in_backward else self.hardware.reached.launch

    def collective(self, name: str, nbytes: int, ranks: Sequence[int]) -> float:
        return collective_seconds(self.hardware, name, nbytes, ranks)

    def collective_launch(self) -> float:
        return self.hardware.reached.collective_launch

    def beside_collective(self) -> float:
        return self.hardware.reached.beside

    def least_of_collective(self, name: str, nbytes: int, ranks: Sequence[int]) -> float:
        return least_collective_seconds(self.hardware, name, nbytes, ranks)


def dtype_of_products(cost: Cost, hardware: Hardware) -> str:
    """The key of `hardware.flops` for an operator's products.

    In float32 matrix products take TF32 only where the program allows it. Convolutions take it unless the program
    forbids it (PyTorch's notes on numerical accuracy, "TensorFloat-32 on Nvidia Ampere and later devices").
    """
    name = str(cost.dtype).removeprefix("torch.")
    if name == "float32" and "tf32" in hardware.flops:
        matrices = torch.get_float32_matmul_precision() != "highest"
        if torch.backends.cudnn.allow_tf32 if cost.convolves else matrices:
            return "tf32"
    if name.startswith("float8"):
        name = "float8"
    return name if name in hardware.flops else "float32"


@cache
def _product_seconds(product: Product, rate: float, sm_count: int, tiles: tuple[tuple[int, int], ...]) -> float:
    """Seconds of the product with the fastest tile."""
    return min(_in_tiles(product, rate / sm_count, sm_count, *tile) for tile in tiles)


def _in_tiles(product: Product, rate: float, sm_count: int, rows: int, columns: int) -> float:
    tiles = product.batch * ceil(product.m / rows) * ceil(product.n / columns)
    shared = max(1, min(sm_count // tiles, product.k // SPLIT)) if tiles < sm_count and product.batch == 1 else 1
    busy = min(1.0, rows * columns / (rows + columns) / FULL) ** 0.5
    waves = ceil(tiles * shared / sm_count)
    return waves * 2 * rows * columns * ceil(product.k / shared) / (rate * busy)
