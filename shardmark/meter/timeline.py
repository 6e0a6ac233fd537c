"""Where memory goes: the bytes of each kind through a step, the blocks kept for backward, and the largest blocks.

with timeline("cpu") as recording:
    ...
    recording.mark("before_step", {"parameters": model.parameters()})
    loss = model(x)
    recording.mark("after_forward")
recording.read().phases["after_forward"]["activations"]
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torch import Tensor

from shardmark.meter.allocations import ALLOCATOR, Allocated, Block, Event, Marked, Released
from shardmark.meter.recording import Recording, mark, recording

ACTIVATIONS, TEMPORARIES, INPUTS, WORKSPACE = "activations", "temporaries", "inputs and buffers", "workspace"
KINDS = ("parameters", "gradients", "optimizer state", INPUTS, ACTIVATIONS, TEMPORARIES, WORKSPACE)

BEFORE, FORWARD = "before_step", "after_forward"

Bytes = dict[str, int]
"""Bytes by kind."""


@dataclass
class Timeline:
    """One step's memory, in bytes by kind.

    Each block has one kind for its whole life: the kind that the caller named, if any. Any other block is an input or
    buffer if it is live before the step, an activation if forward allocates it and it outlives forward, workspace if an
    operator allocates and frees it (`shardmark.meter.recording`), else a temporary.
    """

    phases: dict[str, Bytes] = field(default_factory=dict)
    """Bytes live at each mark from "before_step" on, and at "peak"."""
    curve: list[Bytes] = field(default_factory=list)
    """At most 200 moments from "before_step" on, each the largest of one stretch of the step."""
    activations: list[Block] = field(default_factory=list)
    """Blocks that forward keeps for backward."""
    largest: list[Block] = field(default_factory=list)
    """The ten largest blocks live at the peak, without parameters, gradients and optimizer state."""


class Recorder:
    """A running recording. Call `read` once it has ended."""

    def __init__(self, recorded: Recording) -> None:
        self._recorded = recorded
        self._labels: list[dict[int, str]] = []

    def mark(self, name: str, kinds: Mapping[str, Iterable[Tensor]] | None = None) -> None:
        """A phase called `name` ends here; `kinds` names live tensors by kind."""
        items = (kinds or {}).items()
        self._labels.append({x.untyped_storage().data_ptr(): kind for kind, tensors in items for x in tensors})
        mark(name)

    def read(self) -> Timeline:
        """The step between the marks "before_step" and the last."""
        replayed = self._recorded.replay()
        events = [each for each in replayed if not (isinstance(each, Marked) and each.name.startswith(ALLOCATOR))]
        self._give_kinds(events)
        result = Timeline()
        totals: Bytes = Counter()
        live: dict[Block, None] = {}  # in order of allocation
        began, moments = False, []
        at_peak: Bytes = {}
        for event in events:
            match event:
                case Allocated(block):
                    live[block] = None
                    totals[block.kind] += block.nbytes
                case Released(block):
                    del live[block]
                    totals[block.kind] -= block.nbytes
                case Marked(name):
                    began = began or name == BEFORE
                    if began:
                        result.phases[name] = dict(totals)
                    if name == FORWARD:
                        result.activations = [block for block in live if block.kind == ACTIVATIONS]
            if began:
                moments.append(dict(totals))
                if sum(totals.values()) > sum(at_peak.values()):
                    at_peak = dict(totals)
                    result.largest = [b for b in live if b.kind in (ACTIVATIONS, TEMPORARIES, INPUTS, WORKSPACE)]
        result.phases["peak"] = at_peak
        result.largest = sorted(result.largest, key=lambda block: -block.nbytes)[:10]
        result.curve = _thinned(moments, 200)
        return result

    def _give_kinds(self, events: list[Event]) -> None:
        """Give each block one kind for its whole life."""
        labels = iter(self._labels)
        live: dict[int, Block] = {}
        before: set[Block] | None = None
        for event in events:
            match event:
                case Allocated(block):
                    live[block.address] = block
                case Released(block):
                    del live[block.address]
                case Marked(name):
                    for address, kind in next(labels).items():
                        if address in live:
                            live[address].kind = kind
                    unnamed = {block for block in live.values() if not block.kind}
                    if name == BEFORE:
                        before = unnamed
                        _give(unnamed, INPUTS)
                    if name == FORWARD and before is not None:
                        _give(unnamed, ACTIVATIONS)
        rest = [event.block for event in events if isinstance(event, Allocated) and not event.block.kind]
        _give((block for block in rest if block.workspace), WORKSPACE)
        _give((block for block in rest if not block.workspace), TEMPORARIES)


def _give(blocks: Iterable[Block], kind: str) -> None:
    for block in blocks:
        block.kind = kind


def _thinned(moments: list[Bytes], most: int) -> list[Bytes]:
    """At most `most` moments in order, the largest of each stretch."""
    stretch = -(-len(moments) // most) or 1
    return [
        max(moments[i : i + stretch], key=lambda moment: sum(moment.values())) for i in range(0, len(moments), stretch)
    ]


@contextmanager
def timeline(device: str) -> Iterator[Recorder]:
    """Record the block's allocations on `device` ("cpu" or "cuda")."""
    with recording(device) as recorded:
        yield Recorder(recorded)


def by_layer_and_operator(blocks: Iterable[Block]) -> dict[tuple[str, str], int]:
    """Bytes by module and operator, largest first. Layers of a kind are one module: "blocks.*.attention"."""
    sums: dict[tuple[str, str], int] = defaultdict(int)
    for block in blocks:
        sums[re.sub(r"\.\d+(?=\.|$)", ".*", block.module), block.operator] += block.nbytes
    return dict(sorted(sums.items(), key=lambda item: -item[1]))
