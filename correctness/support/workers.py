"""Number of processes that share a test run: one per core for a folder, a single one for a file or a test."""

import pytest
import torch

from correctness.support.paths import ROOT
from shardmark.meter.memory import available_bytes
from shardmark.plugin.workers import may_have_workers
from shardmark.ranks.rank import available_cores

FOLDERS = (ROOT / "correctness", ROOT / "tests")

MOST_WORKERS = 4
"""Upper limit on workers: each takes seconds to import torch."""
BYTES_OF_A_WORKER = 2**30
"""Memory that a worker and its worlds need."""


def share_the_cores(config: pytest.Config) -> None:
    """Set pytest-xdist's options; not for a GPU, which the workers would share."""
    option = config.option
    if not may_have_workers(config) or (option.device != "cpu" and torch.cuda.is_available()):
        return
    paths = [(config.invocation_params.dir / argument).resolve() for argument in config.args]
    if available_cores() == 1 or not all(
        path.is_dir() and any(path.is_relative_to(folder) for folder in FOLDERS) for path in paths
    ):
        return
    number = min(available_cores(), MOST_WORKERS, available_bytes("cpu") // BYTES_OF_A_WORKER)
    if number > 1:
        option.numprocesses = number
        # a file stays on one worker until the very end
        option.dist = "worksteal" if option.dist == "no" else option.dist
