"""Everything that an implementation may import of the tool: families, registration, cases, work and workloads.

from shardmark.api import Race, Unsupported, register

register("loss", "mine", my_loss, time=Race("eager", budget=1.0))
"""

from shardmark.api.finding import RegistryError
from shardmark.api.grid import MB, SCALES, Grid
from shardmark.api.host import has_device_memory, to_host
from shardmark.api.mesh import AXES, EXPERTS, Mesh, Share, data_axes
from shardmark.api.own_model import Loss, Made, OwnModel, OwnModelCase, find_blocks, make, resized
from shardmark.api.recipe import ADAMW, PLAIN, MakesOptimizer, Recipe, named_optimizer, taken_apart
from shardmark.api.reference import (
    AFTER_BACKWARD,
    AFTER_FORWARD,
    BACKWARD,
    BEGIN,
    ENTER,
    GRADIENT,
    GRADIENTS,
    INPUTS,
    LEAVE,
    PARAMETERS,
    READ,
    READ_END,
    Followed,
    Moment,
    PlainStep,
    followed,
)
from shardmark.api.refusals import (
    NotAsked,
    Refusable,
    Unsupported,
    dtype_name,
    dtypes_in,
    forget_last_call,
    last_call,
    note_events,
    note_unasked,
    other_dtypes,
    tensors_of,
)
from shardmark.api.registry import (
    FAMILIES,
    Family,
    Implementation,
    Race,
    add_family,
    family,
    register,
    resolve,
    trains_own_model,
)
from shardmark.api.requirements import Requirement, error_line, requires_compiler, requires_cuda
from shardmark.api.signature import check_signature, made_once
from shardmark.api.work import Work
from shardmark.api.workload import Mark, Workload, stage

__all__ = [
    "ADAMW",
    "AFTER_BACKWARD",
    "AFTER_FORWARD",
    "AXES",
    "BACKWARD",
    "BEGIN",
    "ENTER",
    "EXPERTS",
    "FAMILIES",
    "GRADIENT",
    "GRADIENTS",
    "INPUTS",
    "LEAVE",
    "MB",
    "PARAMETERS",
    "PLAIN",
    "READ",
    "READ_END",
    "SCALES",
    "Family",
    "Followed",
    "Grid",
    "Implementation",
    "Loss",
    "Made",
    "MakesOptimizer",
    "Mark",
    "Mesh",
    "Moment",
    "NotAsked",
    "OwnModel",
    "OwnModelCase",
    "PlainStep",
    "Race",
    "Recipe",
    "Refusable",
    "RegistryError",
    "Requirement",
    "Share",
    "Unsupported",
    "Work",
    "Workload",
    "add_family",
    "check_signature",
    "data_axes",
    "dtype_name",
    "dtypes_in",
    "error_line",
    "family",
    "find_blocks",
    "followed",
    "forget_last_call",
    "has_device_memory",
    "last_call",
    "made_once",
    "make",
    "named_optimizer",
    "note_events",
    "note_unasked",
    "other_dtypes",
    "register",
    "requires_compiler",
    "requires_cuda",
    "resized",
    "resolve",
    "stage",
    "taken_apart",
    "tensors_of",
    "to_host",
    "trains_own_model",
]
