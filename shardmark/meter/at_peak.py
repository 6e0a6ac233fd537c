"""A pass that finds what is live at a step's peak."""

from __future__ import annotations

from shardmark.meter.gloo_workers import workers_free_first
from shardmark.meter.measure_case import WARMUPS, warmed_up
from shardmark.meter.memory import release
from shardmark.meter.over_budget import STEP, Held, held_at_peak
from shardmark.meter.plan import Plan
from shardmark.meter.recording import mark, recording
from shardmark.meter.trace import modules_of


def blocks_at_peak(plan: Plan, warmups: int = WARMUPS) -> list[Held]:
    """This rank's tensors at the peak of the step after the warm-ups, largest first. Every rank must call it together.

    It makes a pass of its own, after a budget has failed: recording Python's frames is slow.
    """
    release(plan.device)
    with workers_free_first(plan.device), recording(plan.device, lines=True) as recorded:
        workload = warmed_up(plan, warmups)
        workload.prepare()
        modules = modules_of(workload).named_modules()
        recorded.modules = {id(module): name or type(module).__name__ for name, module in modules}
        mark(STEP)
        workload.step(lambda part: None)
    return held_at_peak(recorded.replay())
