"""The user's own line: where a target is defined, and where in the user's file an error came from."""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import sysconfig
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch

LIBRARIES = (sysconfig.get_paths()["stdlib"], *torch.__path__, "<")
"""Path prefixes of files that are no user's."""
INSTALLED = frozenset({"site-packages", "dist-packages"})
"""Folders of installed packages, those of another environment that this one sees among them."""
SUITE = ("shardmark", "impl", "correctness", "perf")
"""Packages whose files are the suite's."""


def defined_at(target: Any) -> tuple[str, int] | None:
    """File and first line of a function or class; None where they are not known, as for C code."""
    while isinstance(target, partial):
        target = target.func
    try:
        # A library's decorator, as torch.no_grad, is no place of the user's.
        target = inspect.unwrap(target, stop=lambda each: is_the_users(inspect.getsourcefile(each) or ""))
        own = target.__code__ if inspect.isfunction(target) else target  # of a function it would unwrap once more
        return inspect.getsourcefile(own) or "", inspect.getsourcelines(own)[1]
    except (OSError, TypeError, ValueError):
        return None


def line_in(error: BaseException, file: str) -> int | None:
    """The innermost line of that file in the error's traceback, or the line that does not parse; None without one."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return error.lineno
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file]
    return lines[-1] if lines else None


def shown(file: str, line: int) -> str:
    """As in "mine.py:7: scores = q @ k"."""
    text = linecache.getline(file, line).strip()
    return f"{Path(file).name}:{line}" + (f": {text}" if text else "")


def user_line(error: BaseException, test: str = "") -> str | None:
    """The innermost line of the user's code that led to the error, with its text; None without one. The `test` is a
    file that is not the user's."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    return next((shown(*each) for each in reversed(frames) if each[0] != test and is_the_users(each[0])), None)


def is_the_users(file: str) -> bool:
    """Whether the file belongs to no library, and not to the suite."""
    roots = [path for name in SUITE if name in sys.modules for path in getattr(sys.modules[name], "__path__", [])]
    is_installed = not INSTALLED.isdisjoint(Path(file).parts)
    return not (is_installed or file.startswith(LIBRARIES) or any(Path(file).is_relative_to(root) for root in roots))


def user_line_in_text(text: str, test: str) -> str | None:
    """The same, of a traceback or stack that another process wrote; the first one is of the rank that failed first."""
    report = text.partition("\nrank ")[0]
    found = re.findall(r'File "(.*)", line (\d+)', report)
    frames = [(file, int(line)) for file, line in found if file != test and is_the_users(file)]
    innermost = 0 if "it was in " in report else -1  # faulthandler's stacks begin with the innermost frame
    return shown(*frames[innermost]) if frames else None
