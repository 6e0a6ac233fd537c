"""The grids of cases at each scale: smoke (seconds), laptop (minutes on two cores), paper (sizes people publish)."""

from shardmark.cases.attention import ATTENTION_HEADS, ATTENTION_LENGTHS, ATTENTION_MEMORY, MODES, AttentionCase
from shardmark.cases.checkpointing import CHECKPOINTING
from shardmark.cases.collectives import (
    COLLECTIVE_SIZES,
    COLLECTIVES,
    LARGE_ALL_REDUCE,
    CollectiveCase,
)
from shardmark.cases.data_parallel import BUCKET_MODEL, BUCKETS, DATA_PARALLEL, REDUCTIONS, OverheadCase, ReductionCase
from shardmark.cases.fsdp import FSDP, FSDP_LOW_PRECISION, FSDPCase
from shardmark.cases.grid import MB, SCALES, Grid, Work
from shardmark.cases.link import LINK, LINK_BUCKETS
from shardmark.cases.loss import LOSS, LossCase
from shardmark.cases.mlp_ladder import MLP_LADDER, MLP_RUNGS, RANK_RUNGS, RANK_STAGES, RankRung, Rung
from shardmark.cases.nine_linears import (
    NINE_LINEARS,
    NINE_LINEARS_OFFLOADED,
    NINE_LINEARS_WRAPPED,
    NineLinearsCase,
)
from shardmark.cases.optim import CLIPPED_STEP, CLIPPING, OPTIMIZER_STEP, OptimizerCase
from shardmark.cases.optimizer_order import OPTIMIZER_ORDER
from shardmark.cases.scaling import SCALING, ScalingCase
from shardmark.cases.sharded_optimizer import SHARDED_OPTIMIZER, ShardedStepCase
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
    "ATTENTION_HEADS",
    "ATTENTION_LENGTHS",
    "ATTENTION_MEMORY",
    "BUCKETS",
    "BUCKET_MODEL",
    "CHECKPOINTING",
    "CLIPPED_STEP",
    "CLIPPING",
    "COLLECTIVES",
    "COLLECTIVE_SIZES",
    "DATA_PARALLEL",
    "FSDP",
    "FSDP_LOW_PRECISION",
    "LARGE_ALL_REDUCE",
    "LINK",
    "LINK_BUCKETS",
    "LOSS",
    "MB",
    "MLP_LADDER",
    "MLP_RUNGS",
    "MODES",
    "NINE_LINEARS",
    "NINE_LINEARS_OFFLOADED",
    "NINE_LINEARS_WRAPPED",
    "OPTIMIZER_ORDER",
    "OPTIMIZER_STEP",
    "RANK_RUNGS",
    "RANK_STAGES",
    "REDUCTIONS",
    "SCALES",
    "SCALING",
    "SHARDED_OPTIMIZER",
    "STEP_COMPILED",
    "STEP_GOALS",
    "STEP_KERNELS",
    "STEP_MEMORY",
    "STEP_MODES",
    "STEP_TIMES",
    "STEP_WARMUPS",
    "AttentionCase",
    "CollectiveCase",
    "FSDPCase",
    "Grid",
    "LossCase",
    "NineLinearsCase",
    "OptimizerCase",
    "OverheadCase",
    "RankRung",
    "ReductionCase",
    "Rung",
    "ScalingCase",
    "ShardedStepCase",
    "TrainingStepCase",
    "Work",
]
