"""Exit with one line where a user who is not root may not enter a folder that a run of the suite needs."""

import sys
from pathlib import Path

NEEDED = (Path(sys.executable), Path(sys.executable).resolve(), Path(__file__))
"""The environment's Python, the interpreter that it links to, and the checkout."""

for file in NEEDED:
    for folder in reversed(file.parents):
        if not folder.stat().st_mode & 0o001:
            sys.exit(
                f"not_root: a user who is not root may not enter {folder}, which {file} is in; "
                f"chmod o+x {folder}, or use a Python, a checkout and a --workdir elsewhere"
            )
