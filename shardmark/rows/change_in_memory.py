"""Changes in a row's memory: bytes of tensors are exact; workspace is compared on one machine, with slack."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from shardmark.rows.baseline import BaselineRow
from shardmark.rows.change import OTHER_MACHINE, ChangesOrReason, larger_is_worse, not_compared

WORKSPACE_SLACK = 1.05
"""Workspace may grow by this factor: a library chooses among its kernels anew in each run."""


def changes_in_memory(
    baseline: BaselineRow, memory: Mapping[str, Any], same_machine: bool, baseline_name: str
) -> ChangesOrReason:
    """The changes in bytes of tensors, and on the same machine in workspace."""
    changes = [
        larger_is_worse(f"bytes of {part} at the peak", memory[part], baseline.memory[part], baseline_name, slack)
        if part == "tensors" or same_machine
        else not_compared(part, OTHER_MACHINE)
        for part, slack in {"tensors": 1.0, "workspace": WORKSPACE_SLACK}.items()
        if part in memory and part in baseline.memory
    ]
    return changes or "not metered"
