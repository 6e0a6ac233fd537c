"""PyTorch's own FSDP, and tests that it is known to fail: docs/pytorch-defects.md."""

from collections.abc import Mapping

import pytest

from shardmark.api import Implementation

FSDP1, FSDP2 = ("fsdp1", "fsdp1_post", "fsdp1_no_prefetch", "fsdp1_forward_prefetch"), ("fsdp2", "fsdp2_kept")


def expect_failures(
    request: pytest.FixtureRequest, implementation: Implementation, wrong: Mapping[str, tuple[str, ...]]
) -> None:
    """Mark the test as an expected failure if its id has a key of `wrong` whose value names this implementation."""
    if any(name in request.node.name and implementation.spec in specs for name, specs in wrong.items()):
        request.applymarker(pytest.mark.xfail(reason="docs/pytorch-defects.md"))
