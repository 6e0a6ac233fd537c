"""tox.ini as tox reads it, with commands that only say that they ran."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from correctness.support.paths import ROOT

TOX = shutil.which("tox")


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Our tox.ini without PyTorch: correctness fails, perf passes, and each prints what it is run with."""
    if TOX is None:
        pytest.skip("needs tox")
    text = (ROOT / "tox.ini").read_text()
    text = re.sub(r"^(requires|deps) = .*|^env_dir = .*/suite$", "", text, flags=re.MULTILINE)
    text = text.replace("runner = shared-virtualenv", "runner = virtualenv").replace(" pytest ", " python run.py ")
    (tmp_path / "tox.ini").write_text(text)
    (tmp_path / "run.py").write_text(
        "import os, sys\nprint('run', *sys.argv[1:], os.environ.get('PYTEST_ADDOPTS'))\n"
        "sys.exit(sys.argv[1] == 'correctness')"
    )
    return tmp_path


def ran(project: Path, environment: str) -> tuple[int, list[str]]:
    command = [str(TOX), "-q", "--workdir", str(project / ".tox"), "-e", environment]  # the outer tox says another
    done = subprocess.run(
        command, cwd=project, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("run ")]
    assert lines, done.stdout + done.stderr
    return done.returncode, lines


def test_perf_runs_where_correctness_fails_and_the_whole_fails(project: Path) -> None:
    perf = "run perf --benchmark-json out.json --report out.html --device"
    assert ran(project, "gpu1") == (
        1,
        ["run correctness --device cuda --ranks 1", f"{perf} cuda --ranks 1"],
    )
    assert ran(project, "cpu4") == (
        1,
        ["run correctness --ranks 2,4 --device cpu --ranks 4", f"{perf} cpu --ranks 4"],
    )
