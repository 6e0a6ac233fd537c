"""The tool's own tests: hooks, and the tables of planted defects."""

import pytest

from correctness.support.hooks import pair as pair
from correctness.support.hooks import pytest_cmdline_main as pytest_cmdline_main
from correctness.support.hooks import pytest_collection_finish as pytest_collection_finish
from correctness.support.hooks import pytest_configure as pytest_configure
from correctness.support.hooks import recorded, write_table
from correctness.support.sweep import deselect_sweep
from tests.judge.judging import by_family

pytest.register_assert_rewrite("tests.support.project")  # a plugin of some tests, which others import before them


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    deselect_sweep(config, items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Which defects the judge sees; with -v, which test sees each."""
    judged = by_family(recorded(terminalreporter, "judged"))
    write_table(terminalreporter, "Which defects does the judge see?", judged, left=("family",))
    if terminalreporter.config.option.verbose > 0:
        defects = sorted(recorded(terminalreporter, "defect"), key=lambda row: str(row["cause"]))
        left = ("family", "cause", "defect", "test", "says")
        write_table(terminalreporter, "Which test sees each defect?", defects, left=left)
