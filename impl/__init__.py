"""What is measured: one folder a family, one file a technique, registered where it is defined.

Whoever imports any of it has all of it: every file of every folder that states a contract is imported here, so that a
new technique is one new file, and a new family one new folder.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path


def _import_families() -> None:
    from impl.interpreting import NO_TRITON

    for contract in sorted(Path(__file__).parent.glob("*/contract.py")):
        family = f"impl.{contract.parent.name}"
        import_module(family)  # which imports its own techniques in the order that lists and tables have
        for file in sorted(contract.parent.glob("*.py")):
            try:
                import_module(f"{family}.{file.stem}")
            except ImportError as error:
                if NO_TRITON is None or (error.name or "").partition(".")[0] != "triton":
                    raise


_import_families()
