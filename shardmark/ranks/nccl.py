"""NCCL on the ranks of one machine: its interface, and its own words on what went wrong.

An error of NCCL that reaches Python is often "unhandled system error". NCCL's log says which.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

from shardmark.text import printable

if TYPE_CHECKING:
    from shardmark.ranks.failures import RankError

ROOM = 2**30
"""Bytes of /dev/shm that a container is advised to have (NCCL user guide, troubleshooting); Docker gives 64 MiB."""
MOST_LINES = 3
"""Warnings that an error shows."""
SHARED_MEMORY = Path("/dev/shm")


def prepare(directory: Path, rank: int) -> None:
    """Before NCCL starts: stay on the loopback interface, and log warnings to the world's private folder, each unless
    the user has chosen otherwise."""
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    if not {"NCCL_DEBUG", "NCCL_DEBUG_FILE"} & os.environ.keys():
        os.environ.update(NCCL_DEBUG="WARN", NCCL_DEBUG_FILE=str(directory / f"rank{rank}.nccl"))


def explanation(directory: Path, error: RankError) -> str:
    """Lines to add to an error of a world that NCCL may have caused, as a rank died or hung, or raised its error: its
    warnings, and the room in /dev/shm where it is short."""
    if error.exception is not None and "NCCL" not in str(error):
        return ""
    warnings = [f"NCCL warns on {where}: {text}" for text, where in _warnings(directory).items()]
    lines = warnings[:MOST_LINES]
    if len(warnings) > MOST_LINES:
        lines.append(f"NCCL warns {len(warnings) - MOST_LINES} times more")
    lines += filter(None, [_shortage()])
    return "\n".join(lines)


def _warnings(directory: Path) -> dict[str, str]:
    """Each warning once, with the first rank that gave it."""
    found: dict[str, str] = {}
    for file in sorted(directory.glob("rank*.nccl")):
        for text in re.findall(r"NCCL WARN (.+)", file.read_text(errors="replace")):
            found.setdefault(printable(text.strip()), file.stem.replace("rank", "rank "))
    return found


def _shortage() -> str | None:
    try:
        about = os.statvfs(SHARED_MEMORY)
    except OSError:
        return f"there is no {SHARED_MEMORY}, through which NCCL's ranks share memory"
    free = about.f_bavail * about.f_frsize
    if free >= ROOM:
        return None
    return (
        f"{SHARED_MEMORY} has {free / 2**20:,.0f} MiB free, and NCCL may need more: in Docker give the container "
        "--shm-size=1g or --ipc=host"
    )
