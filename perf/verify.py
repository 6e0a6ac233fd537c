"""Verify a training step that somebody enters for a leaderboard: it is right, and the step that is timed is that step.

python -m perf.verify entry.py:make --mesh shard=2 --size 8b --hardware b200 --out row.json
python -m perf.verify --check row.json

Exit status 0: accepted, and the row is sealed. 1: refused, or the row or its files have changed. 4: a user's error.
See docs/verifier.md.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np
import pytest
import torch

import impl  # noqa: F401  (registers the families, which ranks import before they are told to train)
from impl.mesh.accounting import work_of
from impl.mesh.cases import SIZES
from perf.entry_numbers import Run, complaints, not_held
from perf.timed_entry import ROOT, EntryCase, Ranks, Training, told
from shardmark.api import Mesh, RegistryError
from shardmark.meter.hardware import Hardware, hardware
from shardmark.plugin.judge import EXIT_NOT_JUDGED
from shardmark.ranks.gpus import device_at_hand
from shardmark.ranks.rank import WorldError
from shardmark.ranks.world import RankError
from shardmark.rows.atomic_json import dumped
from shardmark.rows.machine import describe_machine
from shardmark.rows.seal import KEY, changes, digests, sealed, sources
from shardmark.text import printable

CASES = {
    "tiny": EntryCase("tiny", batch=4, context=64, dtype="float32", exact="float64"),
    "tiny-bfloat16": EntryCase("tiny", batch=4, context=64, dtype="bfloat16", exact="float64"),
    "8b": EntryCase("8b", batch=2, context=32_768, dtype="bfloat16", exact="float32", light=True),
}
PROTOCOL = "shardmark training step 1"
"""Changes with whatever changes a time or what is accepted."""
COMMAND = "python -m perf.verify"
ACCEPTED, REFUSED, USAGE = 0, 1, 4
SUITE = ("impl", "perf", "shardmark", "correctness")


@dataclass
class Timed(Run):
    """A run, with the seconds of each step and what else the ranks said."""

    seconds: list[float] = field(default_factory=list)
    left: float = 0.0
    """Seconds by which the first reading of the parameters after the last step took longer than the next two."""
    peaks: list[int] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    objections: list[str] = field(default_factory=list)
    """Objections that no number shows."""


@dataclass(frozen=True)
class Steps:
    """The batches of a run, and the seeds that its ranks are told when they need them. The last warm-up step has the
    batch of the first one again; all others have tokens of their own."""

    batches: list[torch.Tensor]
    warmups: int
    weights: int
    samples: int

    @classmethod
    def drawn(cls, case: EntryCase, warmups: int, timed: int, seed: int) -> Steps:
        # Sequences that do not follow from each other: ranks are told the seeds of weights and samples.
        weights, samples, tokens = np.random.SeedSequence(seed).spawn(3)
        random = np.random.default_rng(tokens)
        vocabulary, shape = SIZES[case.model].vocabulary, (case.batch, case.context + 1)
        batches = [torch.from_numpy(random.integers(vocabulary, size=shape)) for _ in range(warmups + timed)]
        batches[warmups - 1] = batches[0]
        return cls(batches, warmups, *(int(each.generate_state(1)[0]) for each in (weights, samples)))


def train(training: Training, steps: Steps, device: str, caches: str, minutes: float) -> Timed:
    """Train by the protocol; RankError where a rank fails or it takes longer."""
    run = Timed()
    with told(training, device, caches, 60 * minutes) as ranks:
        run.reads.append(_same(run, ranks.ask_all("read", steps.samples)))
        for step, tokens in enumerate(steps.batches):
            if step == steps.warmups:
                run.reads.append(_same(run, ranks.ask_all("read", steps.samples)))
                ranks.ask_all("begin")
            answers, seconds = ranks.ask("step", training.shares(tokens))
            run.seconds.append(seconds)
            run.losses.append(answers[0][0])
            run.norms.append(answers[0][1])
            if len({answer[:2] for answer in answers}) > 1:
                run.objections.append(f"step {step} gives its ranks different losses or norms")
            for at_work in filter(None, (answer[2] for answer in answers)):
                run.objections.append(f"step {step} has returned and left {at_work} at work, which no clock would see")
        run.peaks = ranks.ask_all("peak")
        _read_again(run, ranks, steps.samples)
        run.gradients = _same(run, ranks.ask_all("gradients", steps.samples))
        run.objections += [f"it replaces {name}" for names in ranks.ask_all("replaced") for name in names]
        run.files = sorted({file for files in ranks.ask_all("files") for file in files})
    return run


def _read_again(run: Timed, ranks: Ranks, seed: int) -> None:
    """Read the parameters, and what is left of the last step is done; read them again, when nothing can be left."""
    (answers, first), *again = (ranks.ask("read", [seed] * len(run.peaks)) for _ in range(3))
    run.reads.append(_same(run, answers))
    run.left = max(0.0, first - max(seconds for _, seconds in again))


def _same(run: Timed, answers: Sequence[dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """Samples of the first rank; it is an objection if another rank has others."""
    for name, own in answers[0].items():
        if not all(name in each and np.array_equal(own, each[name], equal_nan=True) for each in answers):
            run.objections.append(f"ranks have different {name}")
    return answers[0]


def row_of(
    case: EntryCase, run: Timed, plain: Timed, mesh: Mesh, peak: Hardware | None, warmups: int
) -> dict[str, Any]:
    """The figures of an entry: seconds, tokens/s, MFU of the stated peak, bytes."""
    timed = run.seconds[warmups:]
    tokens = case.batch * case.context
    seconds = (sum(timed) + run.left) / len(timed)
    flops = work_of(SIZES[case.model], tokens, case.context).flops
    rate = None if peak is None else peak.flops.get(case.dtype, peak.flops["float32"])
    return {
        "seconds": seconds,
        "steps": timed,
        "left_to_reading": run.left,
        "warmup_steps": run.seconds[:warmups],
        "tokens_per_second": tokens / seconds,
        "flops": flops,
        "peak_flops_of_a_device": rate,
        "mfu": None if rate is None else flops / seconds / mesh.size / rate,
        "peak_bytes": run.peaks,
        "reference_seconds": median(plain.seconds[warmups:]),
        "losses": run.losses,
        "norms": run.norms,
    }


def verify(given: argparse.Namespace) -> tuple[int, str]:
    """The exit status, and a paragraph. ValueError, in one line, for a user's error."""
    given.device = given.device or device_at_hand()
    case, mesh = CASES[given.size], Mesh.parse(given.mesh)
    file, _, attribute = given.entry.rpartition(":")
    path = Path(file).resolve()
    if not (attribute and path.is_file() and path.suffix == ".py"):
        raise ValueError(f"{given.entry}: an entry is FILE.py:ATTRIBUTE, and there is no such file")
    if min(given.warmups, given.steps) < 2:
        raise ValueError("--warmups and --steps are at least 2")
    peak = None if given.hardware is None else hardware(given.hardware)
    key = os.environ.pop(KEY, None)  # its ranks inherit the rest
    if given.out.exists() or not given.out.parent.is_dir():
        raise ValueError(f"--out {given.out}: there is such a file, or no such folder")
    if given.correctness:
        command = ["pytest", "correctness", "--impl", f"mesh={path}:{attribute}", "--mesh", given.mesh]
        if status := subprocess.run([sys.executable, "-m", *command, "--device", given.device], cwd=ROOT).returncode:
            judged = status in (pytest.ExitCode.TESTS_FAILED, EXIT_NOT_JUDGED)
            why = "is refused: at a small size it is not judged right, as the lines above say"
            return (
                status,
                f"{given.entry} {why if judged else f'is not verified: pytest correctness ended with {status}'}.",
            )
    seed = secrets.randbits(62) if given.seed is None else given.seed
    steps = Steps.drawn(case, given.warmups, given.steps, seed)
    entry = Training(case, steps.weights, case.dtype, given.mesh, f"{path}:{attribute}")
    suite = sources(ROOT, *SUITE)
    before = digests([path, *suite], Path.cwd())
    with tempfile.TemporaryDirectory() as caches:
        try:
            run = train(entry, steps, given.device, caches, given.minutes)
        except RankError as error:
            if isinstance(error.exception, RegistryError):
                raise ValueError(str(error.exception)) from None
            print(error, file=sys.stderr)
            why = f"it took over {given.minutes:g} minutes" if error.hung else "a rank failed, as said above"
            return REFUSED, f"{given.entry} is refused: {why}."
        try:
            plain, exact = (
                train(Training(case, steps.weights, dtype), steps, given.device, caches, given.patience)
                for dtype in (case.dtype, case.exact)
            )
        except RankError as error:
            print(error, file=sys.stderr)
            raise ValueError("the reference has failed, as said above: nothing is said of the entry") from None
    changed = [name for name, digest in digests([path, *suite], Path.cwd()).items() if before[name] != digest]
    run.objections += [f"{name} has changed since it began" for name in changed]
    wrong = [*run.objections, *complaints(run, plain, exact, case)]
    if wrong:
        others = f" There are {len(wrong) - 1} more such lines." if wrong[1:] else ""
        return REFUSED, f"{given.entry} is refused: {wrong[0]}.{others} Nothing is sealed."
    row = row_of(case, run, plain, mesh, peak, steps.warmups)
    loose = not_held(plain, exact, case)
    about = {
        "protocol": PROTOCOL,
        "entry": given.entry,
        "size": given.size,
        "case": asdict(case),
        "mesh": given.mesh,
        "seed": seed,
        "correctness": "right" if given.correctness else "not asked",
        "not_held": loose,
        "machine": describe_machine(given.device),
    }
    files = {path, *map(Path, run.files)}
    written = sealed(about | row, Path.cwd(), key, entry=sorted(files), suite=suite)
    given.out.write_text(dumped(written, indent=1) + "\n")
    return ACCEPTED, " ".join(_said(given, row, loose))


def _said(given: argparse.Namespace, row: dict[str, Any], loose: Sequence[str]) -> Iterator[str]:
    timed = [1e3 * each for each in row["steps"]]
    yield f"{given.entry} is accepted: {1e3 * row['seconds']:,.1f} ms a step of {given.size} on {given.mesh}"
    yield f"({len(timed)} steps of {min(timed):,.1f} to {max(timed):,.1f} ms; the reference on one rank takes"
    yield f"{1e3 * row['reference_seconds']:,.1f} ms), {row['tokens_per_second']:,.0f} tokens/s,"
    yield (
        "no MFU without --hardware," if row["mfu"] is None else f"{row['mfu']:.1%} of the peak that --hardware states,"
    )
    yield f"{max(row['peak_bytes']) / 2**20:,.0f} MiB at the peak."
    if row["left_to_reading"] > 0.1 * fmean(row["steps"]):
        yield f"{1e3 * row['left_to_reading']:,.1f} ms were left to the reading of its parameters, and are counted."
    yield "Losses, norms, gradients and changes of parameters are those of the reference."
    if loose:
        yield f"{len(loose)} tensors are not held, whose change plain {CASES[given.size].dtype} rounds away."
    yield f"Sealed in {given.out}."


def check(path: Path) -> tuple[int, str]:
    """Whether a row and its files are as they were sealed: exit status and paragraph."""
    try:
        written = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"--check {path}: {error}") from None
    found = [*changes(written, Path.cwd(), os.environ.get(KEY))]
    if found:
        return REFUSED, f"{path} is refused: {'; '.join(found)}."
    row = written["row"]
    return (
        ACCEPTED,
        f"{path} is as it was sealed: {row['entry']}, {1e3 * row['seconds']:,.1f} ms a step of {row['size']}.",
    )


def main(arguments: Sequence[str]) -> int:
    """Print a paragraph; return the exit status. A user's error is one line on stderr."""
    parser = argparse.ArgumentParser(COMMAND, description="Verify a training step that somebody enters.")
    parser.add_argument("entry", nargs="?", metavar="FILE.py:ATTRIBUTE", help="as for --impl mesh=")
    parser.add_argument("--check", type=Path, metavar="ROW.json", help="verify a sealed row and its files")
    parser.add_argument("--mesh", default="shard=2", help="the mesh of its ranks (default shard=2)")
    parser.add_argument("--size", choices=CASES, default="tiny")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU, if there is one")
    parser.add_argument("--hardware", metavar="NAME", help="the peak of which MFU is a part: docs/hardware.md")
    parser.add_argument("--warmups", type=int, default=3, help="steps before those that are timed (default 3)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps (default 5)")
    parser.add_argument("--seed", type=int, help="of weights and tokens (default: one that nobody knows)")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="that the entry has, from empty caches (default 10)"
    )
    parser.add_argument("--patience", type=float, default=120.0, help="minutes that a reference has (default 120)")
    parser.add_argument("--out", type=Path, default=Path("row.json"), help="where the row is sealed (default row.json)")
    parser.add_argument("--no-correctness", dest="correctness", action="store_false", help="do not run pytest first")
    given = parser.parse_args(arguments)
    try:
        if given.check is None and given.entry is None:
            raise ValueError("it takes an entry, FILE.py:ATTRIBUTE, or --check ROW.json")
        status, said = verify(given) if given.check is None else check(given.check)
    except (ValueError, OSError, WorldError) as error:
        print(f"{COMMAND}: {printable(str(error))}", file=sys.stderr)
        return USAGE
    print(textwrap.fill(printable(said), 100, break_long_words=False, break_on_hyphens=False))
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
