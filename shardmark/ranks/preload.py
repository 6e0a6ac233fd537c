"""Imported first in the server of ranks: modules of PyTorch warn of others, and PYTHONWARNINGS=error would end it."""

import warnings

if any(action == "error" for action, *_ in warnings.filters):
    warnings.simplefilter("default")
