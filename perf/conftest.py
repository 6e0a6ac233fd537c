"""What a run of this suite says of the machine beside what every run says."""

from __future__ import annotations

from typing import Any

import pytest

from shardmark.session import SESSION


@pytest.hookimpl(optionalhook=True)
def pytest_benchmark_update_json(config: pytest.Config, output_json: dict[str, Any]) -> None:
    """Name the attention backends that ran: SDPA chooses its own."""
    backends = config.stash[SESSION].rows.backends("attention")
    output_json["machine_info"]["attention_backend"] = ", ".join(backends) or None
