"""python -m shardmark.predict mine.py:make --hardware a100-40gb,h100-80gb --ranks 8,64,512"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from shutil import get_terminal_size

from shardmark.api.finding import family_and_target
from shardmark.api.recipe import RECIPE, recipe_of
from shardmark.api.registry import FAMILIES, Implementation, resolve
from shardmark.meter.hardware import Hardware, hardware
from shardmark.predict.what_fits.advice import outcomes
from shardmark.predict.what_fits.prediction import ModelFacts, Strategy
from shardmark.predict.what_fits.processes import Predictions
from shardmark.predict.what_fits.table import WIDE, lines, saved
from shardmark.predict.worlds import MOST_RANKS, at_hand, ranks_of

COMMAND = "python -m shardmark.predict"
USAGE = 4
"""The exit status of a user's error, as pytest's."""


def main(arguments: Sequence[str]) -> int:
    """Print the tables; or say in one line what is wrong, with exit status 4."""
    given = _parser().parse_args(arguments)
    predictions = None
    try:
        devices, ranks, named = _devices(given.hardware), _ranks(given.ranks), _implementations(given.impl)
        recipe = recipe_of(*(getattr(given, name.replace("-", "_")) for name in RECIPE))
        if given.json is not None:
            given.json.touch()  # report a file that cannot be written before minutes of work
        predictions = Predictions(given.model, devices, recipe)
        strategies = _strategies(named, predictions.model, given.offload)
        found = outcomes(predictions, strategies, ranks, devices, given.own_batch, given.context)
        if given.json is not None:
            given.json.write_text(json.dumps(saved(predictions.model, found), indent=1) + "\n")
    except (ValueError, OSError, BrokenProcessPool) as error:
        print(f"{COMMAND}: {str(error).removeprefix('--model ')}", file=sys.stderr)
        return USAGE
    finally:
        if predictions is not None:
            predictions.close()
    width = get_terminal_size().columns if sys.stdout.isatty() else WIDE
    print("\n".join(lines(predictions.model, found, width)))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(COMMAND, description="What of your own model fits on which hardware.")
    parser.add_argument("model", metavar="FILE:ATTR", help="a function that returns (model, batch, loss)")
    parser.add_argument("--hardware", required=True, metavar="NAME,NAME", help="known devices, or TOML files of yours")
    parser.add_argument("--ranks", default="8", metavar="N,N", help="numbers of ranks: 8,64,512")
    parser.add_argument(
        "--impl",
        action="append",
        default=[],
        metavar="FAMILY=TARGET",
        help="one more strategy: a registered name, module:attribute or file.py:attribute; repeatable",
    )
    for name, (metavar, says) in RECIPE.items():
        parser.add_argument(f"--{name}", metavar=metavar, help=says)
    parser.add_argument("--offload", action="store_true", help="also with shards in the host's memory, where one can")
    parser.add_argument("--own-batch", action="store_true", help="predict your batch, and search for none")
    parser.add_argument("--context", action="store_true", help="find the longest context that fits, of each strategy")
    parser.add_argument("--json", type=Path, metavar="OUT.json", help="write all of it, in bytes")
    return parser


def _devices(value: str) -> list[Hardware]:
    devices = [at_hand(hardware(name)) for name in dict.fromkeys(value.split(","))]
    names = [each.name for each in devices]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"--hardware {value}: two of them are called {twice[0]}")
    for each in devices:
        if not (each.memory_bytes > 0 and math.isfinite(each.memory_bytes)):
            raise ValueError(f"--hardware {each.name}: how much memory it has is not known; describe it in a TOML file")
    return devices


def _ranks(value: str) -> list[int]:
    ranks = []
    for part in value.split(","):
        if (number := ranks_of(part)) is None:
            raise ValueError(f"--ranks takes numbers from 1 to {MOST_RANKS:,} such as 8,64, not {value!r}")
        ranks.append(number)
    return list(dict.fromkeys(ranks))


def _implementations(own: Sequence[str]) -> list[Implementation]:
    """Implementations of every table, one device first and then by ZeRO's stage; the user's `--impl` follow."""
    training = [family for family in FAMILIES.values() if family.workload is not None]
    training.sort(key=lambda family: (family.on_ranks, family.zero_stage, family.checkpoints))
    found = [each for family in training for each in family.implementations.values() if each.predicted]
    known = [family.name for family in training]
    for option in own:
        name, spec = family_and_target(option)
        if name not in known:
            raise ValueError(f"--impl {option}: {', '.join(known)} train a model of your own, not {name}")
        found.append(resolve(name, spec))
    return list(dict.fromkeys(found))


def _strategies(implementations: Sequence[Implementation], model: ModelFacts, offload: bool = False) -> list[Strategy]:
    """Each implementation as it is, with checkpointing where the model has blocks, with products in bfloat16 where they
    are in float32, with both, and each of these with shards in the host's memory where it has that option."""
    can_be = model.has_blocks and not model.case.checkpoints
    return [
        Strategy(each, checkpointed, bfloat16, offloaded)
        for each in implementations
        for bfloat16 in ((False, True) if model.case.compute_dtype == "float32" else (False,))
        for checkpointed in ((False, True) if can_be and not FAMILIES[each.family].checkpoints else (False,))
        for offloaded in ((False, True) if offload and each.accepts("cpu_offload") else (False,))
    ]
