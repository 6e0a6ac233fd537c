"""Read a run's file, plain or compressed (`.json.gz`); refuse any other file in one line."""

from __future__ import annotations

import errno
import gzip
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from shardmark.rows.atomic_json import Entry
from shardmark.rows.row import SCHEMA

T = TypeVar("T")

MIB = 2**20
LARGEST = 128 * MIB
"""Bytes of JSON in the largest file that is read: a run of 2,000 rows has 20 MiB."""
LONGEST = 2000
"""Characters of the longest name of a test."""
LISTS = ("benchmarks", "unmeasured")
"""A file's rows: those with times, and those without."""


def entries_of(run: Entry) -> list[Entry]:
    """The entries of all rows of a run's file; a run that ended before its last test may lack a list."""
    return [entry for each in LISTS for entry in run.get(each, ())]


class RunFileError(ValueError):
    """A file is no run of this suite; the message is one line."""


def read_run(path: Path) -> Entry:
    """The output of a run: its "machine_info", and in "benchmarks" and "unmeasured" the entries that have a row.

    Other projects' benchmarks are left out. Raises RunFileError for a file that is missing, is not whole JSON, or was
    written by another program or another version of this suite.
    """
    output = read_json(path, str(path))
    try:
        rows = {each: [entry for entry in output.get(each, []) if _is_ours(entry)] for each in LISTS}
    except (KeyError, TypeError, AttributeError):
        rows = {}
    if not any(rows.values()):
        raise RunFileError(f"{path} has no rows that a run of this suite wrote with --benchmark-json")
    if lacking := sorted({each for entries in rows.values() for entry in entries for each in _lacking(entry)}):
        raise RunFileError(f"{path} is of another version of this suite, its rows without {', '.join(lacking)}")
    longest = max(len(entry["fullname"]) for entries in rows.values() for entry in entries)
    if longest > LONGEST:
        raise RunFileError(f"{path} has a test whose name is {longest:,} characters long")
    if not isinstance(output.get("machine_info"), dict):
        raise RunFileError(f"{path} is of another version of this suite, without machine_info")
    return {**output, **rows}


def read_json(path: Path, shown: str) -> Any:
    """A file's JSON. Raises RunFileError, which calls the file `shown`, where there is none or it is not whole."""
    try:
        if path.exists() and not path.is_dir() and not path.is_file():
            raise OSError(errno.EINVAL, "not a regular file")
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            data = file.read(LARGEST + 1)  # a compressed file may be a thousand times as large as it seems
        if len(data) > LARGEST:
            raise ValueError(f"it has more than {LARGEST // MIB} MiB of JSON, and a run has a few")
        return json.loads(data)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RunFileError(f"{shown} is not whole, or not compressed: {error}") from None
    except OSError as error:
        raise RunFileError(f"{shown}: {error.strerror}") from None
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise RunFileError(f"{shown} is not whole JSON: {error}") from None
    except ValueError as error:  # no path, or a number of thousands of digits
        raise RunFileError(f"{shown}: {error}") from None


def _is_ours(entry: Entry) -> bool:
    return isinstance(entry["extra_info"], dict) and "family" in entry["extra_info"]


def of_this_version(make: Callable[..., T], name: str, *args: Any) -> T:
    """Call `make` to read from the run called `name`. Raises RunFileError, in one line, where the run lacks a field."""
    try:
        return make(*args)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise RunFileError(f"{name} is of another version of this suite ({type(error).__name__}: {error})") from error


def lacks_schema(row: Mapping[str, Any]) -> str | None:
    """The complaint about a row with the schema of another version; None for a row of this one."""
    theirs = row.get("schema")
    return None if theirs == SCHEMA else f"schema {SCHEMA} (it has {theirs})"


def _lacking(entry: Entry) -> Iterator[str]:
    """The required fields that an entry lacks, or has with another type."""
    row, stats = entry["extra_info"], entry.get("stats")
    if schema := lacks_schema(row):
        yield schema
    texts = {"name": entry.get("name"), "fullname": entry.get("fullname"), "implementation": row.get("implementation")}
    sections = {name: row.get(name) for name in ("case", "memory", "time", "work", "limit", "counters")}
    yield from (name for name, text in texts.items() if not isinstance(text, str))
    yield from (name for name, section in sections.items() if not isinstance(section, dict))
    if isinstance(sections["case"], dict) and not isinstance(sections["case"].get("id"), str):
        yield "case.id"
    if not isinstance(row.get("world_size"), int):
        yield "world_size"
    if stats is not None and not (isinstance(stats, dict) and {"median", "q1", "q3"} <= stats.keys()):
        yield "stats.median"
