"""The signatures of targets, and the check that one is called as its contract says."""

from __future__ import annotations

import ast
import inspect
import textwrap
from pathlib import Path
from typing import Any

from shardmark.api.finding import RegistryError
from shardmark.api.place import defined_at

_MADE: dict[Any, Any] = {}


def made_once(target: Any) -> Any:
    """The one object of a class in this process, made without arguments: all calls are of it, as its state may matter
    to those that follow."""
    if target not in _MADE:
        _MADE[target] = target()
    return _MADE[target]


def check_signature(target: Any, expected: str, *args: Any, **options: Any) -> None:
    """Raise RegistryError, with the expected signature beside the found one, unless it can be called so."""
    try:
        signature = inspect.signature(target)
    except ValueError:  # C code without a signature
        return
    try:
        signature.bind(*args, **options)
    except TypeError as error:
        lacking = [name for name in options if name not in signature.parameters]
        takes_any = any(p.kind is p.VAR_KEYWORD for p in signature.parameters.values())
        why = f"it lacks {', '.join(lacking)}" if lacking and not takes_any else str(error)
        at = defined_at(target)
        place = f" at {Path(at[0]).name}:{at[1]}" if at else ""
        raise RegistryError(f"expected {expected}, found {signature}{place}: {why}") from None


def parameters_of(target: Any) -> set[str]:
    """The names of a call's parameters. A class with `**options` takes its base classes' too, except those that it
    passes to them itself."""
    try:
        parameters = inspect.signature(target).parameters.values()
    except ValueError:  # a function written in C may have no signature
        return set()
    names = {p.name for p in parameters}
    if isinstance(target, type) and any(p.kind is p.VAR_KEYWORD for p in parameters):
        return names | (set().union(*map(parameters_of, target.__bases__)) - _given_to_its_base(target))
    return names


def _given_to_its_base(target: type) -> set[str]:
    """Names of the arguments that the class passes to another `__init__`; empty where its source is not found."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(vars(target).get("__init__", target))))
    except (OSError, TypeError, SyntaxError):
        return set()
    return {
        keyword.arg
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute) and call.func.attr == "__init__"
        for keyword in call.keywords
        if keyword.arg
    }
