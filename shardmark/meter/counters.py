"""Counts of one steady-state step: without noise, so equal in every run on one kind of device and one version of torch.

    counted = count(workload, "cpu")    # one step under the profiler, and one more for each that it cannot see
    counted.operators, counted.saved_bytes

Unlike a mode of the dispatcher, the profiler does not change what runs: compiled code stays compiled, and FSDP's and
DDP's hooks and checkpointing run as ever. A figure that the profiler cannot see is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any

import torch
from torch._C._profiler import RecordScope, _EventType
from torch.autograd.profiler import profile, record_function

from shardmark.api.workload import Workload
from shardmark.meter.bytecodes import LIBRARIES, bytecodes, is_followed
from shardmark.meter.communication import Communication, listening
from shardmark.meter.instructions import instructions, why_not_countable
from shardmark.meter.kernels import ATTENTION, MATRIX_PRODUCT, category
from shardmark.meter.saved_tensors import saved_bytes

_STEP = "shardmark_step"
_COMPILED = ("Torch-Compiled Region", "CompiledFunction")
"""Prefixes of ranges around compiled code, forward and backward: its kernels have no operators."""
_COMMUNICATION = ("c10d", "_c10d_functional")
"""Namespaces of operators that communicate and compute nothing."""
_MAKES_NOTHING = ("empty", "new_empty", "_unsafe_view", "lift_fresh", "record_stream")
"""Prefixes of operators that compute nothing, though their schemas do not say so."""
_READS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_MAY_READ = "aten::index"
"""Indexing reads no indices; it reads a mask by another operator, within it, that is counted."""


@dataclass(frozen=True)
class Counters:
    """Counts of one step on one rank."""

    collectives: list[tuple[str, str, int, int]]
    """(operation, dtype, bytes, repetitions in a row) of collectives, messages and barriers, in the order in which they
    began. The bytes are the larger of input and output."""
    bytes_sent: int
    """Bytes that a rank must send for its collectives and messages (`Communication.sent`); a backend may send more."""
    operators: int | None
    """PyTorch operators that computed something: no views, no empty tensors, no collectives. An operator with a kernel
    counts as one, whatever it calls; a composite one (`matmul`, `linear`) as those that it calls. None with compiled
    code."""
    kernels: int | None
    """Kernels that ran on the GPU, without copies and fills; None on CPU."""
    flops: int | None
    """FLOPs of matrix products and fused attention, by the formulas of `torch.utils.flop_counter`. None with compiled
    code, Triton's kernels, convolutions, and products without a formula, such as that of a matrix and a vector."""
    saved_bytes: int | None
    """Bytes that autograd keeps for backward at the end of forward: each storage of a saved tensor once. The workload's
    own tensors (parameters, buffers, attributes) do not count. None without a saved tensor, and with compiled code."""
    synchronizations: int | None
    """Waits of the host for the device. On CUDA these are calls of `cudaStreamSynchronize` and the like. On CPU they
    are operators that would make it wait, as they read a value (`item`) or find a shape (`nonzero`)."""
    bytecodes: int | None = None
    """Bytecode instructions of the user's Python functions (`shardmark.meter.bytecodes`). None with compiled code,
    beside a debugger or coverage, for more than `bytecodes.MOST`, and where two steps in a row differ."""
    library_bytecodes: int | None = None
    """Bytecode instructions of Python's own and the libraries' functions, with noise of up to some percent."""
    bytecodes_by_function: dict[str, int] | None = None
    """`bytecodes` by function."""
    instructions: int | None = None
    """Machine instructions in user space, of all threads, with a little noise (`shardmark.meter.instructions`); None
    where the machine does not let them be counted."""
    operators_by_name: dict[str, int] | None = None
    """`operators` by name."""


def count(workload: Workload, device: str, largest: Callable[[float], float] = lambda own: own) -> Counters | None:
    """Count one step of a workload that has warmed up; None if the step fails. Every rank of a world calls this;
    `largest` returns the largest of the ranks' numbers, so that all of them decide alike.

    The workload can do no step afterwards: its last step ends after forward.
    """
    counted, compiled = None, True
    with suppress(Exception):  # whatever fails, the row is kept
        counted, compiled = _profiled(workload, device)
    if largest(counted is None) or counted is None:
        return None
    more: dict[str, Any] = {}  # all ranks step, or none
    if not largest(bool(why_not_countable())):
        with suppress(Exception):
            more["instructions"] = instructions(workload)
    if not largest(compiled):  # compiled code would compile again under hooks
        if not largest(is_followed()):
            with suppress(Exception):
                more |= _bytecodes(workload)
        with suppress(Exception):
            more["saved_bytes"] = saved_bytes(workload)
    return replace(counted, **more)


def _bytecodes(workload: Workload) -> dict[str, Any]:
    by_function = bytecodes(workload)
    if by_function is None:
        return {}
    of_libraries = by_function.pop(LIBRARIES, 0)
    own = sum(by_function.values())
    return {"bytecodes": own, "library_bytecodes": of_libraries, "bytecodes_by_function": by_function}


def _profiled(workload: Workload, device: str) -> tuple[Counters, bool]:
    """The step's counters without the saved bytes, and whether compiled code ran."""
    started: list[Communication] = []
    workload.prepare()
    with (
        listening(lambda each, starting: started.append(each) if starting else None),
        _triton_launches() as launches,
        profile(record_shapes=True, use_device="cuda" if device == "cuda" else None) as profiler,
        record_function(_STEP),
    ):
        workload.step(lambda part: None)
    results = profiler.kineto_results
    assert results is not None
    tally = _Tally()
    for event in results.experimental_event_tree():
        tally.follow(event)
    kernels, synchronizations = _of_the_device(results.events()) if device == "cuda" else (None, tally.reads)
    described = [(each.name, str(each.dtype).removeprefix("torch."), each.nbytes) for each in started]
    counted = Counters(
        collectives=[(*each, len(list(run))) for each, run in groupby(described)],
        bytes_sent=sum(each.sent for each in started),
        operators=None if tally.compiled else tally.names.total(),
        kernels=kernels,
        flops=None if tally.compiled or launches else tally.flops,
        saved_bytes=None,
        synchronizations=synchronizations,
        operators_by_name=None if tally.compiled else dict(sorted(tally.names.items())),
    )
    return counted, tally.compiled


class _Tally:
    """Sums over the profiler's events."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()
        """Operators that count, by name."""
        self.flops: int | None = 0
        self.products = 0
        self.reads = 0
        self.compiled = False

    def follow(self, event: Any, within: bool = False, has_flops: bool = False) -> None:
        """Count an event and the events below it. `within`: an operator around the event is counted already;
        `has_flops`: its FLOPs are counted already."""
        what, fields = event.typed
        if what == _EventType.TorchOp and event.name.startswith(_COMPILED):
            self.compiled = True
        name = event.name if what == _EventType.TorchOp and fields.scope == RecordScope.FUNCTION else ""
        if not within and computes(name):
            self.names[name] += 1
            within = True
        reads, products = self.reads, self.products
        if not has_flops and name in _formulas() and not _contains(event, name):  # a DTensor's calls that of its shard
            self._add_flops(name, fields.inputs)
            has_flops = True
        for child in event.children:
            self.follow(child, within, has_flops)
        if self.reads == reads and _reads(name):  # `item` and the operators that it calls count once
            self.reads += 1
        if self.products == products and not has_flops and _is_product(name):
            self.flops = None

    def _add_flops(self, name: str, inputs: list[Any]) -> None:
        self.products += 1
        try:
            arguments = [_as_tensor(each) for each in inputs[: _positional(name)]]
            self.flops = None if self.flops is None else self.flops + _formulas()[name](*arguments)
        except Exception:  # the formula needs what the profiler does not record, such as the shape of the output
            self.flops = None


def _as_tensor(value: Any) -> Any:
    """A tensor of the recorded shape, for a FLOP formula; any other value unchanged."""
    sizes = getattr(value, "sizes", None)
    return value if sizes is None else torch.empty(sizes, dtype=value.dtype, device="meta")


def _contains(event: Any, name: str) -> bool:
    return any(child.name == name or _contains(child, name) for child in event.children)


@cache
def _overloads(name: str) -> list[Any]:
    """The operator's overloads, without TorchScript's; none for a name that is no operator, such as a range."""
    namespace, _, base = name.partition("::")
    if not (namespace and base.isidentifier()):
        return []
    packet = getattr(getattr(torch.ops, namespace), base, None)
    overloads = [] if packet is None else [getattr(packet, overload) for overload in packet.overloads()]
    return [overload for overload in overloads if torch._C._dispatch_has_kernel(overload.name())]


@cache
def computes(name: str) -> bool:
    namespace, _, base = name.partition("::")
    if namespace in _COMMUNICATION or base.startswith(_MAKES_NOTHING):
        return False
    return any(map(_is_kernel, _overloads(name)))


def _is_kernel(overload: Any) -> bool:
    """Whether the operator has a kernel of its own that writes to an argument or makes a tensor other than a view."""
    if torch.Tag.out in overload.tags or torch.Tag.inplace_view in overload.tags:
        return False
    if torch._C._dispatch_has_kernel_for_dispatch_key(overload.name(), "CompositeImplicitAutograd"):
        return False
    schema = overload._schema
    writes = any(argument.alias_info is not None and argument.alias_info.is_write for argument in schema.arguments)
    return writes or any("Tensor" in str(each.type) and each.alias_info is None for each in schema.returns)


@cache
def _reads(name: str) -> bool:
    return name != _MAY_READ and any(not _READS.isdisjoint(overload.tags) for overload in _overloads(name))


@cache
def _is_product(name: str) -> bool:
    return category(name) in (MATRIX_PRODUCT, ATTENTION) and computes(name)


@cache
def _positional(name: str) -> int:
    """Number of the operator's positional arguments."""
    return sum(not argument.kwarg_only for argument in _overloads(name)[0]._schema.arguments)


@cache
def _formulas() -> dict[str, Callable[..., int]]:
    """FLOP formulas by operator. PyTorch's registry lacks attention on CPU and in-place products, such as `addmm_`."""
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop, sdpa_flop  # imports Triton

    own = {str(target).replace(".", "::", 1): formula for target, formula in flop_registry.items()}
    in_place = {f"{name}_": formula for name, formula in own.items()}
    on_cpu = "aten::_scaled_dot_product_flash_attention_for_cpu"
    return {**own, **in_place, on_cpu: sdpa_flop, f"{on_cpu}_backward": sdpa_backward_flop}


@contextmanager
def _triton_launches() -> Iterator[list[None]]:
    """A list that gets an entry for each launch of a Triton kernel."""
    launches: list[None] = []
    try:
        from triton import knobs
    except ImportError:
        yield launches
        return

    def launched(*_: Any) -> None:
        launches.append(None)

    knobs.runtime.launch_enter_hook.add(launched)
    try:
        yield launches
    finally:
        knobs.runtime.launch_enter_hook.remove(launched)


def _of_the_device(events: list[Any]) -> tuple[int | None, int | None]:
    """Kernels that ran on the GPU, and how often the step waited for it; None where CUPTI is not available."""
    kernels = sum(event.activity_type() == "kernel" for event in events)
    steps = [event for event in events if event.name() == _STEP and event.activity_type() == "user_annotation"]
    if not kernels or len(steps) != 1:
        return None, None
    began, ended = steps[0].start_ns(), steps[0].end_ns()
    waits = (event.start_ns() for event in events if event.name().endswith("Synchronize"))
    return kernels, sum(began <= wait <= ended for wait in waits)  # the profiler waits, too, once the step has ended
