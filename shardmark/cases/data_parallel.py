"""The data-parallel training step's cases."""

from __future__ import annotations

from dataclasses import dataclass, replace

from shardmark.cases.collectives import CollectiveCase
from shardmark.cases.grid import MB, Grid
from shardmark.cases.training_step import TrainingStepCase


@dataclass(frozen=True)
class ReductionCase(TrainingStepCase):
    """A step whose gradients are communicated in `reduce_dtype`, "bfloat16" or "float16"."""

    reduce_dtype: str = "bfloat16"

    def __str__(self) -> str:
        return f"{super().__str__()}-reduce_{self.reduce_dtype}"

    @property
    def reduce_bytes(self) -> int:
        """Bytes of a gradient's element on its way."""
        return 2


@dataclass(frozen=True)
class OverheadCase(CollectiveCase):
    """All-reduces of float32 tensors of several sizes up to that many `megabytes`, which tell overhead and bandwidth,
    and so what each of `bucket_sizes`, in MB, should cost the training step of `model`."""

    model: str = "tiny"
    bucket_sizes: tuple[int, ...] = ()
    kilobytes: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.model}-all_reduces"


DATA_PARALLEL = Grid(
    smoke=[TrainingStepCase("tiny", batch=2, context=32)],
    laptop=[TrainingStepCase("mini", batch=2, context=32)],
    paper=[TrainingStepCase(model, batch=4, context=512) for model in ("small", "medium", "large", "xl")],
)

_SIZES = {"smoke": (1, 25), "laptop": (1, 10, 100), "paper": (1, 10, 100, 1000)}  # MB

BUCKETS = Grid(
    smoke=[replace(DATA_PARALLEL.smoke[0], bucket_mb=bucket_mb) for bucket_mb in _SIZES["smoke"]],
    laptop=[replace(DATA_PARALLEL.laptop[0], bucket_mb=bucket_mb) for bucket_mb in _SIZES["laptop"]],
    paper=[replace(DATA_PARALLEL.paper[-1], bucket_mb=bucket_mb) for bucket_mb in _SIZES["paper"]],
)


def _overhead(model: str, scale: str, *kilobytes: int) -> OverheadCase:
    largest = max(kilobytes) * 1024 // MB
    return OverheadCase("all_reduce", largest, model=model, bucket_sizes=_SIZES[scale], kilobytes=kilobytes)


BUCKET_MODEL = Grid(
    smoke=[_overhead("tiny", "smoke", 4, 64, 1024)],
    laptop=[_overhead("mini", "laptop", 4, 256, 2048, 16_384)],
    paper=[_overhead("xl", "paper", 4, 256, 16_384, 262_144)],
)

REDUCTIONS = Grid(
    smoke=[ReductionCase("tiny", batch=2, context=32)],
    laptop=[ReductionCase("mini", batch=2, context=32)],
    paper=[ReductionCase(case.model, case.batch, case.context) for case in DATA_PARALLEL.paper],
)
