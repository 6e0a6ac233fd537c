"""Shares several GPUs among workers, holds rows to their schema, and names the attention backends that ran."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from perf.schema import complaints
from shardmark.plugin.session import SESSION
from shardmark.plugin.workers import share_the_devices
from shardmark.rows.atomic_json import dumped
from shardmark.rows.consistency import contradictions

FOLDER = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist reads its options
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Measure cases of one GPU on several GPUs at once: on as many as `--ranks` allows."""
    option = config.option
    paths = [(config.invocation_params.dir / argument.partition("::")[0]).resolve() for argument in config.args]
    if option.device != "cpu" and all(path.is_relative_to(FOLDER) for path in paths):
        ranks = [int(size) for size in (option.ranks or "").split(",") if size.strip().isdigit()]
        share_the_devices(config, min([torch.cuda.device_count(), *([max(ranks)] if ranks else [])]))


@pytest.fixture(autouse=True)
def rows_meet_their_schema(pytestconfig: pytest.Config) -> Iterator[None]:
    """At smoke scale, which CI runs, hold each test's rows to the schema, and to the figures of all rows so far."""
    session = pytestconfig.stash[SESSION]
    before = len(session.rows.rows)
    known = set(contradictions(session.rows.rows)) if session.scale == "smoke" else set()
    yield
    if session.scale == "smoke":
        rows = [json.loads(dumped(entry["extra_info"])) for entry in session.rows.rows[before:]]
        if lines := [line for row in rows for line in complaints(row)]:
            pytest.fail(f"not as shardmark/rows/row.schema.json says: {'; '.join(lines)}", pytrace=False)
        if lines := [line for line in contradictions(session.rows.rows) if line not in known]:
            pytest.fail(f"figures contradict each other: {'; '.join(lines)}", pytrace=False)


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Name the attention backends that ran: SDPA chooses its own."""
    backends = config.stash[SESSION].rows.backends("attention")
    output_json["machine_info"]["attention_backend"] = ", ".join(backends) or None
