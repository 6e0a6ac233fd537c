"""What users run: is each implementation right? The hooks are `correctness.support.hooks`."""

from __future__ import annotations

import pytest

from correctness.support.hooks import compiling as compiling
from correctness.support.hooks import pair as pair
from correctness.support.hooks import poisoned as poisoned
from correctness.support.hooks import pytest_cmdline_main as pytest_cmdline_main
from correctness.support.hooks import pytest_collection_finish as pytest_collection_finish
from correctness.support.hooks import pytest_collection_modifyitems as pytest_collection_modifyitems
from correctness.support.hooks import pytest_configure as pytest_configure
from correctness.support.hooks import pytest_generate_tests as pytest_generate_tests
from correctness.support.hooks import recorded, write_table


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """What each compiled kernel takes of its chip, where tests say so."""
    kernels = recorded(terminalreporter, "kernel")
    write_table(terminalreporter, "What does each kernel take of its chip?", kernels, left=("case",))
