"""Say how a rank ended, or where a silent rank is; end ranks and every process that they started."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from shardmark.ranks.rank import WORLD_VARIABLE
from shardmark.ranks.rank_stderr import RankStderr, reason_of_abort

HINTS = {
    "SIGSEGV": ": was a tensor read after its memory was freed?",
    "SIGKILL": ": did the machine run out of memory?",
}
"""Likely causes of signals."""

PYTHON = [sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")]
OWN = str(Path(__file__).parents[1])
OTHERS = (*PYTHON, *torch.__path__, OWN, "<")
"""Path prefixes of code that is not the user's."""


def end_of_process(process: Any) -> int:
    """A descriptor that becomes readable when the process ends. Its children do not hold it open, as they would a
    pipe."""
    try:
        return os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # no Linux of 2019 or later
        return os.dup(process.sentinel)


def _read(folder: Path, rank: int, kind: str) -> str:
    """Rank `rank`'s file of that kind in its world's private folder; "" where there is none."""
    file = folder / f"rank{rank}.{kind}"
    return file.read_text(errors="replace") if file.exists() else ""


def how_it_ended(process: Any, rank: int, folder: Path, stderr: RankStderr, grace: float) -> str:
    """How the process ended, with the stack that faulthandler wrote if a signal such as SIGSEGV ended it."""
    process.join(grace)
    code = process.exitcode
    names = {number.value: number.name for number in signal.Signals}
    if code is None:
        end = "closed its connection to the test"
    elif code < 0:
        name = names.get(-code, str(-code))
        why = reason_of_abort(stderr.unread(rank)) if name == "SIGABRT" else ""
        end = f"was killed by {name}{': ' * bool(why)}{why}{HINTS.get(name, '')}"
    else:
        why = _read(folder, rank, "end")
        end = f"exited with {code}" + (f": {why}" if why else "")
    stack = _read(folder, rank, "stacks")
    return f"{end}\n{stack}" if stack else end


def where_they_are(ranks: dict[int, Any], folder: Path, seconds: float, grace: float) -> dict[int, str]:
    """Where each silent rank is, likely causes first: stopped ranks, then those that wait for no other rank. The
    handler that writes the stacks is in C, so a rank stuck in C answers too."""
    stopped = [rank for rank, process in ranks.items() if _is_stopped(process.pid)]
    stacks = _ask_for_stacks({r: process for r, process in ranks.items() if r not in stopped}, folder, grace)
    found: dict[int, tuple[int, str]] = {}
    for rank in ranks:
        silent = f"had not answered after {seconds:.1f} s"
        stack = stacks.get(rank, "").strip("\n")
        if rank in stopped:
            found[rank] = (0, f"{silent}; a signal such as SIGSTOP has stopped it")
        elif not stack:
            found[rank] = (1, f"{silent}; it does not react to signals, so there is no stack")
        else:
            found[rank] = (2 if _waits_for_others(stack) else 1, f"{silent}; it was in {_place(stack)}\n{stack}")
    return {rank: text for rank, (_, text) in sorted(found.items(), key=lambda item: (item[1][0], item[0]))}


def _ask_for_stacks(ranks: dict[int, Any], folder: Path, grace: float) -> dict[int, str]:
    for process in ranks.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
    stacks: dict[int, str] = {}
    end = time.monotonic() + grace
    while ranks and time.monotonic() < end:
        time.sleep(0.05)
        before, stacks = stacks, {rank: _read(folder, rank, "stacks") for rank in ranks}
        if all(stacks.values()) and stacks == before:  # written, and to the end
            break
    # the frames below `perform` are the same for every rank and every call
    return {r: re.sub(r"(?<= in perform\n).*?(?=\n\n|\Z)", "", text, flags=re.DOTALL) for r, text in stacks.items()}


def _frames(stack: str) -> list[tuple[str, str, str]]:
    """File, line and function of each frame of the thread that runs the call, the innermost first."""
    threads = [re.findall(r'^  File "(.*)", line (\S+) in (.*)$', part, re.MULTILINE) for part in stack.split("\n\n")]
    called = [frames for frames in threads if frames and frames[-1][2] == "perform"]
    return (called or [frames for frames in threads if frames] or [[]])[0]


def _place(stack: str) -> str:
    """The innermost function, and the user's line that led there."""
    frames = [frame for frame in _frames(stack) if not frame[0].startswith(OWN)]
    if not frames:
        return "code without a Python stack"
    for i, (file, line, name) in enumerate(frames):
        if not file.startswith(OTHERS):
            inside = f"{frames[0][2]}, called in " if i else ""
            return f"{inside}{name} ({os.path.basename(file)}:{line})"
    return frames[0][2]


def _waits_for_others(stack: str) -> bool:
    inside = itertools.takewhile(lambda frame: frame[0].startswith(OTHERS), _frames(stack))
    return any("torch/distributed/" in file for file, _, _ in inside)


def _is_stopped(pid: int) -> bool:
    with contextlib.suppress(OSError, IndexError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "Tt"
    return False


def end_ranks(processes: Sequence[Any], folder: Path) -> None:
    """End every rank and the processes that it started, in its process group or, as daemons are, in another."""
    for process in processes:
        # A rank holds nothing that needs saving, and a hung one would ignore anything softer.
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()  # for a rank that does not lead its process group yet
    for process in processes:
        process.join()
        process.close()
    for pid in _started_by_ranks_of(folder) if processes else ():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _started_by_ranks_of(folder: Path) -> list[int]:
    """Processes that ranks started: programs have the folder in their environment, forks have a file in it open."""
    variable, inside = f"{WORLD_VARIABLE}={folder}\0".encode(), f"{folder}/"
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if process.stat().st_uid != os.getuid() or int(process.name) == os.getpid():
                continue
            if (process / "comm").read_text().startswith("torch_shm"):
                continue  # it ends once its ranks have, and removes their memory
            files = (os.readlink(file) for file in (process / "fd").iterdir())
            if variable in (process / "environ").read_bytes() or any(file.startswith(inside) for file in files):
                found.append(int(process.name))
    return found
