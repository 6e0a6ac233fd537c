"""Predict a case's memory and step time on hardware that is not there, and which strategies fit.

Importing it lets memory formulas stand beside a simulated step (`shardmark.api.reference`).
"""

from shardmark.api.reference import Followed, Plain, install


def _follow(plain: Plain, device: str) -> Followed:
    from shardmark.predict.reference import follow  # all of PyTorch's FSDP comes with it, which takes a second

    return follow(plain, device)


install(_follow)
