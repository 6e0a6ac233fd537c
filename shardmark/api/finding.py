"""Find the attribute of a module or of a file that a user names, also in a process that runs another checkout."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import zlib
from pathlib import Path
from typing import Any

from shardmark.api.place import line_in, shown


class RegistryError(ValueError):
    """A family, an implementation or a target is missing or does not fit; one line."""


def moved(path: str) -> str:
    """The path itself; on ranks of another version, the same file's path there (`shardmark.ranks.checkout`)."""
    return path


def family_and_target(option: str) -> tuple[str, str]:
    """Split a value of `--impl` at "="; ValueError, in one line, for another value."""
    family, _, target = option.partition("=")
    if not (family and target):
        raise ValueError(f"--impl takes FAMILY=TARGET, not {option!r}")
    return family, target


def find(label: str, source: str, attribute: str) -> tuple[Any, str]:
    """An attribute of a module or a .py file, and the `source:attribute` that finds it again in another process.

    Raises RegistryError, in one line that begins with the label, where it cannot be imported or has no such attribute.
    """
    if source.endswith(".py"):
        source = moved(str(Path(source).absolute()))
    module = _import(label, source)
    try:
        return getattr(module, attribute), f"{source}:{attribute}"
    except AttributeError:
        raise RegistryError(f"{label}: {source} has no {attribute!r}") from None


def _import(label: str, source: str) -> Any:
    """Import a module by name or by absolute file path."""
    try:
        if not source.endswith(".py"):
            return importlib.import_module(source)
        # Files of one name in two folders are two modules.
        name = f"shardmark_user_{Path(source).stem}_{zlib.crc32(source.encode()):08x}"
        if name in sys.modules and getattr(sys.modules[name], "__file__", None) == source:
            return sys.modules[name]
        module_spec = importlib.util.spec_from_file_location(name, source)
        assert module_spec is not None and module_spec.loader is not None  # a .py path always has a loader
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[name] = module
        folder = str(Path(source).parent)
        if folder not in sys.path:  # so that the file finds its neighbours
            sys.path.append(folder)
        try:
            module_spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a user's module may fail to import in any way
        line = line_in(error, source)
        at = f", which fails at {shown(source, line)}" if line else ""
        raise RegistryError(
            f"{label}: cannot import {source}: {type(error).__name__}: {first_line(error)}{at}"
        ) from error


def first_line(error: BaseException) -> str:
    """The first line of the error's message; empty where it has none."""
    return next(iter(str(error).strip().splitlines()), "")
