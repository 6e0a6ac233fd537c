"""The part of a row that a simulation fills: the predicted time of a step."""

from __future__ import annotations

from shardmark.api.registry import Implementation
from shardmark.predict.simulation.gathers import gathers
from shardmark.predict.simulation.schedule import Step
from shardmark.predict.simulation.within import Within
from shardmark.rows.fill import NO_RACE, without_communication
from shardmark.rows.row import Time


def predicted_time_entry(
    step: Step, peer: Implementation | None, peer_step: Step | None, within: Within | None
) -> Time:
    """The row's "time" of a simulation: the predicted step on the first rank, and the peer's. 9 of 10 real steps lie
    `within` these multiples of the prediction; None where these are not known."""
    entry: Time = {
        "parts": without_communication(step.parts),
        "median_by_rank": [step.seconds],
        "host": step.host,
        **NO_RACE,
        "machine": {},
        "predicted": {
            "interval": None
            if within is None
            else [max(factor * step.seconds, step.at_least) for factor in (within.low, within.high)],
            "sources": None if within is None else within.sources,
            "at_least": None if within is None else step.at_least,
            "streams": step.lanes(),
        },
    }
    if found := gathers(step):
        entry["gathers"] = found
    if step.copies or step.on_host:
        entry |= {"copies": step.copies, "on_host": step.on_host}
    if peer is not None and peer_step is not None:
        ratio = step.seconds / peer_step.seconds
        entry |= {"peer": peer.name, "peer_median": peer_step.seconds, "ratio": ratio}
        if peer.called:
            entry["peer_called"] = peer.called
    return entry
