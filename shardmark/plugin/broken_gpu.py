"""The end of a process whose GPU no longer works.

A kernel that reads a wrong address leaves an error on its GPU: from then on every call of CUDA in that process fails
("CUDA C++ Programming Guide", error checking). The tests that follow are not run rather than failed for it. A worker of
pytest-xdist ends, and another one takes its place.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest
import torch


def error_on_gpu() -> str | None:
    """First line of the error that this process's GPU is left with; None where it works or has not been used."""
    if not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """End the run, or the worker, after a test that left its GPU with an error."""
    result = yield
    if error := error_on_gpu():
        if "PYTEST_XDIST_WORKER" in os.environ:
            os._exit(1)  # its reports are sent; at the end of the session it would only fail to free what it holds
        item.session.shouldstop = (
            f"{item.nodeid} left its GPU with an error ({error}), after which no test of this process can use it; "
            "with -n 1 the tests that remain run in another one"
        )
    return result
