"""Check that a target is called as its contract says."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from shardmark.api.finding import RegistryError
from shardmark.api.place import defined_at


def check_signature(target: Any, expected: str, *args: Any, **options: Any) -> None:
    """Raise RegistryError, with the expected signature beside the found one, unless it can be called so."""
    try:
        signature = inspect.signature(target)
    except ValueError:  # C code without a signature
        return
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        lacking = [name for name in options if name not in signature.parameters]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        why = f"it lacks {', '.join(lacking)}" if lacking and not takes_any else str(error)
        at = defined_at(target)
        place = f" at {Path(at[0]).name}:{at[1]}" if at else ""
        raise RegistryError(f"expected {expected}, found {signature}{place}: {why}") from None
