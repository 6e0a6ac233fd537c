"""Measure a machine: record a run in studies/records/<machine>.json.gz and write docs/results-<machine>.md from it.

    python -m studies.record -k goals                        # on a GPU: check its Triton kernels, measure the goals
    python -m studies.record                                 # on a GPU: measure all at paper scale, under an hour
    python -m studies.record --keep out.json two-cores-cpu   # record an existing run under that name

Every Triton kernel is checked at every configuration before anything is measured. Other arguments are pytest's and
choose what is measured. New rows replace older rows of the same tests. A record names no host. The record of
two-cores-cpu also fills README's findings.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path
from typing import Any

import torch

from shardmark.report.findings import findings
from shardmark.report.markdown import markdown
from shardmark.report.summary import Summary
from shardmark.rows.atomic_json import RowFileError
from shardmark.rows.reader import LISTS, RunFileError, read_run

ROOT = Path(__file__).parent.parent
RECORDS, DOCUMENTS = ROOT / "studies" / "records", ROOT / "docs"

MACHINE = (
    *("device", "gpus", "driver", "device_bytes", "cores", "threads", "scheduling", "torch"),
    *("triton", "libc"),
    *("python_version", "machine", "system", "attention_backend"),
)
"""Fields of `machine_info` that a record keeps, beside the name of the processor."""
ENTRY = ("group", "name", "fullname", "stats", "extra_info", "cells")
STATS = ("median", "q1", "q3", "mean", "stddev", "min", "max", "rounds", "ops")

KERNELS = "(triton or kernels) and not compiles"
"""pytest's `-k` for tests of Triton kernels, without those that compile for other chips."""


README_MACHINE = "two-cores-cpu"
README_BEGIN, README_END = "<!-- findings: studies/record.py writes them -->\n", "<!-- end of the findings -->\n"


def main(arguments: list[str]) -> int:
    """Check the kernels, measure, record. Returns the first exit status that is not 0."""
    if arguments[:1] == ["--keep"]:
        return _keep(arguments[1:])
    if not torch.cuda.is_available():
        print(
            "python -m studies.record measures a GPU, and there is none; --keep records an existing run",
            file=sys.stderr,
        )
        return 4
    checked = _pytest("correctness", "-m", "sweep or not sweep", "-k", KERNELS, "-q")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        measured = _pytest("perf", "--benchmark-json", str(out), *arguments)
        if out.exists():
            name = _slug(torch.cuda.get_device_name())
            older = read_run(record) if (record := _record(name)).exists() else {}
            write(name, merged(older, json.loads(out.read_text())))
    return checked or measured


def _keep(arguments: list[str]) -> int:
    """Record an existing run under a name; it replaces the older record."""
    if len(arguments) != 2:
        print("python -m studies.record --keep takes the file of a run and the machine's name", file=sys.stderr)
        return 4
    path, name = arguments
    try:
        write(_slug(name), read_run(Path(path)))
    except (RunFileError, RowFileError) as error:
        print(f"python -m studies.record: {error}", file=sys.stderr)
        return 4
    return 0


def write(name: str, output: dict[str, Any]) -> None:
    """Write the record and its document; of `README_MACHINE` README's findings too."""
    record, document = _record(name), DOCUMENTS / f"results-{name}.md"
    record.parent.mkdir(exist_ok=True)
    text = json.dumps(compacted(output), separators=(",", ":"))
    record.write_bytes(gzip.compress(text.encode(), mtime=0))  # the same rows are the same file
    run = read_run(record)
    document.write_text(markdown([(record.name, run)]), encoding="utf-8")
    if name == README_MACHINE:
        readme_file = ROOT / "README.md"
        readme_file.write_text(with_findings(readme_file.read_text(encoding="utf-8"), run), encoding="utf-8")
    print(f"recorded in {record.relative_to(ROOT)}, and written to {document.relative_to(ROOT)}")


def compacted(output: dict[str, Any]) -> dict[str, Any]:
    """The run without single rounds' times, the host's name and pytest-benchmark's options."""
    info = output["machine_info"]
    machine: dict[str, Any] = {name: info[name] for name in MACHINE if name in info}
    machine["cpu"] = {"brand_raw": (info.get("cpu") or {}).get("brand_raw")}
    kept = {name: output[name] for name in ("datetime", "questions", "outcomes") if name in output}
    return {"machine_info": machine, **kept, **{each: [_entry(entry) for entry in output[each]] for each in LISTS}}


def _entry(entry: dict[str, Any]) -> dict[str, Any]:
    stats = entry.get("stats")
    kept = {name: entry[name] for name in ENTRY if name in entry}
    return kept | {"stats": stats and {name: stats[name] for name in STATS if name in stats}}


def _record(name: str) -> Path:
    return RECORDS / f"{name}.json.gz"


def merged(older: dict[str, Any], newer: dict[str, Any]) -> dict[str, Any]:
    """The newer run, with the rows and questions that only the older run has.

    Where rows of both runs are merged, answers and outcomes are left out: they were about one run's rows.
    """
    result = dict(newer)
    fresh = {row["fullname"] for kind in LISTS for row in newer.get(kind, [])}
    kept = {kind: [row for row in older.get(kind, []) if row["fullname"] not in fresh] for kind in LISTS}
    for kind in LISTS:
        result[kind] = [*kept[kind], *newer.get(kind, [])]
    groups = {row.get("group") for kind in LISTS for row in kept[kind]}
    if groups:
        result.pop("outcomes", None)
    asked = [
        {**question, "answer": None, "lines": []} if question["text"] in groups else question
        for question in newer.get("questions", [])
    ]
    texts = {question["text"] for question in asked}
    return {**result, "questions": [*(q for q in older.get("questions", []) if q["text"] not in texts), *asked]}


def _pytest(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", "--device", "cuda", *arguments], cwd=ROOT).returncode


def _slug(name: str) -> str:
    """A machine's name as a file's name: "NVIDIA H200" becomes "nvidia-h200"."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def with_findings(text: str, run: dict[str, Any]) -> str:
    """README's text with the run's findings."""
    before, rest = text.split(README_BEGIN)
    found = [textwrap.fill(f"- {each.sentence}", 109, subsequent_indent="  ") for each in findings(Summary.of(run))]
    return before + README_BEGIN + "\n".join(found) + f"\n{README_END}" + rest.split(README_END)[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
