"""Known hardware, and a user's own in a TOML file: a device's memory and rates, in bytes, FLOP/s, bytes/s and seconds.

hardware("h100-80gb")     # one of `hardware.toml`, which says where each figure is from
hardware("this")          # the machine at hand, whose rates are measured when they are asked for
hardware("mine.toml")     # a user's own: the keys of one table there, at the top of the file
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, field, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from shardmark.ranks.gpus import device_at_hand

TABLE = Path(__file__).with_name("hardware.toml")
WHOLE = {
    "memory_bytes": "bytes",
    "blas_workspace_bytes": "bytes",
    "sm_count": "multiprocessors",
    "devices_per_node": "devices",
}
RATES = {
    "bandwidth": "bytes/s",
    "link": "bytes/s",
    "latency": "seconds",
    "network": "bytes/s",
    "network_latency": "seconds",
}
OF_HOST = ("host_link", "host_bandwidth")
"""Rates in bytes/s that may be left out."""
DTYPES = ("float8", "float16", "bfloat16", "tf32", "float32")
IN_SECONDS = ("kernel", "launch", "backward_launch", "collective", "collective_launch")
"""The figures of `Reached` in seconds; the others are fractions."""
CONTEXT = 2**29
"""Bytes of a process on a GPU beside PyTorch's allocations: the driver, and the kernels, which CUDA loads at their
first use. A first tensor takes somewhat more than 300 MB (pytorch/pytorch#107667)."""


REACHED_PRODUCTS = {"float8": 0.65, "float16": 0.75, "bfloat16": 0.75, "tf32": 0.75, "float32": 0.9}


@dataclass(frozen=True)
class Reached:
    """The fractions of a data sheet's rates that programs reach, and the seconds that launching takes.

    The defaults serve devices whose own figures are not known. The figures of A100s and H100s were fitted to the
    published times of `docs/published-times.md`, and so were `launch` and `backward_launch`: the least among the hosts
    there that run plain PyTorch. The other defaults are round figures of the same size.
    """

    products: dict[str, float] = field(default_factory=lambda: dict(REACHED_PRODUCTS), hash=False)
    """Fraction of the FLOP/s that large matrix products reach, by dtype."""
    narrow: float = 1.0
    """Factor on `products` for matrix products with a side of at most 128, such as those of unfused attention."""
    attention: float = 0.6
    """Factor on `products` for fused attention, which computes softmax between its products."""
    bandwidth: float = 0.85
    reduction: float = 0.9
    """Factor on `bandwidth` for sums, norms and softmax."""
    scattered: float = 0.5
    """Factor on `bandwidth` for rows gathered from scattered places."""
    kernel: float = 2e-6
    """Fewest seconds of a kernel."""
    launch: float = 1.1e-5
    """The host's seconds for an operator: Python, dispatcher, autograd, launch."""
    backward_launch: float = 1.5e-5
    """The host's seconds for an operator of backward, which autograd runs in C++."""
    link: float = 0.8
    network: float = 0.8
    host_link: float = 0.8
    """The fraction of `host_link` that copies of pinned memory reach. Reported are 25 GB/s of an A100's 31.5, 53 of an
    H100's 63, and 26 of an RTX 4090's 31.5 (NVIDIA/nvbandwidth#42, #24, #15)."""
    collective: float = 1e-5
    """Fewest seconds of a collective."""
    collective_launch: float = 1e-5
    """The host's seconds for a collective: a round figure, as only one published step depends on it."""
    beside: float = 0.9
    """Pace of kernels beside a collective, which takes multiprocessors and bandwidth from them."""


@dataclass(frozen=True)
class Hardware:
    """One device, and its links to others. A CPU's figure may be `nan`: not known."""

    name: str
    device: str
    """ "cuda" (ROCm's devices too) or "cpu"."""
    memory_bytes: int
    """Total bytes, as CUDA reports them, including those of CUDA's context."""
    blas_workspace_bytes: int
    """Workspace that PyTorch takes for each cuBLAS handle and stream unless the user sets a size."""
    flops: dict[str, float] = field(hash=False)
    """Published FLOP/s of dense matrix products, by the dtypes in which the chip has them."""
    bandwidth: float
    """Bytes/s of the device's memory."""
    sm_count: int
    """Streaming multiprocessors, or AMD's compute units; 0 on a CPU."""
    link: float
    """Bytes/s that a device sends to the others of its node, over all its links together, in one direction."""
    latency: float
    """Seconds of one step of a ring inside a node."""
    devices_per_node: int
    """Devices that `link` joins. This depends on the server, not on the device."""
    network: float
    """Bytes/s that each device sends to other nodes, in one direction. This depends on the cluster."""
    network_latency: float
    """Seconds of one step of a ring between nodes."""
    reached: Reached = field(default_factory=Reached)
    host_link: float = math.nan
    """Bytes/s between the device and its host's memory, in one direction; nan: not known."""
    host_bandwidth: float = math.nan
    """Bytes/s of the host's memory, an equal part for each device of the node; nan: not known."""
    capability: tuple[int, int] | None = None
    """CUDA's compute capability; None on AMD and on CPU."""
    measured: dict[str, dict[str, list[list[float]]]] = field(default_factory=dict, hash=False)
    """Times that `python -m shardmark.calibrate` measured: for each dtype, and for COLLECTIVES, each operator's sizes,
    with the seconds last (`shardmark.predict.simulation.measured`)."""

    @property
    def rules(self) -> tuple[object, ...]:
        """All that a prediction of memory depends on: devices with equal rules need the same bytes."""
        return self.device, self.capability, self.blas_workspace_bytes, self.sm_count

    @property
    def threads_per_sm(self) -> int:
        """Threads that an SM holds at once (CUDA C++ Programming Guide, technical specifications by compute
        capability)."""
        return {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}.get(self.capability or (0, 0), 2048)


KEYS = [key.name for key in fields(Hardware) if key.name != "name"]
OPTIONAL = ("host_link", "host_bandwidth", "capability", "reached", "measured")
COLLECTIVES = "collectives"
"""The key of `Hardware.measured` for collectives, beside those for dtypes."""
THIS = "this"
"""The name of the machine at hand."""


@cache
def known_hardware() -> dict[str, Hardware]:
    """The devices of `hardware.toml`, by name."""
    tables = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return {name: _hardware(name, table) for name, table in tables.items()}


def hardware(name: str) -> Hardware:
    """The hardware of that name, or of the file if the name ends with `.toml`.

    Raises ValueError, in one line, for an unknown name, a file that cannot be read, missing or unknown keys, a figure
    that is not a positive number, and this machine where PyTorch cannot use its GPU."""
    if name.endswith(".toml"):
        return _of_file(Path(name))
    if name == THIS:
        return replace(of_this_machine(device_at_hand()), name=THIS)
    if name not in known_hardware():
        known = ", ".join([*known_hardware(), THIS])
        raise ValueError(f"no hardware is known as {name!r}; known is {known}, or a TOML file of your own")
    return known_hardware()[name]


def _of_file(path: Path) -> Hardware:
    if path.stem == THIS:
        raise ValueError(f"{path}: {THIS} is the machine at hand, and no file's name")
    try:
        return _hardware(path.stem, tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _hardware(name: str, table: dict[str, Any]) -> Hardware:
    """Hardware from a table. Raises ValueError, in one line, for the first thing that is wrong in it."""
    missing = [key for key in KEYS if key not in table and key not in OPTIONAL]
    if missing:
        raise ValueError(f"missing {', '.join(missing)}")
    unknown = [key for key in table if key not in KEYS]
    if unknown:
        raise ValueError(f"unknown {', '.join(unknown)}; the keys are {', '.join(KEYS)}")
    if table["device"] not in ("cuda", "cpu"):
        raise ValueError(f'device = {table["device"]!r} is neither "cuda" nor "cpu"')
    cpu = table["device"] == "cpu"
    for key, unit in (WHOLE | RATES | {key: "bytes/s" for key in OF_HOST if key in table}).items():
        if not _positive(table[key], key in WHOLE, cpu):
            raise ValueError(f"{key} = {table[key]!r} is not a positive {'whole ' * (key in WHOLE)}number of {unit}")
    own: dict[str, Any] = {"flops": _flops(table["flops"], cpu), "capability": _capability(table)}
    own["reached"] = _reached(table)
    own["measured"] = _measured(table.get("measured", {}))
    return Hardware(name, **table | own)


def _measured(tables: object) -> dict[str, dict[str, list[list[float]]]]:
    """Measured times. A size has one to four numbers: bytes, or a product's batch, m, n and k."""
    if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
        raise ValueError("measured has a table for each dtype, and one for collectives")
    for dtype, table in tables.items():
        if dtype != COLLECTIVES and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise ValueError(f"measured.{dtype} is neither a dtype nor {COLLECTIVES}")
        for operator, rows in table.items():
            lengths = (3,) if dtype == COLLECTIVES else (2, 3, 5)
            for row in rows if isinstance(rows, list) else [rows]:
                if not isinstance(row, list) or len(row) not in lengths or not all(map(_is_measured, row)):
                    raise ValueError(f"measured.{dtype}.{operator} = {row!r} is no size with its seconds")
            if len({len(row) for row in rows}) > 1:
                raise ValueError(f"measured.{dtype}.{operator} has sizes of several kinds")
    return tables


def _is_measured(figure: object) -> bool:
    return _positive(figure, False, False)


def _positive(value: object, whole: bool, cpu: bool) -> bool:
    """Whether the value is a positive number. A CPU's may also be nan (unknown), or 0 (it has none)."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    if cpu and (math.isnan(value) or value == 0):
        return True
    return 0 < value < math.inf and (isinstance(value, int) or not whole)


def _flops(flops: object, cpu: bool) -> dict[str, float]:
    if not isinstance(flops, dict) or not {"float32"} <= set(flops) <= set(DTYPES):
        dtypes = ", ".join(DTYPES)
        raise ValueError(f"flops = {flops!r} is not a table of FLOP/s of float32, and others of {dtypes}")
    for dtype, rate in flops.items():
        if not _positive(rate, False, cpu):
            raise ValueError(f"flops.{dtype} = {rate!r} is not a positive number of FLOP/s")
    return flops


def _reached(table: dict[str, Any]) -> Reached:
    """The fractions in the table; the default of `Reached` for a missing one."""
    given = table.get("reached", {})
    known = [key.name for key in fields(Reached)]
    if not isinstance(given, dict) or not set(given) <= set(known):
        raise ValueError(f"reached = {given!r} is not a table of {', '.join(known)}")
    products = given.get("products", {})
    if not isinstance(products, dict) or not set(products) <= set(DTYPES):
        raise ValueError(f"reached.products = {products!r} is not a table of fractions of {', '.join(DTYPES)}")
    figures = {**{f"products.{dtype}": part for dtype, part in products.items()}, **given}
    figures.pop("products", None)
    for key, figure in figures.items():
        if not _positive(figure, False, False) or (key not in IN_SECONDS and figure > 1):
            unit = "positive number of seconds" if key in IN_SECONDS else "fraction between 0 and 1"
            raise ValueError(f"reached.{key} = {figure!r} is not a {unit}")
    return Reached(**given | {"products": REACHED_PRODUCTS | products})


def _capability(table: dict[str, Any]) -> tuple[int, int] | None:
    match table.get("capability"):
        case None:
            return None
        case [int(major), int(minor)] if not isinstance(major, bool) and not isinstance(minor, bool):
            return major, minor
        case other:
            raise ValueError(f"capability = {other!r} is not [major, minor]")


CPU = hardware("cpu")
"""This machine's own memory, whose allocator rounds nothing."""


def of_this_machine(device: str) -> Hardware:
    """Hardware with the memory rules of this machine's device. On CUDA: the most alike of the same capability, or else
    the newest, with this one's memory."""
    if device == "cpu":
        return CPU
    own = torch.cuda.get_device_properties(0)
    capability = torch.cuda.get_device_capability()
    rocm = torch.version.hip is not None
    known = [each for each in known_hardware().values() if each.device == "cuda" and (each.capability is None) == rocm]
    same = [each for each in known if each.capability == capability]

    def apart(each: Hardware) -> tuple[int, int]:
        return abs(each.sm_count - own.multi_processor_count), abs(each.memory_bytes - own.total_memory)

    alike = min(same, key=apart) if same else max(known, key=lambda each: each.capability or (0, 0))
    return replace(alike, memory_bytes=own.total_memory, sm_count=own.multi_processor_count)
