"""Private names of torch that implementations use: the installed torch must have each."""

import ast
from collections.abc import Iterator
from pkgutil import resolve_name

import pytest
import torch

from correctness.support.paths import ROOT

IMPL = ROOT / "impl"
ALIASES = {"torch": "torch", "dist": "torch.distributed", "dcp": "torch.distributed.checkpoint"}
"""The names under which files import torch and its packages."""
OF_OBJECTS = {
    "torch.Tensor._version": "impl/fsdp/simple.py",
    "torch.UntypedStorage._cdata": "impl/fsdp/simple.py",
    "torch.distributed._checkpointable._Checkpointable.__create_write_items__": "impl/fsdp/checkpoint_boxes.py",
    "torch.distributed._checkpointable._Checkpointable.__create_chunk_list__": "impl/fsdp/checkpoint_boxes.py",
}
"""Names that are read from an object, or defined for torch to find; with the file that does so."""


def private_names() -> dict[str, str]:
    """Each dotted name of torch with a private part, and the first file that uses it."""
    found: dict[str, str] = {}
    for path in sorted(IMPL.rglob("*.py")):
        for name in _names(ast.parse(path.read_text())):
            if any(part.startswith("_") and not part.startswith("__") for part in name.split(".")):
                found.setdefault(name, str(path.relative_to(IMPL.parent)))
    # A source that has a.b.c has a.b, too: keep the longest.
    return {name: file for name, file in found.items() if not any(other.startswith(f"{name}.") for other in found)}


def _names(tree: ast.AST) -> Iterator[str]:
    """The full names that the source reads or imports of torch."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Attribute):
            first, *rest = ast.unparse(node).split(".")
            if first in ALIASES and all(part.isidentifier() for part in rest):
                yield ".".join([ALIASES[first], *rest])


NAMES = private_names() | OF_OBJECTS


def test_the_files_were_read() -> None:
    assert NAMES["torch._C._current_graph_task_id"] == "impl/fsdp/backward.py"


@pytest.mark.parametrize("name", NAMES)
def test_what_torch_keeps_private_is_there(name: str) -> None:
    assert _is_there(name), f"torch {torch.__version__} has no {name}, which {NAMES[name]} uses"


def _is_there(name: str) -> bool:
    try:
        resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True
