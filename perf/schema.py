"""Checks that the schema describes every field of this suite's rows."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

from jsonschema import Draft202012Validator

from shardmark.rows.__main__ import fields_of
from shardmark.rows.row import Row
from shardmark.rows.schema import row_schema


def complaints(row: Row) -> Iterator[str]:
    """A line for each field that does not meet the schema or is not in it."""
    for error in _validator().iter_errors(row):
        yield f"{error.json_path}: {error.message}"


@cache
def _validator() -> Draft202012Validator:
    return Draft202012Validator(row_schema(fields_of([]), closed=True))
