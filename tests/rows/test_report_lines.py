"""The lines that a row's kernels and bytes make under their table; attention's FLOPs in closed form."""

import re
from typing import Any

from impl.training_step.accounting import SOFTMAX_FLOPS, attention_flops
from impl.training_step.cases import TrainingStepCase
from shardmark.meter.kernels import ELSE, MATRIX_PRODUCT, Call, StepProfile
from shardmark.meter.memory import Memory, Workspace
from shardmark.meter.plan import Identity, Measured
from shardmark.report.questions import Questions
from shardmark.report.tables import render
from shardmark.rows.fill import memory_entry, new_row
from shardmark.rows.observers import Stages, Timeline
from shardmark.rows.observers.attention_parts import AttentionProfile
from shardmark.rows.observers.profile import WIDEST
from shardmark.verdict.budget import MemoryBudget


def _entry(kernels: dict[str, Any]) -> dict[str, Any]:
    return {"extra_info": {"case": {"id": "mini"}, "implementation": "transformer", "kernels": kernels}}


def test_lines_show_attentions_parts_against_its_products() -> None:
    case = TrainingStepCase("mini", batch=2, context=32)
    calls = [
        Call("x" * 100, "aten::mm", MATRIX_PRODUCT, "forward", None, 0.0, 0.003),
        Call("add", "aten::add", ELSE, "forward", None, 0.0, 0.001),
    ]
    profile = StepProfile({"forward": 1.0, "backward": 1.0}, calls)
    parts = {"scores": (0.003, 4e9), "softmax": (0.002, 1e9), "values": (0.001, 4e9)}
    attention = {name: {"seconds": seconds, "flops": flops} for name, (seconds, flops) in parts.items()}
    observer = AttentionProfile(attention_flops(case))
    lines = list(observer.lines([_entry({"phases": profile.as_row(), "attention": attention})]))
    cells = [line.split() for line in lines]
    assert ["forward", "75.0%", "1", "3.000", f"{'x' * (WIDEST - 3)}...", "matrix", "product"] in cells
    assert ["forward", "4.000", "75.0%", "0.0%", "0.0%", "25.0%"] in cells
    assert ["backward", "0.000", "-", "-", "-", "-"] in cells  # nothing ran there
    assert ["forward", "+", "backward", "4.000", "75.0%", "0.0%", "0.0%", "25.0%"] in cells
    assert ["softmax", "2.000", "1.000", "50.0%", "12.5%"] in cells
    assert ["both", "products", "4.000", "8.000", "100.0%", "100.0%"] in cells
    row_without: dict[str, Any] = {"extra_info": {}}
    assert not list(observer.lines([row_without]))


def test_columns_show_what_is_alone_and_what_is_hidden() -> None:
    case = TrainingStepCase("tiny", batch=2, context=32)
    row = new_row(Identity("data_parallel", "naive", case, "cpu", 2), "smoke", "1gbit")
    row["time"] = {"compute_alone": 0.25, "communication_alone": 0.05, "hidden": 0.625}
    [(title, lines)] = render(
        [{"group": "What hides?", "stats": None, "extra_info": row}], Questions(), every_column=True
    )
    assert title == "What hides? (two hosts, joined at 1gbit)"
    cells = dict(zip(*(re.split(r"  +", line.strip()) for line in (lines[0], lines[2])), strict=True))
    assert (cells["compute alone"], cells["comm. alone"], cells["hidden"]) == ("250.0", "50.000", "62%")


def test_columns_show_tensors_and_workspace_apart_and_the_peak_where_it_is_more() -> None:
    mib, case = 2**20, TrainingStepCase("tiny", batch=2, context=32)
    entries = []
    for workspace in (Workspace(3 * mib, "aten::mm"), Workspace()):
        memory = Memory(peak=5 * mib + workspace.nbytes, tensors=5 * mib, workspace=workspace)
        row = new_row(Identity("training_step", "eager", case, "cpu"), "smoke", None)
        row["memory"] = memory_entry([Measured("cpu", memory)], MemoryBudget(6 * mib, slack=1))
        entries.append({"group": "What does it hold?", "stats": None, "extra_info": row})
    [(_, lines)] = render(entries, Questions(), every_column=True)
    header, *rows = (re.split(r"  +", line.strip()) for line in (lines[0], *lines[2:]))
    columns = ["tensors MiB", "workspace MiB", "peak MiB", "budget MiB"]
    held = [[dict(zip(header, row, strict=True))[name] for name in columns] for row in rows]
    assert held == [["5.00", "3.00 mm", "8.00", "6.00"], ["5.00", "-", "5.00", "6.00"]]


def test_lines_show_bytes_by_kind_what_is_kept_and_the_largest_blocks() -> None:
    mib = 2**20
    memory = {
        "kinds": {"before_step": {"parameters": 3 * mib}, "peak": {"parameters": 3 * mib, "activations": 4 * mib}},
        "activations": [
            {"module": "blocks.*", "operator": "aten::add", "bytes": 3 * mib, "formula": 2 * mib},
            {"module": "", "operator": "", "bytes": mib, "formula": mib},
        ],
        "largest": [{"nbytes": mib // 2, "kind": "temporaries", "module": "norm", "operator": "aten::mul"}],
    }
    entry = {"extra_info": {"case": {"id": "mini"}, "implementation": "eager", "memory": memory}}
    cells = [line.split() for line in Timeline().lines([entry])]
    assert ["before", "step", "3.00", "0.00", "0.00", "0.00", "0.00", "0.00", "0.00", "3.00"] in cells
    assert ["peak", "3.00", "0.00", "0.00", "0.00", "4.00", "0.00", "0.00", "7.00"] in cells
    assert ["blocks.*", "aten::add", "3.00", "2.00"] in cells
    assert ["outside", "of", "modules", "-", "1.00", "1.00"] in cells
    assert ["total", "-", "4.00", "3.00"] in cells
    assert ["0.50", "temporaries", "norm", "aten::mul"] in cells
    memory["activations"][1]["formula"] = None
    assert ["total", "-", "4.00", "-"] in [line.split() for line in Timeline().lines([entry])]
    assert not list(Timeline().lines([{"extra_info": {"memory": {}}}]))


def test_stages_are_columns_in_the_order_of_the_longest_life() -> None:
    def entry(name: str, stages: dict[str, tuple[int, int | None]]) -> dict[str, Any]:
        figures = {at: {"live": live, "formula": 2**20, "reserved": kept} for at, (live, kept) in stages.items()}
        return {"extra_info": {"case": {"id": "mlp"}, "implementation": name, "memory": {"stages": figures}}}

    short = entry("short", {"model": (2**21, None), "step_1": (2**22, None)})
    long = entry("long", {"model": (2**20, 2**23), "repair": (2**19, 2**23), "step_1": (0, 2**23)})
    cells = [line.split() for line in Stages({}).lines([short, long, {"extra_info": {"memory": {}}}])]
    assert ["case", "implementation", "MiB", "model", "repair", "step", "1"] in cells
    assert ["mlp", "short", "live", "2.00", "-", "4.00"] in cells
    assert ["mlp", "long", "live", "1.00", "0.50", "0.00"] in cells
    assert ["mlp", "long", "reserved", "8.00", "8.00", "8.00"] in cells
    assert len(cells) == 3 + 2 + 5  # nothing is reserved for the short one
    assert not list(Stages({}).lines([{"extra_info": {"memory": {}}}]))


def test_attentions_flops_are_the_formulas() -> None:
    case = TrainingStepCase("mini", batch=3, context=5)
    scores = 4 * 3 * 4 * 5 * 5  # layers, batch, heads, queries, keys
    product = scores * 64 * 2  # head_dim; a multiplication and an addition
    assert attention_flops(case) == {"scores": product, "softmax": SOFTMAX_FLOPS * scores, "values": product}
