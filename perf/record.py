"""What this machine's GPU does: every Triton kernel checked at every configuration, then the suite at paper scale.

    python perf/record.py -k goals          # the goals, some minutes
    python perf/record.py -k throughput     # attention's TFLOP/s against every peer
    python perf/record.py -k test_loss      # one file
    python perf/record.py                   # all of it, less than an hour; with --scale full, hours

Arguments are pytest's and choose what is measured. The rows go to perf/records/<gpu>.json, each in the place of an
older one of the same test.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parent.parent

KERNELS = "(triton or kernels) and not compiles"
"""Tests of Triton kernels, by name, without those that compile for chips that are not here."""


def main(arguments: list[str]) -> int:
    """Check, measure, record; the first exit status that is not 0."""
    if not torch.cuda.is_available():
        print("perf/record.py records what a GPU does, and there is none", file=sys.stderr)
        return 4
    checked = _pytest("correctness", "-m", "sweep or not sweep", "-k", KERNELS, "-q")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        measured = _pytest("perf", "--benchmark-json", str(out), *arguments)
        if out.exists():
            record = ROOT / "perf" / "records" / f"{_slug(torch.cuda.get_device_name())}.json"
            record.parent.mkdir(exist_ok=True)
            older = json.loads(record.read_text()) if record.exists() else {}
            record.write_text(json.dumps(merged(older, json.loads(out.read_text())), indent=1))
            print(f"recorded in {record.relative_to(ROOT)}")
    return checked or measured


def merged(older: dict[str, Any], newer: dict[str, Any]) -> dict[str, Any]:
    """Newer results, and of the older ones the rows of tests, and their questions, that are not among the newer."""
    result = dict(newer)
    fresh = {row["fullname"] for kind in ("benchmarks", "unmeasured") for row in newer.get(kind, [])}
    for kind in ("benchmarks", "unmeasured"):
        kept = [row for row in older.get(kind, []) if row["fullname"] not in fresh]
        result[kind] = [*kept, *newer.get(kind, [])]
    asked = {question["text"] for question in newer.get("questions", [])}
    kept = [question for question in older.get("questions", []) if question["text"] not in asked]
    return {**result, "questions": [*kept, *newer.get("questions", [])]}


def _pytest(*arguments: str) -> int:
    return subprocess.run([sys.executable, "-m", "pytest", "--device", "cuda", *arguments], cwd=ROOT).returncode


def _slug(name: str) -> str:
    """A file's name: "NVIDIA H200" is nvidia-h200."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
