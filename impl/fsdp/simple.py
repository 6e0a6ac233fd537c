"""SimpleFSDP: each parameter is stored as a sharded DTensor, and reading it from its module all-gathers it.

    mesh = init_device_mesh("cuda", (4,))
    data_parallel(model, mesh, mode="fully_shard", mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))

The all-gather is an operator of forward. So autograd makes the reduce-scatter of backward itself, and a compiler sees
both.
Zhang et al., "SimpleFSDP: Simpler Fully Sharded Data Parallel with torch.compile", 2024.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _get_pg_default_device
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from torch.utils.weak import WeakIdKeyDictionary

from impl.distributed import broadcast_in_place, check_same_module
from impl.fsdp.contract import Facts
from impl.fsdp.dtensors import DTensorModel
from impl.fsdp.nested_tensors import changed
from impl.fsdp.nine_linears_accounting import formulas
from impl.fsdp.simple_accounting import transformer_peak
from impl.fsdp.wrapping import check_unsharded, mark_sharded
from shardmark.api import Race, Unsupported, register

PLACEMENTS: dict[str, tuple[Placement, ...]] = {
    "replicate": (Replicate(),),
    "fully_shard": (Shard(0),),
    "hybrid_shard": (Replicate(), Shard(0)),
}
"""How each mode places a parameter along each dimension of the mesh."""


def data_parallel(
    model: nn.Module,
    mesh: DeviceMesh,
    mode: str = "fully_shard",
    mp_policy: MixedPrecisionPolicy | None = None,
    *,
    reshard_after_forward: bool = True,
) -> nn.Module:
    """Turn the model's parameters into DTensors over the mesh, in place, and return the model.

    `mode` is "replicate" (a copy on every rank), "fully_shard" (rows sharded over the ranks) or "hybrid_shard" (rows
    sharded over the last dimension of a two-dimensional mesh of all ranks, copies over the first). Parameters and
    buffers that are not on the meta device get rank 0's values. Parameters are gathered in `mp_policy.param_dtype`, and
    gradients averaged over the ranks in `mp_policy.reduce_dtype`; None means the dtype that is stored, which `.grad`
    has in any case. With `reshard_after_forward` backward all-gathers sharded parameters again; otherwise what forward
    gathered stays until then.

    Names in `state_dict` and what `isinstance` says do not change; the values of a `state_dict` are DTensors. Each read
    of a parameter all-gathers it, so every rank must read the same parameters in the same order, and reach them in
    backward. Save such a model by its `state_dict`; the module itself cannot be pickled. There is no `ignored_params`:
    `init_weights` seeds each rank's draws by the one way in which all parameters are placed. A small one costs a gather
    of its own; compiled, gathers can go together (`torch._inductor.config.bucket_all_gathers_fx`).

    ValueError for another mode, a mesh of other dimensions, sharded parameters, no trainable ones, and models that
    differ between ranks; Unsupported for parameters without rows or with gaps in memory. RuntimeError in backward where
    a parameter changed since forward.
    """
    _check(model, mesh, mode)
    mp_policy = mp_policy or MixedPrecisionPolicy()
    reading = _Reading(mp_policy, reshard_after_forward and mode != "replicate", mesh)
    sharded = WeakIdKeyDictionary()  # weak keys: each full parameter is freed as soon as its shards exist
    for module in model.modules():
        own = [name for name, parameter in module._parameters.items() if parameter is not None]
        for name in own:
            module._parameters[name] = _shard(module._parameters[name], mesh, PLACEMENTS[mode], sharded)
        vars(module)["_reading"] = reading
        module.__class__ = _class((type(module),), *own)
    for buffer in model.buffers():
        if not buffer.is_meta:
            broadcast_in_place(buffer, _group(mesh))
    model.__class__ = _class((_Root, type(model)))
    mark_sharded(model)
    return model


@contextmanager
def as_stored() -> Iterator[None]:
    """In this context reading a parameter returns the stored DTensor, without an all-gather."""
    before, _Reading.as_stored = _Reading.as_stored, True
    try:
        yield
    finally:
        _Reading.as_stored = before


def init_weights(model: nn.Module, seed: int = 0) -> None:
    """Call `model.init_weights()` so that each rank draws only its own shards, and never holds a full parameter.

    Different shards get different random seeds, copies of one shard the same. The rank's random state is restored.
    """
    parameter: Any = next(model.parameters())
    mesh, placements = parameter.device_mesh, parameter.placements
    own = [index for index, placement in zip(mesh.get_coordinate(), placements, strict=True) if placement.is_shard()]
    devices = [torch.cuda.current_device()] if mesh.device_type == "cuda" else []
    with torch.random.fork_rng(devices), as_stored(), warnings.catch_warnings():
        # DTensor's own seeds are incomplete, so this context sets them
        warnings.filterwarnings("ignore", "DTensor random operators may not have complete support")
        torch.manual_seed(seed * mesh.size() + sum(own))
        initialize: Any = model.init_weights
        initialize()


class SimpleFullyShardedDataParallel(DTensorModel):
    """`data_parallel` in mode "fully_shard" over a process group, with the family's contract."""

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: dist.ProcessGroup | None = None,
        compute_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        reshard_after_forward: bool = True,
    ) -> None:
        super().__init__()
        group = process_group or dist.group.WORLD
        assert group is not None
        device = next((parameter.device.type for parameter in module.parameters()), "meta")
        if device == "meta":
            device = _get_pg_default_device(group).type
        mesh = DeviceMesh.from_group(group, device)
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=reduce_dtype)
        self.module = data_parallel(module, mesh, "fully_shard", policy, reshard_after_forward=reshard_after_forward)


class _Gathered(NamedTuple):
    """Saved for backward in place of a view of a gathered parameter: how to all-gather it again and make the view."""

    parameter: DTensor
    version: int
    view: tuple[Any, Any, Any]
    """Size, strides and storage offset."""


class _Reading:
    """How one model's parameters are all-gathered: when they are read, and again in backward."""

    as_stored = False

    def __init__(self, policy: MixedPrecisionPolicy, reshard: bool, mesh: DeviceMesh) -> None:
        self.policy = policy
        self.reshard = reshard
        self._shards = DeviceMesh.from_group(mesh.get_group(1), mesh.device_type) if mesh.ndim == 2 else None
        self._gathered: dict[int, tuple[StorageWeakRef, DTensor]] | None = None  # key: storage address, during forward

    def __call__(self, parameter: DTensor) -> Tensor:
        if self.as_stored:
            return parameter
        if torch.compiler.is_compiling():
            if not self.reshard:
                return self._gather(parameter)
            again = partial(create_selective_checkpoint_contexts, _recompute)
            return checkpoint(self._gather, parameter, use_reentrant=False, context_fn=again)
        full = self._gather(parameter)
        if self._gathered is not None:
            reference = StorageWeakRef(full.untyped_storage())  # while it exists, no other storage has this address
            self._gathered[reference.cdata] = reference, parameter
        return full

    def _as(self, dtype: torch.dtype | None, parameter: DTensor) -> torch.dtype:
        """The dtype of the policy: not for packed bits, which are integers, nor for what has an imaginary part."""
        return (dtype if parameter.is_floating_point() else None) or parameter.dtype

    def _gather(self, parameter: DTensor) -> Tensor:
        gathered_in = self._as(self.policy.param_dtype, parameter)
        reduced_in = self._as(self.policy.reduce_dtype, parameter)
        shards = parameter
        if self._shards is not None:  # without this, DTensor's backward begins with an all-reduce of the full gradient
            unmoved = parameter.redistribute(placements=parameter.placements, backward_dtype=reduced_in)
            rows = unmoved.to_local(grad_placements=[Partial("avg"), Shard(0)])
            shape, stride = parameter.shape, parameter.stride()
            shards = DTensor.from_local(rows, self._shards, [Shard(0)], shape=shape, stride=stride)
        full = shards.redistribute(placements=[Replicate()], forward_dtype=gathered_in, backward_dtype=reduced_in)
        return full.to_local(grad_placements=[Partial("avg")])

    @contextmanager
    def regathering(self) -> Iterator[None]:
        """In this context autograd saves a `_Gathered` for each gathered parameter, in place of its values."""
        self._gathered = {}
        try:
            with saved_tensors_hooks(self._pack, self._unpack):
                yield
        finally:
            self._gathered = None

    def _pack(self, tensor: Tensor) -> Tensor | _Gathered:
        assert self._gathered is not None
        _, parameter = self._gathered.get(tensor.untyped_storage()._cdata, (None, None))
        if parameter is None or tensor.dtype != self._as(self.policy.param_dtype, parameter) or tensor.is_conj():
            return tensor  # a view that strides do not make, such as a real part
        view = tensor.size(), tensor.stride(), tensor.storage_offset()
        return _Gathered(parameter, parameter._version, view)

    def _unpack(self, saved: Tensor | _Gathered) -> Tensor:
        if not isinstance(saved, _Gathered):
            return saved
        if saved.parameter._version != saved.version:
            raise RuntimeError(
                f"a parameter of shape {tuple(saved.parameter.shape)} was changed between forward and backward, which "
                "gathers it again: run backward first, or pass reshard_after_forward=False"
            )
        with torch.no_grad():
            return self._gather(saved.parameter).as_strided(*saved.view)


class _Root(nn.Module):
    """A mixin in front of the model's class: casts inputs and outputs, and has backward all-gather again."""

    _reading: _Reading

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        reading, policy = self._reading, self._reading.policy
        if policy.cast_forward_inputs and policy.param_dtype is not None:
            cast = partial(_cast, dtype=policy.param_dtype)
            args = tuple(changed(x, cast) for x in args)
            kwargs = {name: changed(x, cast) for name, x in kwargs.items()}
        if reading.reshard and not torch.compiler.is_compiling():
            with reading.regathering():
                output = super().forward(*args, **kwargs)
        else:
            output = super().forward(*args, **kwargs)
        return output if policy.output_dtype is None else _cast(output, policy.output_dtype)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _recompute(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Compiled code saves nothing of an all-gather for backward."""
    return CheckpointPolicy.MUST_RECOMPUTE


@cache  # models of one class share the new class, so that code compiled for one serves the next
def _class(bases: tuple[type[nn.Module], ...], *names: str) -> type[nn.Module]:
    """Make a subclass of `bases` with the last one's name, in which reading one of the named parameters all-gathers
    it."""

    def read(name: str) -> property:
        return property(lambda module: module._reading(module._parameters[name]))

    kind = bases[-1]
    return type(kind.__name__, bases, {"__module__": kind.__module__, **{name: read(name) for name in names}})


def _shard(
    parameter: Any, mesh: DeviceMesh, placements: tuple[Placement, ...], sharded: WeakIdKeyDictionary
) -> nn.Parameter:
    """Return the parameter as a DTensor; `sharded` caches those already made, so that a tied parameter stays tied."""
    if parameter not in sharded:
        if not parameter.is_meta:
            dist.broadcast(parameter.detach(), group=_group(mesh), group_src=0)  # in place; a scatter would copy
        distributed = distribute_tensor(parameter.detach(), mesh, placements, src_data_rank=None)
        sharded[parameter] = nn.Parameter(distributed, requires_grad=parameter.requires_grad)
    return sharded[parameter]


def _group(mesh: DeviceMesh) -> dist.ProcessGroup | None:
    """The process group of all ranks of the mesh."""
    return mesh.get_group() if mesh.ndim == 1 else dist.group.WORLD


def _check(model: nn.Module, mesh: DeviceMesh, mode: str) -> None:
    if mode not in PLACEMENTS:
        raise ValueError(f"mode is one of {', '.join(PLACEMENTS)}, not {mode!r}")
    if mesh.ndim != len(PLACEMENTS[mode]):
        raise ValueError(
            f"{mode} takes a mesh of {len(PLACEMENTS[mode])} dimension{'s' * (len(PLACEMENTS[mode]) > 1)}, got "
            f"{tuple(mesh.shape)}"
        )
    check_unsharded(model)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 0 and mode != "replicate":
            raise Unsupported(f"{mode} splits rows, and {name} has none: give it the shape (1,)")
        if not parameter.is_contiguous():
            raise Unsupported(f"DTensors are contiguous, and {name} is not")
    check_same_module(model, _group(mesh))


register(
    "fsdp",
    "simple",
    SimpleFullyShardedDataParallel,
    memory=transformer_peak,
    time=Race("fsdp2"),
    facts=Facts(gathers_first_again=False, nine_linears=formulas("simple")),
    called="SimpleFSDP",
)
