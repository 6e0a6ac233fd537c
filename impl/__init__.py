"""What is measured: one folder per family, one file per implementation, registered where it is defined."""

from impl import attention, collectives, data_parallel, model

__all__ = ["attention", "collectives", "data_parallel", "model"]
