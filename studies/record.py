"""What a machine does, kept in studies/records/<machine>.json.gz and told in docs/results-<machine>.md.

    python studies/record.py -k goals                       # on a GPU: check its Triton kernels, then measure the goals
    python studies/record.py                                 # and all of it at paper scale: less than an hour
    python studies/record.py --keep out.json two-cores-cpu   # a run that there is, under that name

Every Triton kernel is checked at every configuration before anything is measured. Other arguments are pytest's and
choose what is measured; rows go each in the place of an older one of the same test. No host is named in a record.
"""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))  # where it is run as a file

from shardmark.report.markdown import markdown  # noqa: E402
from shardmark.rows.atomic_json import RowFileError  # noqa: E402
from shardmark.rows.reader import LISTS, RunFileError, read_run  # noqa: E402
from studies import readme  # noqa: E402

RECORDS, DOCUMENTS = ROOT / "studies" / "records", ROOT / "docs"

MACHINE = (
    *("device", "gpus", "driver", "device_bytes", "cores", "threads", "scheduling", "torch"),
    *("triton", "libc"),
    *("python_version", "machine", "system", "attention_backend"),
)
"""What a record says of its machine, beside the name of its processor."""
ENTRY = ("group", "name", "fullname", "stats", "extra_info", "cells")
STATS = ("mean", "stddev", "median", "min", "max", "rounds", "ops")

KERNELS = "(triton or kernels) and not compiles"
"""Tests of Triton kernels, by name, without those that compile for chips that are not here."""


def main(arguments: list[str]) -> int:
    """Check, measure, record; the first exit status that is not 0."""
    if arguments[:1] == ["--keep"]:
        return _keep(arguments[1:])
    if not torch.cuda.is_available():
        print("studies/record.py records what a GPU does, and there is none", file=sys.stderr)
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
    """Under that name, in the place of what was there."""
    if len(arguments) != 2:
        print("studies/record.py --keep takes the file of a run and the machine's name", file=sys.stderr)
        return 4
    path, name = arguments
    try:
        write(_slug(name), read_run(Path(path)))
    except (RunFileError, RowFileError) as error:
        print(f"studies/record.py: {error}", file=sys.stderr)
        return 4
    return 0


def write(name: str, output: dict[str, Any]) -> None:
    """The record and its document."""
    record, document = _record(name), DOCUMENTS / f"results-{name}.md"
    record.parent.mkdir(exist_ok=True)
    text = json.dumps(compacted(output), separators=(",", ":"))
    record.write_bytes(gzip.compress(text.encode(), mtime=0))  # the same rows are the same file
    run = read_run(record)
    document.write_text(markdown([(record.name, run)]), encoding="utf-8")
    if name == readme.MACHINE:
        readme_file = ROOT / "README.md"
        readme_file.write_text(readme.with_figures(readme_file.read_text(encoding="utf-8"), run), encoding="utf-8")
    print(f"recorded in {record.relative_to(ROOT)}, and told in {document.relative_to(ROOT)}")


def compacted(output: dict[str, Any]) -> dict[str, Any]:
    """A run without each round's time, the host's name, and what pytest-benchmark says of its options."""
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
    """Newer results, and of the older ones the rows of tests, and their questions, that are not among the newer.

    What either run said of all its rows is left out where it is not of all of these.
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
    """A file's name: "NVIDIA H200" is nvidia-h200."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
