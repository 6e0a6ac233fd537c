"""What fits on which hardware, without pytest: the suite's own `perf.what_fits`, of this checkout or installed.

python -m shardmark.predict mine.py:make --hardware h100-80gb --ranks 8,64,512
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path


def main() -> int:
    """What the command exits with; 4, pytest's usage error, where the suite is not installed."""
    installed = find_spec("shardmark_suite")
    folders = [Path(__file__).parents[1], *map(Path, (installed and installed.submodule_search_locations) or [])]
    suite = next((folder for folder in folders if (folder / "perf" / "what_fits").is_dir()), None)
    if suite is None:
        print("python -m shardmark.predict: the suite is not installed here", file=sys.stderr)
        return 4
    sys.path.insert(0, str(suite))
    status: int = import_module("perf.what_fits.command").main(sys.argv[1:])
    return status


if __name__ == "__main__":
    sys.exit(main())
