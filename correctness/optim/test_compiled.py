"""The fused AdamW's kernels, compiled at each configuration: no spills, and wide memory accesses."""

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

pytest.importorskip("triton", exc_type=ImportError)

from correctness.optim.training import compile_kernels
from correctness.support.compiling import kernel_row
from impl.optim.multi_tensor import ACCESS, CONFIGURATIONS, Configuration

CHIPS = (80, 90, 100)

Kind = tuple[torch.dtype, bool]
"""Dtype of parameters and gradients, and whether there are master weights."""

KINDS: list[Kind] = [
    (torch.float32, False),
    (torch.bfloat16, True),
    (torch.float16, True),
    (torch.bfloat16, False),
    (torch.float64, False),
]


def _name(kind: Kind, chip: int, configuration: Configuration) -> str:
    dtype, master = kind
    return f"{str(dtype).removeprefix('torch.')}{'-master' * master}-sm_{chip}-{'x'.join(map(str, configuration))}"


COMPILED = [
    pytest.param(
        kind,
        chip,
        configuration,
        id=_name(kind, chip, configuration),
        marks=[] if (chip, configuration) == (90, CONFIGURATIONS[0]) and kind in KINDS[:1] else [pytest.mark.sweep],
    )
    for configuration in CONFIGURATIONS
    for chip in CHIPS
    for kind in KINDS
    if not (kind[0] == torch.float64 and configuration == CONFIGURATIONS[2])  # it would spill
]


@pytest.mark.parametrize(("kind", "chip", "configuration"), COMPILED)
def test_each_configuration_compiles_soundly(
    kind: Kind,
    chip: int,
    configuration: Configuration,
    compiling: ProcessPoolExecutor,
    record_property: Callable[[str, object], None],
) -> None:
    """No spills, and the widest accesses: a pointer that is not known to be aligned takes more of them."""
    dtype, master = kind
    reports = {
        report.kernel: report for report in compiling.submit(compile_kernels, *kind, chip, configuration).result()
    }
    assert set(reports) == {"squared_norms", "prepare", "update"}
    for name, report in reports.items():
        row = kernel_row(f"{name}-{_name(kind, chip, configuration)}", report)
        record_property("kernel", row | {"matrix instructions": "-"})
        assert report.spilled_bytes == 0, f"{name}: {report.spilled_bytes} bytes a thread are spilled"
    elements = configuration.block // (32 * configuration.warps)  # per thread
    wide = elements * (4 if master else dtype.itemsize) // ACCESS
    written, read = (4, 4) if master else (3, 4)
    # Wide accesses for whole blocks, one per element for a tensor's last block. The margin is less than `wide`: half
    # the width at a single pointer would take that many more.
    assert reports["update"].instructions["STG"] < written * (wide + elements) + wide
    # In its first step the parameter is read, too; a scalar says that it is the first.
    first = master * (elements * dtype.itemsize // ACCESS + elements + 1)
    assert reports["update"].instructions["LDG"] <= read * (wide + elements) + first + 20, "scalars are less than 20"
