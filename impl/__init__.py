"""The measured techniques: one folder per family, one file per technique, which registers itself.

Importing any part of `impl` imports every file of every folder that has a contract.py, so a new technique is one new
file and a new family one new folder. If Triton cannot be imported, files that import it are skipped.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path


def _import_families() -> None:
    from impl.interpreting import NO_TRITON

    for contract in sorted(Path(__file__).parent.glob("*/contract.py")):
        family = f"impl.{contract.parent.name}"
        import_module(family)  # imports the family's own techniques in the order of lists and tables
        for file in sorted(contract.parent.glob("[!_]*.py")):
            try:
                import_module(f"{family}.{file.stem}")
            except ImportError as error:
                if NO_TRITON is None or (error.name or "").partition(".")[0] != "triton":
                    raise


_import_families()
