"""The bytes that a step sends along each axis of a mesh."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import ClassVar

from shardmark.api.mesh import Mesh
from shardmark.meter.communication import Communication, listening
from shardmark.meter.plan import Measured, Plan
from shardmark.rows.columns import Column, Entry
from shardmark.rows.observers.observer import Observer
from shardmark.rows.row import Row
from shardmark.text import mib


def _sent(entry: Entry, row: Row) -> str | None:
    axes = row["counters"].get("bytes_sent_by_axis", {})
    return ", ".join(f"{axis} {mib(sent)}" for axis, sent in axes.items()) or None


class SentByAxis(Observer):
    """Bytes that a rank sends for its collectives and messages along each axis of the case's mesh, in one more step."""

    columns: ClassVar[tuple[Column, ...]] = (Column("sent by axis MiB", _sent, after="to send MiB"),)

    @classmethod
    def on_rank(cls, plan: Plan, measured: Measured) -> dict[str, int]:
        """Bytes by axis; several axes that one group of ranks lies along are named together, as in "dp,shard"."""
        mesh = Mesh.parse(plan.case.mesh)
        workload = plan.workload(plan.implementation, plan.case, plan.device)
        sent: Counter[str] = Counter()

        def note(each: Communication, starting: bool) -> None:
            if starting and each.sent:
                sent[",".join(mesh.axes_of(each.group))] += each.sent

        workload.prepare()
        workload.step(lambda part: None)  # the first one may communicate more
        workload.prepare()
        with listening(note):
            workload.step(lambda part: None)
        return dict(sorted(sent.items()))

    def fill(self, row: Row, ranks: Sequence[Measured]) -> None:
        """The "bytes_sent_by_axis" of the row's counters, of the rank that sent most along each."""
        found: dict[str, int] = {}
        for rank in ranks:
            for axis, sent in rank.observed[type(self)].items():
                found[axis] = max(sent, found.get(axis, 0))
        row["counters"]["bytes_sent_by_axis"] = found
