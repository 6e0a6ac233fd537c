"""Text in columns, and bytes and seconds as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def layout(rows: Sequence[Mapping[str, str | None]], left: Sequence[str] = ()) -> list[str]:
    """Lines of a table with the rows' keys as columns; columns in `left` are left-aligned, and None is a dash."""
    columns = []
    for name in rows[0]:
        texts = [name, *(printable(row[name] or "-") for row in rows)]
        width = max(map(len, texts))
        columns.append([text.ljust(width) if name in left else text.rjust(width) for text in texts])
    lines = ["  ".join(cells).rstrip() for cells in zip(*columns, strict=True)]
    return [lines[0], "-" * max(map(len, lines)), *lines[1:]]


def printable(text: str) -> str:
    """Escape control characters, which a terminal would obey: names come from users' files."""
    return "".join(each if each.isprintable() else ascii(each)[1:-1] for each in text)


def mib(nbytes: float) -> str:
    """Bytes in MiB."""
    return f"{nbytes / 2**20:,.2f}"


def ms(seconds: float) -> str:
    """Seconds in milliseconds."""
    return f"{seconds * 1e3:,.3f}" if seconds < 0.1 else f"{seconds * 1e3:,.1f}"


def number_of(count: int, what: str) -> str:
    """As in "1 core" or "2 cores"."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def cut(text: str, width: int) -> str:
    """The first `width` characters; a cut is marked by dots."""
    return text if len(text) <= width else f"{text[: width - 3]}..."
