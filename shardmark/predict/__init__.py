"""What a case would take on hardware that is not there: simulation of memory and time, and what fits.

Importing it lets memory formulas stand beside a simulated step (`shardmark.api.reference`).
"""

from shardmark.api.reference import Followed, Plain, install


def _follow(plain: Plain, device: str) -> Followed:
    from shardmark.predict.reference import follow  # all of PyTorch's FSDP comes with it, which takes a second

    return follow(plain, device)


install(_follow)
