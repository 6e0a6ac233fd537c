"""Observers: further figures of a case, beside its step time and peak memory. A test asks for them with `observe`.

    measure(Step, implementation, case, work=work, observe=[Timeline(activations=formulas), Compile()])

An observer owns its passes on each rank, its part of the row, the columns that show it, and its lines under the
question's table. A question's own observer is a subclass of `Observer`.
"""

from shardmark.rows.columns import Entry
from shardmark.rows.observers.communication import ExposedCommunication, HiddenCommunication
from shardmark.rows.observers.compile import Compile
from shardmark.rows.observers.gathers import Gathers
from shardmark.rows.observers.goals import Goals
from shardmark.rows.observers.losses import Losses
from shardmark.rows.observers.observer import Observer
from shardmark.rows.observers.profile import Profile
from shardmark.rows.observers.sent_by_axis import SentByAxis
from shardmark.rows.observers.spans import Spans
from shardmark.rows.observers.where_memory_goes import PeakByLength, Stages, Timeline, timeline_pass

__all__ = [
    "Compile",
    "Entry",
    "ExposedCommunication",
    "Gathers",
    "Goals",
    "HiddenCommunication",
    "Losses",
    "Observer",
    "PeakByLength",
    "Profile",
    "SentByAxis",
    "Spans",
    "Stages",
    "Timeline",
    "timeline_pass",
]

WITH_COLUMNS: tuple[type[Observer], ...] = (HiddenCommunication, Gathers, SentByAxis, Compile, Losses, Timeline)
"""Observers whose columns any question may name, in the order of their columns."""
