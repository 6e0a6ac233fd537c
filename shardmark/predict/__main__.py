"""Print which strategies fit on which hardware, without pytest, by this checkout's techniques or the wheel's.

python -m shardmark.predict mine.py:make --hardware h100-80gb --ranks 8,64,512
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from shardmark.predict.what_fits import command


def main() -> int:
    """The command's exit status; 4, pytest's usage error, where the suite is not installed."""
    installed = find_spec("shardmark_suite")
    folders = [Path(__file__).parents[2], *map(Path, (installed and installed.submodule_search_locations) or [])]
    suite = next((folder for folder in folders if (folder / "impl" / "__init__.py").is_file()), None)
    if suite is None:
        print("python -m shardmark.predict: the suite is not installed here", file=sys.stderr)
        return 4
    sys.path.insert(0, str(suite))
    import_module("impl")  # registers the families and their workloads
    return command.main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
