"""What a meter on ranks may tell beyond what is held."""

UNSEEN = 20_000
"""Bytes at most: what a backend's thread releases is not metered, so that the small tensors in which ranks describe
their modules to one another may seem to stay."""


def assert_held(found: int, expected: int) -> None:
    """The meter tells what is held, and perhaps what was released unseen."""
    assert 0 <= found - expected <= UNSEEN, f"{found:,} bytes, {found - expected:,} more than the formula"
