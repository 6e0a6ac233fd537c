"""Measure this machine's rates, and write them as hardware for predictions.

python -m shardmark.calibrate mine.toml                  # its GPU if it has one, else its CPU
python -m shardmark.calibrate mine.toml --ranks 2        # collectives too, and what ranks leave each other
python -m shardmark.calibrate mine.toml --from out.json  # what a saved run shows, without measuring
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from shardmark.meter.hardware import DTYPES, hardware
from shardmark.ranks.gpus import device_at_hand, why_unusable
from shardmark.ranks.rank import WorldError
from shardmark.rows.atomic_json import RowFileError

COMMAND = "python -m shardmark.calibrate"
USAGE = 4
"""Exit status of a user's error, the same as pytest's."""
TIMED = ("float16", "bfloat16", "float32")
MOST_MINUTES = 60


def main(arguments: Sequence[str]) -> int:
    """Write the file, and say how well it was measured. A user's error is one line on stderr and exit status 4."""
    given = _parser().parse_args(arguments)
    try:
        _check(given)
        # Imported here because all of PyTorch's FSDP comes with it, which takes a second.
        from shardmark.predict.calibration.measuring import calibrate
        from shardmark.predict.calibration.rows import calibration_of_run
        from shardmark.predict.calibration.toml import toml

        if given.run is not None:
            found, source = calibration_of_run(given.run), f"--from {given.run.name}"
        else:
            found = calibrate(given.device, given.ranks, given.minutes, given.dtypes)
            source = f"--device {given.device} --ranks {given.ranks} --minutes {given.minutes:g}"
        said = list(found.lines())
        made = [f"Written by `{COMMAND} {source}` with torch {torch.__version__}: {found.hardware.name}", *said]
        given.output.write_text(toml(found.hardware, made), encoding="utf-8")
        hardware(str(given.output))
    except (ValueError, OSError, WorldError, RowFileError) as error:
        print(f"{COMMAND}: {error}", file=sys.stderr)
        return USAGE
    print("\n".join([f"{given.output}: {found.summary()}", *said]))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(COMMAND, description="Measure this machine's rates, for predictions.")
    parser.add_argument("output", type=Path, metavar="OUT.toml", help="the file that --hardware and --simulate take")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="what to measure (default: a GPU, if there is one)")
    parser.add_argument("--ranks", type=int, default=1, help="ranks that compute at once, and send (default 1)")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long it may take, about (default 5)")
    parser.add_argument(
        "--dtypes",
        type=lambda text: tuple(text.split(",")),
        default=("bfloat16", "float32"),
        metavar="NAME,NAME",
        help=f"dtypes to measure, of {', '.join(TIMED)} (default bfloat16,float32)",
    )
    parser.add_argument("--from", dest="run", type=Path, metavar="OUT.json", help="a run that --benchmark-json wrote")
    return parser


def _check(given: argparse.Namespace) -> None:
    """ValueError, in one line, for a value that cannot be measured with."""
    if given.output.suffix != ".toml":
        raise ValueError(f"{given.output}: the name of the file to write ends with .toml")
    if given.ranks < 1:
        raise ValueError(f"--ranks {given.ranks}: at least one rank measures")
    if not 0 < given.minutes <= MOST_MINUTES:
        raise ValueError(f"--minutes {given.minutes:g}: it takes more than none, and at most {MOST_MINUTES}")
    if unknown := [dtype for dtype in given.dtypes if dtype not in TIMED]:
        raise ValueError(f"--dtypes {','.join(given.dtypes)}: {unknown[0]} is none of {', '.join(TIMED)}")
    if "float32" not in given.dtypes:
        raise ValueError(f"--dtypes {','.join(given.dtypes)}: float32 is needed, as the one dtype of every device")
    if given.run is None:
        given.device = given.device or device_at_hand()
        if given.device == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"--device cuda: {why_unusable()}")
    given.output.touch()  # a file that cannot be written is known before minutes of work
    assert set(TIMED) <= set(DTYPES)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
