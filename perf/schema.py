"""Rows of this suite beside the schema of rows, which is to describe all that they have."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from jsonschema import Draft202012Validator

from shardmark.rows.row import Row, schema


def complaints(row: Row) -> Iterator[str]:
    """What of a row is not as the schema says, or is not described there, each in a line."""
    for error in _validator().iter_errors(row):
        yield f"{error.json_path}: {error.message}"


@cache
def _validator() -> Draft202012Validator:
    return Draft202012Validator(_closed(schema()))


def _closed(node: Any) -> Any:
    """The same schema without room for more properties, but where it says that there may be: in a case, and in work."""
    if isinstance(node, list):
        return [_closed(each) for each in node]
    if not isinstance(node, dict):
        return node
    closed = {key: _closed(each) for key, each in node.items()}
    if isinstance(node.get("properties"), dict) and "additionalProperties" not in node:
        closed["additionalProperties"] = False
    return closed
