"""Is each implementation right? Hooks and fixtures for all families."""

from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch

from correctness.support.compiling import compiler, unavailable_reason
from correctness.support.hooks import pair as pair
from correctness.support.hooks import pytest_cmdline_main as pytest_cmdline_main
from correctness.support.hooks import pytest_collection_finish as pytest_collection_finish
from correctness.support.hooks import pytest_configure as pytest_configure
from correctness.support.hooks import recorded, write_table
from correctness.support.sweep import pytest_collection_modifyitems as pytest_collection_modifyitems
from correctness.support.sweep import pytest_generate_tests as pytest_generate_tests


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """With -v, print the registers, shared memory and instructions of each kernel that a test compiled."""
    kernels = recorded(terminalreporter, "kernel") if terminalreporter.config.option.verbose > 0 else []
    write_table(terminalreporter, "What does each kernel take of its chip?", kernels, left=("case",))


@pytest.fixture(scope="session")
def compiling() -> Iterator[ProcessPoolExecutor]:
    """A process that compiles Triton's kernels; tests are skipped where it cannot."""
    with compiler() as pool:
        if reason := pool.submit(unavailable_reason).result():
            pytest.skip(reason)
        yield pool


@pytest.fixture
def poisoned() -> Iterator[None]:
    """Fill uninitialized memory with NaN, so that an element that is never written is noticed."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
