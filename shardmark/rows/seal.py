"""A row that shows whether it has changed, or the files that it was measured with.

    written = sealed({"seconds": 3.8}, root, None, entry=[Path("entry.py")], suite=sources(root, "impl"))
    [*changes(written, root, None)]  # [] while nothing has changed

A digest has no secret: whoever changes a row can seal it again. With a key the seal is an HMAC (RFC 2104), which nobody
makes without that key.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

KEY = "SHARDMARK_SEAL_KEY"
"""The environment variable that commands take a key from."""
PLAIN, KEYED = "sha256", "hmac-sha256"


def sources(root: Path, *folders: str) -> list[Path]:
    """The files of code, and of figures that it reads, below these folders of `root`."""
    return sorted(path for folder in folders for end in ("py", "toml") for path in (root / folder).rglob(f"*.{end}"))


def digests(files: Iterable[Path], root: Path) -> dict[str, str]:
    """The SHA-256 of each file, by its path from `root`."""
    return {
        Path(os.path.relpath(path, root)).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files
    }


def sealed(row: dict[str, Any], root: Path, key: str | None, **files: Iterable[Path]) -> dict[str, Any]:
    """The row with the digests of these groups of files below `root`, and a seal over all of it. ValueError or
    TypeError for a row that JSON cannot hold."""
    written = {"row": row, "files": {group: digests(paths, root) for group, paths in files.items()}}
    return written | {"seal": {"by": KEYED if key else PLAIN, "digest": _digest(written, key)}}


def changes(written: Any, root: Path, key: str | None) -> Iterator[str]:
    """A line for each thing that has changed since `sealed` returned this."""
    try:
        row, files, seal = (written[name] for name in ("row", "files", "seal"))
        by, digest = seal["by"], str(seal["digest"]).encode()
        now = _digest({"row": row, "files": files}, key if by == KEYED else None).encode()
        then = [(group, str(path), found) for group, paths in files.items() for path, found in paths.items()]
    except (TypeError, KeyError, IndexError, AttributeError):
        yield "it has no seal"
        return
    except ValueError:  # JSON has no NaN
        yield "it does not have the bytes that were sealed"
        return
    if by == KEYED and not key:
        yield f"it is sealed with a key: set {KEY} to check it"
    elif by != KEYED and key:
        yield f"it is sealed without a key, and {KEY} is set"
    elif not hmac.compare_digest(digest, now):
        yield "it does not have the bytes that were sealed" + (", or was sealed with another key" if key else "")
    else:
        for group in dict.fromkeys(group for group, _, _ in then):
            changed = [path for of, path, found in then if of == group and _now(root / path) != found]
            if changed:
                others = f", and {len(changed) - 1} more" if len(changed) > 1 else ""
                yield f"the {group} has changed since: {changed[0]}{others}"


def _now(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else None


def _digest(value: dict[str, Any], key: str | None) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    return hmac.new(key.encode(), text, "sha256").hexdigest() if key else hashlib.sha256(text).hexdigest()
