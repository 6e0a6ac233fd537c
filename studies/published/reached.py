"""Write fitted keys of `reached` into `hardware.toml`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping

from shardmark.meter.hardware import TABLE


def write_reached(name: str, found: Mapping[str, float | Mapping[str, float]]) -> None:
    """Set these keys of the device's `reached`; others stay as they are."""
    head, table, rest = TABLE.read_text(encoding="utf-8").partition(f"[{name}]\n")
    own, *others = re.split(r"(?m)^(?=\[)", rest, maxsplit=1)
    line = re.search(r"(?m)^reached = .*$", own)
    assert line is not None, f"{name} has no line `reached`"
    known = tomllib.loads(line[0])["reached"]
    products = known.pop("products", {}) | found.get("products", {})  # type: ignore[operator]
    merged = known | {key: value for key, value in found.items() if key != "products"}
    new = f"reached = {{ products = {{ {toml(products)} }}, {toml(merged)} }}"
    TABLE.write_text(head + table + "".join([own.replace(line[0], new), *others]), encoding="utf-8")


def toml(values: Mapping[str, float]) -> str:
    """The values as keys of an inline table."""
    return ", ".join(f"{name} = {value:.3g}" for name, value in values.items())
