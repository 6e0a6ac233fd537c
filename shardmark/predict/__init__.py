"""Predict a case's memory and step time on hardware that is not there, and which strategies fit.

Importing it installs the simulated step that memory formulas use (`shardmark.api.reference`).
"""

from shardmark.api.reference import Followed, Plain, install
from shardmark.meter.plan import Plan


def _follow(plain: Plain, device: str) -> Followed:
    from shardmark.predict.reference import follow  # all of PyTorch's FSDP comes with it, which takes a second

    return follow(plain, device)


def kept_for_backward(plan: Plan) -> dict[tuple[str, str], int]:
    """Bytes that forward leaves for backward on a CPU, by module (layers of a kind together) and operator."""
    from shardmark.predict.simulation.predict import kept_for_backward

    return kept_for_backward(plan)


install(_follow)
