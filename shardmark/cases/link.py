"""Cases of data parallelism on a limited link: what is to be sent takes about as long as what is to be computed."""

from __future__ import annotations

from dataclasses import replace

from shardmark.cases.grid import Grid
from shardmark.cases.training_step import TrainingStepCase

_BUCKETS_MB = (1, 2, 5, 10, 25)

LINK = Grid(
    smoke=[TrainingStepCase("tiny", batch=4, context=32)],
    laptop=[TrainingStepCase("wide", batch=8, context=32)],
    paper=[TrainingStepCase(model, batch=4, context=512) for model in ("small", "medium")],
)
"""The batch is where the search for the one at which both take as long begins."""

LINK_BUCKETS = Grid(
    smoke=[replace(case, bucket_mb=bucket_mb) for case in LINK.smoke for bucket_mb in _BUCKETS_MB[::4]],
    laptop=[replace(case, bucket_mb=bucket_mb) for case in LINK.laptop for bucket_mb in _BUCKETS_MB],
    paper=[replace(case, bucket_mb=bucket_mb) for case in LINK.paper for bucket_mb in _BUCKETS_MB],
)
