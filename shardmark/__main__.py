"""The command `shardmark`: its version, and the suite that is installed beside the plugin, without a checkout.

shardmark correctness --impl attention=mine.py:attention    # what follows the folder, or file, is pytest's
shardmark perf/test_attention.py --benchmark-json out.json
shardmark calibrate mine.toml
shardmark --version
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

USAGE = """\
usage: shardmark correctness [pytest's arguments]   every implementation against PyTorch
       shardmark perf [pytest's arguments]          every implementation timed, metered and held to its budgets
       shardmark calibrate OUT.toml [--help]        this machine's rates, for predictions
       shardmark --version
A folder or file of either may be named: shardmark correctness/attention, shardmark perf/test_fsdp.py"""

NEEDED = ("hypothesis", "jsonschema", "xdist")
"""Packages that the suite imports and the plugin does not."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Exit as pytest does; with 4, its usage error, for what is not there."""
    first, *rest = (sys.argv[1:] if arguments is None else arguments) or [""]
    if first == "--version":
        print(f"shardmark {version('shardmark')}")
        sys.exit()
    if first == "calibrate":
        from shardmark.calibrate import main as calibrate  # torch comes with it, which takes seconds

        sys.exit(calibrate(rest))
    if first in ("", "-h", "--help"):
        print(USAGE)
        sys.exit(0 if first else 4)
    suite = _suite()
    file = suite / first.partition("::")[0]
    if Path(first).parts[0] not in ("correctness", "perf") or not file.exists():
        _refuse(f"there is no {first} in the suite; it has the folders correctness and perf")
    # Its own pytest.ini, wherever one is; its cache where the user is, as the suite's own folder may not be writable.
    options = [
        "-c",
        str(suite / "pytest.ini"),
        "--rootdir",
        str(suite),
        "-o",
        f"cache_dir={Path.cwd() / '.pytest_cache'}",
    ]
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "pytest", *options, str(suite / first), *rest])


def _suite() -> Path:
    """The folder that a wheel installs the suite to."""
    spec = find_spec("shardmark_suite")
    folders = list(spec.submodule_search_locations or []) if spec is not None else []
    if not folders:
        _refuse("the suite is not installed here; in a checkout, run pytest correctness or pytest perf")
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        _refuse(f"the suite needs {', '.join(missing)}: pip install 'shardmark[suite]'")
    return Path(folders[0])


def _refuse(line: str) -> NoReturn:
    sys.stderr.write(f"shardmark: {line}\n")
    sys.exit(4)


if __name__ == "__main__":
    main()
