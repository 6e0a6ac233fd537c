"""All of correctness as other machines would see it: other instructions, threads, cores, locales, users and folders.

    python -m tests.machines                         # on each machine in turn, and a table: hours
    python -m tests.machines one_core not_root       # on these
    python -m tests.machines avx2 -- -k attention    # with arguments for pytest
    python -m tests.machines avx2 -- perf            # another folder than correctness

What cannot be had here is passed over, with the reason. Exit status 1 where a run fails.
"""

from __future__ import annotations

import argparse
import locale
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from correctness.support.paths import ROOT

LONGEST = 3600.0
"""Seconds after which a run is ended."""
PATIENCE = 30.0
"""Seconds that a run gets to end its ranks."""
NOBODY = 65534
COMPILERS = re.compile(r"(.*-)?(cc|gcc|g\+\+|c\+\+|clang|clang\+\+|cpp|c89|c99)(-[\d.]+)?")
"""Names of C and C++ compilers."""


class NotHereError(Exception):
    """Why this machine cannot be that one, in one line."""


@dataclass
class Run:
    """A run of pytest that is about to start: where, in which environment, and below which command."""

    folder: Path
    """A new one, that is gone after the run."""
    environment: dict[str, str]
    root: Path = ROOT
    below: list[str] = field(default_factory=list)
    options: list[str] = field(default_factory=list)


Machine = Callable[[Run], None]
"""Makes of a run on this machine one on another; NotHereError where it cannot."""


def instructions(**values: str) -> Machine:
    """Of x86-64, in the variables that libraries read."""

    def machine(run: Run) -> None:
        if platform.machine() != "x86_64":
            raise NotHereError(f"these are instructions of x86-64, and this is {platform.machine()}")
        run.environment.update(values)

    return machine


def variables(**values: str) -> Machine:
    """One that those variables stand for."""
    return lambda run: run.environment.update(values)


def one_core(run: Run) -> None:
    """The first of those that this process may run on."""
    run.below = [_command("taskset"), "-c", str(min(os.sched_getaffinity(0)))]


def four_threads(run: Run) -> None:
    """In one process, as several would share the cores."""
    run.environment["OMP_NUM_THREADS"] = "4"
    run.options = ["-n", "0"]


def another_language(run: Run) -> None:
    """The first there is of a comma for a point, of a dotless i, and of an encoding that is not UTF-8."""
    before = locale.setlocale(locale.LC_ALL)
    for name in ("de_DE.UTF-8", "tr_TR.UTF-8", "fr_FR.UTF-8", "de_DE.ISO-8859-1"):
        try:
            locale.setlocale(locale.LC_ALL, name)
        except locale.Error:
            continue
        locale.setlocale(locale.LC_ALL, before)
        run.environment["LC_ALL"] = name
        return
    raise NotHereError("no locale but C and English ones: localedef makes them")


def path_with_spaces(run: Run) -> None:
    """The checkout and the folder for temporary files, with a letter beyond ASCII."""
    run.root = run.folder / "a path with späces"
    caches = shutil.ignore_patterns(".git", ".tox", "__pycache__", ".*_cache", ".hypothesis")  # others write them
    shutil.copytree(ROOT, run.root, ignore=caches)
    temporary = run.folder / "temporary fïles"
    temporary.mkdir()
    run.environment["TMPDIR"] = str(temporary)


def not_root(run: Run) -> None:
    """A user without a name, a home or rights, who reads the checkout and writes to a folder of their own."""
    if os.geteuid() != 0:
        raise NotHereError("this user is not root, and so no run is root's")
    user = [_command("setpriv"), f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--bounding-set=-all"]
    user += ["sh", "-c", 'exec "$0" "$@"']  # as setpriv itself still executes what root may
    run.folder.chmod(0o777)
    for name in ("HOME", "USER", "LOGNAME"):
        run.environment.pop(name, None)
    run.environment["TMPDIR"] = str(run.folder)
    probe = [*user, sys.executable, "-c", "import torch, sys; open(sys.argv[1]).read()", str(ROOT / "conftest.py")]
    if subprocess.run(probe, cwd="/", env=run.environment, capture_output=True).returncode:
        raise NotHereError(f"another user may not run {sys.executable}, or not read {ROOT}")
    run.below = user


def no_compiler(run: Run) -> None:
    """No command that is a C or C++ compiler's, as in a slim image."""
    for folder in reversed(run.environment["PATH"].split(os.pathsep)):
        for command in Path(folder).iterdir() if Path(folder).is_dir() else ():
            if not COMPILERS.fullmatch(command.name):
                (run.folder / command.name).unlink(missing_ok=True)
                (run.folder / command.name).symlink_to(command)
    run.environment["PATH"] = str(run.folder)
    for name in ("CC", "CXX"):
        run.environment.pop(name, None)


def no_triton(run: Run) -> None:
    """As where it has no wheels."""
    (run.folder / "sitecustomize.py").write_text("import sys\nsys.modules['triton'] = None\n")
    paths = [str(run.folder), run.environment.get("PYTHONPATH", "")]
    run.environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))


MACHINES: dict[str, Machine] = {
    # A laptop of 2015: what products of matrices, vectors in PyTorch, and what is compiled may use.
    "avx2": instructions(ONEDNN_MAX_CPU_ISA="AVX2", ATEN_CPU_CAPABILITY="avx2", MKL_ENABLE_INSTRUCTIONS="AVX2"),
    "onednn_avx512_core": instructions(ONEDNN_MAX_CPU_ISA="AVX512_CORE"),
    "onednn_avx2": instructions(ONEDNN_MAX_CPU_ISA="AVX2"),
    "onednn_sse41": instructions(ONEDNN_MAX_CPU_ISA="SSE41"),
    "aten_avx2": instructions(ATEN_CPU_CAPABILITY="avx2"),
    "aten_default": instructions(ATEN_CPU_CAPABILITY="default"),
    "mkl_avx2": instructions(MKL_ENABLE_INSTRUCTIONS="AVX2"),
    "one_thread": variables(OMP_NUM_THREADS="1"),
    "four_threads": four_threads,
    "one_core": one_core,
    "locale_c": variables(LC_ALL="C"),
    "another_language": another_language,
    "path_with_spaces": path_with_spaces,
    "not_root": not_root,
    "no_compiler": no_compiler,
    "no_triton": no_triton,
}


def run_on(name: str, arguments: list[str]) -> tuple[str, bool]:
    """What came of correctness on that machine, in one line, and whether it is well."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix=f"{name}-", ignore_cleanup_errors=True) as folder:
        run = Run(Path(folder), dict(os.environ))
        try:
            MACHINES[name](run)
        except NotHereError as error:
            return f"not here: {error}", True
        folders = [] if arguments and not arguments[0].startswith("-") else ["correctness"]
        command = [*run.below, sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q"]
        print(f"--- {name}", flush=True)
        status, last = _follow([*command, *run.options, *folders, *arguments], run)
    return f"{last.strip('= ')} (exit status {status}, {time.monotonic() - began:.0f} s)", status == 0


def _follow(command: list[str], run: Run) -> tuple[int, str]:
    """Exit status and last line of a command; what it prints is printed. It is ended with us, and after LONGEST."""
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8", "errors": "replace"}
    process = subprocess.Popen(command, cwd=run.root, env=run.environment, start_new_session=True, **output)
    assert process.stdout is not None
    last, began, late = "nothing was printed", time.monotonic(), threading.Timer(LONGEST, _end, [process])
    late.start()
    try:
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip() or last
        if time.monotonic() - began >= LONGEST:
            last = f"ended after {LONGEST:.0f} s"
        return process.wait(), last
    finally:
        late.cancel()
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """End a command, and what it has started."""
    if process.poll() is None:
        process.terminate()  # as Ctrl-C: pytest ends its ranks
        with suppress(subprocess.TimeoutExpired):
            process.wait(PATIENCE)
    with suppress(ProcessLookupError):  # nothing of it is left
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _command(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        raise NotHereError(f"there is no {name}")
    return found


def main(arguments: list[str]) -> int:
    """The command line."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parser = argparse.ArgumentParser("python -m tests.machines", description="All of correctness elsewhere.")
    parser.add_argument("machines", nargs="*", metavar="MACHINE", help=f"of {', '.join(MACHINES)}; by default all")
    names = parser.parse_args(arguments[:end]).machines or list(MACHINES)
    if unknown := [name for name in names if name not in MACHINES]:
        parser.error(f"no machine {unknown[0]!r}; there are {', '.join(MACHINES)}")
    found = {name: run_on(name, arguments[end + 1 :]) for name in names}
    width = max(map(len, found))
    print("---", *(f"{name:<{width}}  {line}" for name, (line, _) in found.items()), sep="\n")
    return int(not all(well for _, well in found.values()))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
