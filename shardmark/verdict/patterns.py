"""Patterns of test ids, and the TOML files with a table for each: `--budgets`, `--accept`."""

from __future__ import annotations

import fnmatch
import tomllib
from pathlib import Path
from typing import Any


def matches(pattern: str, test_id: str) -> bool:
    """Whether the pattern matches that test: `*` and `?` are wildcards; brackets are literal, as in test ids."""
    return fnmatch.fnmatchcase(test_id, pattern.replace("[", "[[]"))  # in linear time, however many stars


def read_tables(path: Path, option: str, error: type[ValueError]) -> dict[str, Any]:
    """The file's top-level keys and their values. Raises `error`, in one line, on a file that is not there or is not
    TOML; `option` is the one that names the file."""
    try:
        if path.exists() and not path.is_dir() and not path.is_file():
            raise error(f"{option} {path}: not a regular file")
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as cause:
        raise error(f"{option} {path}: {cause.strerror}") from cause
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as cause:
        raise error(f"{option} {path} is not TOML: {cause}") from cause
    except error:
        raise
    except ValueError as cause:  # no path
        raise error(f"{option} {path}: {cause}") from cause
