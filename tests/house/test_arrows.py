"""Which top folder, or room, may import which; imports for types and by `import_module` count too."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from correctness.support.paths import ROOT

PACKAGES = ("text", "api", "ranks", "verdict", "meter", "rows", "predict", "calibrate", "report", "plugin")
"""Packages of shardmark, lowest first: each imports only those before it."""

FORBIDDEN = {
    "shardmark": ("impl", "correctness", "perf", "tests", "studies"),
    "impl": ("correctness", "perf", "tests", "studies", "pytest", "time"),
    "correctness": ("perf", "tests", "studies"),
    "perf": ("correctness", "tests", "studies"),
    "studies": ("correctness", "tests"),
    "examples": ("correctness", "perf", "tests", "studies"),
}
"""By room: the modules that none of its files imports."""

COMMAND = ("shardmark/predict/__main__.py", "impl")
"""The one command of the tool that loads the suite's implementations."""

BY_NAME = ("import_module", "__import__", "find_spec", "resolve_name")
"""Functions that import, or find, a module by its name."""

NAMED_AT_RUN_TIME = {
    "shardmark/api/finding.py",  # a user's own module
    "shardmark/api/registry.py",  # the contract of a user's own family
    "shardmark/rows/__main__.py",  # the observers whose fields are in the schema
    "shardmark/__main__.py",  # whether what a command needs is installed
    "shardmark/report/output.py",  # as above
    "impl/__init__.py",  # the folders of families
}
"""Files of the tool and of implementations in which the name of an imported module is not written out."""


def imports_of(source: str) -> Iterator[str]:
    """The dotted names that a file imports anywhere in it: `from a import b` is a.b, `import_module("a")` is a."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.ImportFrom(module=str(module), names=names, level=0):
                yield from (f"{module}.{each.name}" for each in names)
            case ast.Import(names=names):
                yield from (each.name for each in names)
            case ast.Call() if (name := _named(node)) is not None:
                match name:
                    case ast.Constant(value=str(text)):
                        yield text


def _named(call: ast.Call) -> ast.expr | None:
    """The expression that names a module, if the call imports one by its name."""
    called = getattr(call.func, "id", getattr(call.func, "attr", None))
    by_keyword = [each.value for each in call.keywords if each.arg == "name"]
    return next(iter([*call.args, *by_keyword]), None) if called in BY_NAME else None


def named_at_run_time(source: str) -> bool:
    """Whether a file imports a module whose name it does not write out."""
    calls = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    names = [name for call in calls if (name := _named(call)) is not None]
    return not all(isinstance(name, ast.Constant) for name in names)


@cache
def arrows(room: str) -> list[tuple[str, str]]:
    """Each file of a folder at the top with each dotted name that it imports."""
    return [
        (str(path.relative_to(ROOT)), name)
        for path in sorted((ROOT / room).rglob("*.py"))
        for name in imports_of(path.read_text())
    ]


def upward(file: str, name: str) -> bool:
    """Whether a file of shardmark imports a package that comes after its own."""
    own, other = Path(file).parts[1].removesuffix(".py"), [*name.split("."), ""][1]
    if not name.startswith("shardmark.") or own not in PACKAGES or other not in PACKAGES:
        return False
    return PACKAGES.index(other) > PACKAGES.index(own)


def test_no_arrow_of_the_tool_points_upward() -> None:
    assert [arrow for arrow in arrows("shardmark") if upward(*arrow)] == []


def test_every_package_of_the_tool_has_its_place() -> None:
    found = {path.name.removesuffix(".py") for path in (ROOT / "shardmark").iterdir() if path.name[0] not in "_."}
    assert found - {"py.typed"} == set(PACKAGES)


@pytest.mark.parametrize("room", FORBIDDEN)
def test_a_room_imports_nothing_that_it_must_not_know(room: str) -> None:
    found = [arrow for arrow in arrows(room) if arrow[1].partition(".")[0] in FORBIDDEN[room] and arrow != COMMAND]
    assert arrows(room) and found == []


def test_techniques_import_of_the_tool_its_api_alone() -> None:
    of_the_tool = [(file, name) for file, name in arrows("impl") if name.partition(".")[0] == "shardmark"]
    assert of_the_tool and [arrow for arrow in of_the_tool if arrow[1].rpartition(".")[0] != "shardmark.api"] == []


def test_few_files_import_a_module_that_they_do_not_name() -> None:
    files = [path for room in ("shardmark", "impl") for path in (ROOT / room).rglob("*.py")]
    found = {str(path.relative_to(ROOT)) for path in files if named_at_run_time(path.read_text())}
    assert found == NAMED_AT_RUN_TIME


@pytest.mark.parametrize("name", ["name", "f'shardmark.{name}'", "name=name"])
def test_a_module_that_is_not_named_is_seen(name: str) -> None:
    assert named_at_run_time(f"import_module({name})") and not named_at_run_time("import_module('shardmark.api')")


def test_nothing_is_imported_out_of_files_of_tests() -> None:
    rooms = (*FORBIDDEN, "tests")
    assert [(file, name) for room in rooms for file, name in arrows(room) if ".test_" in name] == []


@pytest.mark.parametrize(
    "source",
    [
        "from shardmark.report.page import page",
        "from shardmark import report",
        "def late():\n    import shardmark.report",
        "if TYPE_CHECKING:\n    from shardmark.report.page import Page",
        "import_module('shardmark.report')",
        "importlib.import_module('shardmark.report')",
        "import_module(name='shardmark.report')",
        "pkgutil.resolve_name('shardmark.report')",
    ],
)
def test_an_arrow_upward_is_seen_however_it_is_drawn(source: str) -> None:
    assert any(upward("shardmark/rows/row.py", name) for name in imports_of(source))
    assert not any(upward("shardmark/report/screen.py", name) for name in imports_of(source))
