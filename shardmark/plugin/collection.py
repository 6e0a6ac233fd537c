"""The plugin's hooks of collection: parametrization, selection, and the count of verdicts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from shardmark.api import registry
from shardmark.api.finding import RegistryError
from shardmark.api.registry import Implementation
from shardmark.meter.clock import DeviceClock
from shardmark.plugin.session import SESSION, Session, implementation_of, measures


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Parametrize `implementation`, `case`, `mesh` and `world` from markers and options."""
    session = metafunc.config.stash[SESSION]
    family, grid = (metafunc.definition.get_closest_marker(name) for name in ("family", "cases"))
    if "implementation" in metafunc.fixturenames and family is not None:
        option, only = family.kwargs.get("option"), family.kwargs.get("only")
        chosen = family.args[0] in session.selected
        if chosen and only and registry.family(family.args[0]).reference in only:
            only = None  # a user's own runs wherever the reference does
        try:
            entries = session.implementations(family.args[0])
            if "measure" in metafunc.fixturenames:
                entries = sorted(entries, key=_races_to_go)  # peers first: see `shardmark.rows.case_times`
        except RegistryError as error:
            raise pytest.Collector.CollectError(f"{metafunc.definition.nodeid}: {error}") from None
        lacks_option = pytest.mark.skip(reason=f"its signature has no option {option!r}")
        parameters = []
        for entry in entries:
            lacks = option is not None and not entry.accepts(option)
            if (only is None or entry.name in only) and (chosen or not lacks):
                parameters.append(pytest.param(entry, id=entry.name, marks=[lacks_option] if lacks else []))
        metafunc.parametrize("implementation", parameters)
    if "case" in metafunc.fixturenames and grid is not None:
        metafunc.parametrize("case", session.cases(grid.args[0]), ids=str)
    meshes = metafunc.definition.get_closest_marker("meshes")
    if "mesh" in metafunc.fixturenames and meshes is not None:
        metafunc.parametrize("mesh", session.meshes_of(meshes.args, meshes.kwargs.get("smoke")), ids=str)
    own = " ".join(str(marker.args[0]) for marker in metafunc.definition.iter_markers("parametrize"))
    if "world" in metafunc.fixturenames and "world" not in re.findall(r"\w+", own):
        contract = family is not None and "measure" not in metafunc.fixturenames
        sizes = session.contract_ranks if contract else session.ranks
        metafunc.parametrize("world", sizes, ids=[f"{n}ranks" for n in sizes], indirect=True)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--impl`, leave out the tests' folders of other families, unless they are asked for by path."""
    session = config.stash[SESSION]
    if not session.selected or not collection_path.is_dir():
        return None
    asked_for = [Path(config.invocation_params.dir, arg.partition("::")[0]).resolve() for arg in config.args]
    others = {each.folder for name, each in registry.FAMILIES.items() if name not in session.selected}
    folder = collection_path.resolve()
    is_others = folder.parent == config.rootpath / "correctness" and folder.name in others
    return True if is_others and not any(path.is_relative_to(folder) for path in asked_for) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With `--impl`, keep the tests that run over an implementation of those families; with `--model`, those that run
    over its case. Give benchmarks our clock.

    Raises pytest.UsageError, in one line, for a column of a question that does not exist.
    """
    session = config.stash[SESSION]
    kept: list[pytest.Item] = []
    dropped: list[pytest.Item] = []
    for item in items:
        implementation = implementation_of(item)
        chosen = not session.selected or (implementation is not None and implementation.family in session.selected)
        (kept if chosen and asked(session, item) else dropped).append(item)
        if measures(item):
            _use_device_clock(item, session.clock)
            if session.simulated:  # some predicted rows have no times
                item.add_marker(pytest.mark.filterwarnings("ignore:Benchmark fixture was not used"))
        if question := item.get_closest_marker("question"):
            session.questions.state(question)
    items[:] = kept
    if dropped:
        config.hook.pytest_deselected(items=dropped)


def asked(session: Session, item: pytest.Item) -> bool:
    """Whether the run has cases for the test: those of its grid, or of `--model`."""
    grid = item.get_closest_marker("cases")
    return session.asks(grid and grid.args[0])


def pytest_collection_finish(session: pytest.Session) -> None:
    """Count this run's verdicts, which share one error, and note each question's tests: those that measure; of a
    derived answer, all."""
    own = session.config.stash[SESSION]
    own.count_judgements(session.items)
    for item in session.items:
        if marker := item.get_closest_marker("question"):
            question = own.questions[marker.args[0]]
            if isinstance(question.answer, str) or measures(item):
                question.tests.add(item.nodeid)


def _races_to_go(implementation: Implementation) -> int:
    """How many races lead from the implementation to one without a peer, or to one that has been passed."""
    passed: list[str] = []
    while implementation.time is not None and implementation.name not in passed:
        passed.append(implementation.name)
        implementation = registry.family(implementation.family).implementations[implementation.time.peer]
    return len(passed)


def _use_device_clock(item: pytest.Item, clock: DeviceClock) -> None:
    """Set pytest-benchmark's `timer`, and its `group` to the question, on top of the test's own marker."""
    own = item.get_closest_marker("benchmark")
    question = item.get_closest_marker("question")
    options = {"group": question.args[0] if question else None, **(own.kwargs if own else {}), "timer": clock}
    item.add_marker(pytest.mark.benchmark(**options), append=False)
