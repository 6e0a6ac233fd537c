"""Questions and the tests' own hooks ask a registration for facts, never an implementation for its name."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from correctness.support.paths import ROOT

FILES = [path for folder in ("perf", "correctness/support") for path in sorted((ROOT / folder).rglob("*.py"))]
ASKING = {
    "endswith",
    "startswith",
    "removeprefix",
    "removesuffix",
    "partition",
    "split",
    "get",
    "count",
    "find",
    "index",
}
"""Methods that look into a name, or something up by it."""


def asked(source: str) -> Iterator[int]:
    """Lines that compare, match, take apart or look something up by the name of an implementation."""
    tree = ast.parse(source)
    nodes = list(ast.walk(tree))
    theirs = {"implementation", "peer"}
    theirs |= {
        node.arg
        for node in nodes
        if isinstance(node, ast.arg) and node.annotation and "Implementation" in ast.unparse(node.annotation)
    }
    names: set[str] = set()  # variables that hold such a name

    def is_implementation(node: ast.AST) -> bool:
        return getattr(node, "id", getattr(node, "attr", None)) in theirs

    def is_name(node: ast.AST) -> bool:
        match node:
            case ast.Name(id=identifier):
                return identifier in names
            case ast.Attribute(attr="name", value=value):
                return is_implementation(value)
            case ast.Call(func=ast.Name(id="str" | "repr"), args=[first]):
                return is_implementation(first)
            case ast.Call(func=ast.Name(id="getattr"), args=[first, ast.Constant(value="name"), *_]):
                return is_implementation(first)
            case ast.FormattedValue(value=value):
                return is_implementation(value) or is_name(value)
            case ast.JoinedStr(values=values):
                return any(map(is_name, values))
            case ast.Subscript(slice=ast.Constant(value="implementation")):  # of a row
                return True
        return False

    for node in nodes:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                pairs = [(target, node.value)]
                if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                    pairs = list(zip(target.elts, node.value.elts, strict=True))
                names |= {to.id for to, value in pairs if isinstance(to, ast.Name) and is_name(value)}
        elif isinstance(node, ast.NamedExpr) and is_name(node.value):
            names.add(node.target.id)
    for node in nodes:
        match node:
            case ast.Compare(left=left, comparators=others) if any(map(is_name, (left, *others))):
                yield node.lineno
            case ast.Match(subject=subject) if is_name(subject):
                yield node.lineno
            case ast.Call(func=ast.Attribute(value=value, attr=attribute), args=args) if attribute in ASKING:
                if is_name(value) or (attribute == "get" and any(map(is_name, args))):
                    yield node.lineno
            case ast.Subscript(value=ast.Name(id=table), slice=index) if table.isupper() and is_name(index):
                yield node.lineno


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_question_asks_an_implementation_for_its_name(path: Path) -> None:
    """State the fact where the technique is registered: `facts`, `races`, `slack` or `tested_briefly` of `register`."""
    assert [f"{path.relative_to(ROOT)}:{line}" for line in asked(path.read_text(encoding="utf-8"))] == []


@pytest.mark.parametrize(
    "line",
    [
        'implementation.name == "ddp"',
        '"ddp" != plan.implementation.name',
        'implementation.name in ("naive", "flat")',
        'implementation.name.endswith("kept")',
        'str(implementation).startswith("fsdp")',
        'f"{implementation}" == "ddp"',
        'getattr(implementation, "name", None) in SIMPLER',
        'ours.name == "ddp"',
        "SLACK.get(implementation.name, 1.05)",
        "WRAPPERS[implementation.name]",
        'name, case = implementation.name, 1; name == "simple"',
        '(name := implementation.name) and name in ("simple",)',
        'row["implementation"] == "naive"',
        "match implementation.name:\n        case 'ddp': pass",
    ],
)
def test_it_is_seen_when_one_does(line: str) -> None:
    assert list(asked(f"def test(ours: Implementation):\n    {line}"))
