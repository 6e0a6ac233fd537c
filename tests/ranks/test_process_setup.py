"""Requirements are tried when a test needs them; where the machine lacks one, the test is skipped with the reason."""

import ctypes
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from runpy import run_path
from statistics import median
from types import SimpleNamespace as Namespace

import pytest
import torch

from correctness.support.paths import ROOT
from shardmark.api.requirements import error_line
from shardmark.meter.memory import release
from shardmark.ranks.process_setup import TURNED, begin_with_own_device, keep_freed_memory
from shardmark.ranks.world import World

pytest_plugins = ["pytester", "tests.support.project"]

IMPORTS_TRITON = r'^(\w+ = )?pytest\.importorskip\("triton"'  # or the file is skipped

COMPILES = """
import pytest

@pytest.mark.family("attention", only=("eager", "compiled"))
def test_implementations(implementation): pass

def test_that_compiles_itself(compiler): pass
"""


@pytest.mark.sweep
def test_without_a_cpp_compiler_what_compiles_is_skipped_with_the_reason(
    project: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    project.makepyfile(test_compiles=COMPILES)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    result = project.runpytest_subprocess("--device=cpu", "-rs", "test_compiles.py")
    result.assert_outcomes(passed=1, skipped=2)
    reason = "torch.compile finds no C++ compiler that works: install g++, or name one in CXX"
    result.stdout.fnmatch_lines([f"SKIPPED * compiled: {reason}", f"SKIPPED * {reason}"], consecutive=False)


@pytest.mark.sweep
def test_without_triton_all_is_collected_and_what_needs_it_is_skipped_with_the_reason() -> None:
    """Each file of kernels is skipped once."""
    run = "import sys, pytest; sys.modules['triton'] = None; sys.exit(pytest.main(sys.argv[1:]))"
    options = ("--device=cpu", "-rs", "-p", "no:cacheprovider", "-k", "a_scaled_gradient_is_clipped")
    done = subprocess.run(
        [sys.executable, "-c", run, "correctness", "tests", "perf", *options],
        cwd=ROOT,
        env=os.environ | {"TRITON_INTERPRET": "1"},  # or, where a GPU is, tests of the interpreter skip for that reason
        capture_output=True,
        text=True,
    )
    skipped = [line for line in done.stdout.splitlines() if line.startswith("SKIPPED")]
    skipped = [line for line in skipped if "needs playwright" not in line]  # the page's browser has tests of its own
    files = [path for room in ("correctness", "tests", "perf") for path in (ROOT / room).rglob("test_*.py")]
    kernels = {
        str(path.relative_to(ROOT)) for path in files if re.search(IMPORTS_TRITON, path.read_text(), re.MULTILINE)
    }
    whole = [line for line in skipped if "could not import 'triton'" in line]
    assert done.returncode == 0 and kernels, done.stdout + done.stderr
    assert {line.split()[2].partition(":")[0] for line in whole} == kernels and len(whole) == len(kernels)
    [rest] = set(skipped) - set(whole)
    assert "Triton cannot be imported: " in rest


def test_what_a_requirement_finds_out_takes_no_time_before_it_is_needed(project: pytest.Pytester) -> None:
    project.makepyfile(
        test_costly="""
        import pytest
        from shardmark.api.registry import register

        def requires_much(device):
            print("tried")
            return "is never there"

        register("sleep", "costly", 1.0, requires=(lambda device: None, requires_much))

        @pytest.mark.family("sleep", only=("plain", "costly"))
        def test_it(implementation): pass
        """
    )
    options = ("--device=cpu", "-rs", "-s", "test_sleeps.py", "test_costly.py", "-k")
    result = project.runpytest_inprocess(*options, "test_it and plain")
    result.assert_outcomes(passed=1)
    result.stdout.no_fnmatch_line("*tried*")
    result = project.runpytest_inprocess(*options, "test_it")
    result.assert_outcomes(passed=1, skipped=1)
    result.stdout.fnmatch_lines(["*tried*", "SKIPPED * test_costly.py:* costly: is never there"])


def cache_key_tag() -> str:
    return torch.compiler.config.cache_key_tag


@pytest.mark.parametrize("world", [1], indirect=True)
def test_the_compilers_files_are_for_these_instructions(world: World) -> None:
    (on_rank,) = world.run(cache_key_tag)
    assert on_rank == cache_key_tag() and on_rank.count(torch.backends.cpu.get_cpu_capability()) == 1


IN_GERMAN = """CppCompileError: C++ compile error

Command:
g++ /tmp/with space/main.cpp -o main.so

Output:
In file included from /tmp/main.cpp:1:
/tmp/main.cpp:2:10: schwerwiegender Fehler: Python.h: Datei oder Verzeichnis nicht gefunden
    2 | #include <Python.h>
compilation terminated.
"""


OF_THE_COMMAND = """CppCompileError: C++ compile error

Command:
g++ /tmp/with space/header.hpp

Output:
g++: fatal error: input file '/tmp/with' is the same as output file
compilation terminated.
"""


class Wrapped(RuntimeError):
    """Holds another error, as Dynamo's errors do."""

    inner_exception = PermissionError(13, "Permission denied", "/root")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RuntimeError(IN_GERMAN), "schwerwiegender Fehler: Python.h: Datei oder Verzeichnis nicht gefunden"),
        (RuntimeError(OF_THE_COMMAND), "g++: fatal error: input file '/tmp/with' is the same as output file"),
        (
            Wrapped("backend='inductor' raised:\nPermissionError"),
            "PermissionError: [Errno 13] Permission denied: '/root'",
        ),
        (ValueError("\n one\ntwo"), "ValueError: one"),
        (ValueError(), "ValueError: "),
    ],
    ids=["compiler", "command", "wrapped", "lines", "nothing"],
)
def test_an_errors_line_is_what_went_wrong(error: Exception, line: str) -> None:
    assert error_line(error) == line


@pytest.mark.parametrize(
    ("worker", "visible", "found"),
    [
        ("gw0", None, "0,1,2,3"),
        ("gw1", None, "1,2,3,0"),
        ("gw6", None, "2,3,0,1"),
        ("gw1", "5,7", "7,5"),
        ("gw1", "5", "5"),
        ("gw1", "", ""),
        (None, None, None),
    ],
)
def test_each_worker_begins_with_a_gpu_of_its_own(
    worker: str | None, visible: str | None, found: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    for name, value in (("PYTEST_XDIST_WORKER", worker), ("CUDA_VISIBLE_DEVICES", visible)):
        monkeypatch.setenv(name, value or "")
        if value is None:
            monkeypatch.delenv(name)
    monkeypatch.setenv(TURNED, "")
    monkeypatch.delenv(TURNED)
    for _ in range(2):  # the second is a run within the first
        begin_with_own_device()
    assert os.environ.get("CUDA_VISIBLE_DEVICES") == found


def test_it_does_so_before_cuda_is_asked_whether_it_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which starts CUDA, and CUDA reads the variable once."""
    seen: list[str] = []
    monkeypatch.setenv(TURNED, "")
    monkeypatch.delenv(TURNED)
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: not seen.append(os.environ["CUDA_VISIBLE_DEVICES"]))
    run_path(str(ROOT / "conftest.py"))
    assert seen[0] == "7,5"


def _faults_of_a_step() -> tuple[float, float]:
    """Page faults of the median step that frees 8 MiB, and MiB that the process lost to `release` afterwards.

    Not their mean: a small block that begins in what a step has freed makes the next one take other pages, once.
    """
    kept = [torch.zeros(1 << 21) for _ in range(2)]  # of what lies above and below
    faults = []
    for _ in range(15):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.zeros(1 << 21)
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    del kept
    resident = _resident()
    release("cpu")
    return median(faults), resident - _resident()


def _resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="this C library has no mallopt, as glibc has")
def test_a_rank_keeps_what_a_step_frees_until_the_case_ends() -> None:
    """Or a step's page faults depend on its heap's layout."""
    with World(1) as world:
        ((faults, returned),) = world.run(_faults_of_a_step)
    assert faults < 0.01 * 8 * 2**20 / resource.getpagesize() and returned >= 16


@pytest.mark.parametrize("variable", [None, "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_the_allocator_that_a_user_has_configured_stays(variable: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_TUNABLES"))]:
        monkeypatch.delenv(name)
    if variable is not None:
        monkeypatch.setenv(variable, "")
    options: list[int] = []
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Namespace(mallopt=lambda option, value: options.append(option)))
    keep_freed_memory()
    assert len(options) == (2 if variable is None else 0)
