"""The grids of cases at each scale: smoke (seconds), laptop (minutes on two cores), paper (sizes people publish)."""

from shardmark.cases.attention import ATTENTION_HEADS, ATTENTION_LENGTHS, ATTENTION_MEMORY, MODES, AttentionCase
from shardmark.cases.checkpointing import CHECKPOINTING
from shardmark.cases.collectives import ALL_REDUCE, AllReduceCase
from shardmark.cases.data_parallel import BUCKETS, DATA_PARALLEL
from shardmark.cases.grid import MB, SCALES, Grid, Work
from shardmark.cases.loss import LOSS, LossCase
from shardmark.cases.mlp_ladder import MLP_LADDER, MLP_RUNGS, RANK_RUNGS, RANK_STAGES, RankRung, Rung
from shardmark.cases.optim import CLIPPED_STEP, CLIPPING, OPTIMIZER_STEP, OptimizerCase
from shardmark.cases.training_step import (
    STEP_COMPILED,
    STEP_GOALS,
    STEP_KERNELS,
    STEP_MEMORY,
    STEP_MODES,
    STEP_TIMES,
    STEP_WARMUPS,
    TrainingStepCase,
)

__all__ = [
    "ALL_REDUCE",
    "ATTENTION_HEADS",
    "ATTENTION_LENGTHS",
    "ATTENTION_MEMORY",
    "BUCKETS",
    "CHECKPOINTING",
    "CLIPPED_STEP",
    "CLIPPING",
    "DATA_PARALLEL",
    "LOSS",
    "MB",
    "MLP_LADDER",
    "MLP_RUNGS",
    "MODES",
    "OPTIMIZER_STEP",
    "RANK_RUNGS",
    "RANK_STAGES",
    "SCALES",
    "STEP_COMPILED",
    "STEP_GOALS",
    "STEP_KERNELS",
    "STEP_MEMORY",
    "STEP_MODES",
    "STEP_TIMES",
    "STEP_WARMUPS",
    "AllReduceCase",
    "AttentionCase",
    "Grid",
    "LossCase",
    "OptimizerCase",
    "RankRung",
    "Rung",
    "TrainingStepCase",
    "Work",
]
