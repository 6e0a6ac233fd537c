"""One step under the profiler: ranges by phase and by module, Chrome traces, the CUDA memory snapshot.

    with module_ranges(model):                      # blocks.0.attention.query and so on, in profilers and in Nsight
        model(tokens)

    profile = profile_step(workload, "cpu", trace=Path("step.json"))
    profile.kernels("backward")                     # what ran in that phase, the longest first

The profiler slows the host: it shows the shares of a step's time, while the stopwatch measures how long a step takes.
Memory snapshots exist only on CUDA.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from shardmark.meter.kernels import REST, StepProfile, read_profile

if TYPE_CHECKING:
    from shardmark.api.workload import Workload

ACTIVITIES = {"cpu": [ProfilerActivity.CPU], "cuda": [ProfilerActivity.CPU, ProfilerActivity.CUDA]}

HISTORY = 100_000
"""Most allocations and releases in a memory snapshot, which keeps the last ones: each is a few KB of the file."""


@contextmanager
def nvtx_range(name: str, device: str) -> Iterator[None]:
    """An NVTX range of that name, which Nsight shows; nothing on CPU."""
    if device == "cuda":
        torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.nvtx.range_pop()


@contextmanager
def named_range(name: str) -> Iterator[None]:
    """A range of that name in PyTorch's profiler, and on CUDA in NVTX."""
    with record_function(name), nvtx_range(name, "cuda" if torch.cuda.is_available() else "cpu"):
        yield


@contextmanager
def module_ranges(module: nn.Module) -> Iterator[frozenset[str]]:
    """Give every submodule's forward a range named by its dotted path, and `module`'s own by its class.

    A shared module is named by the path below the module that called it. Modules inside a compiled module have no
    ranges, as they do not run one by one. Yields all names that ranges may have; afterwards no hook is left.
    """
    paths: dict[nn.Module, list[str]] = defaultdict(list)
    _collect(module, "", paths)
    running: list[tuple[nn.Module, str, ExitStack]] = []  # from the outermost

    def enter(called: nn.Module, args: Any) -> None:
        above = running[-1][1] if running else ""
        below = [path for path in paths[called] if path.startswith(f"{above}." if above else "")]
        path = (below or paths[called])[0]
        open_range = ExitStack()
        open_range.enter_context(named_range(_name(path, called)))
        running.append((called, path, open_range))

    def leave(called: nn.Module, args: Any, output: Any) -> None:
        if running and running[-1][0] is called:  # another hook may have raised before ours could enter
            running.pop()[2].close()

    with ExitStack() as hooks:
        for submodule in paths:
            # The outermost hooks, so that the range includes other hooks' work, such as all-gathering parameters.
            hooks.callback(submodule.register_forward_pre_hook(enter, prepend=True).remove)
            hooks.callback(submodule.register_forward_hook(leave, always_call=True).remove)
        try:
            yield frozenset(_name(path, submodule) for submodule, own in paths.items() for path in own)
        finally:
            while running:  # Ctrl-C is no Exception, and leaves ranges open
                running.pop()[2].close()


def _collect(module: nn.Module, path: str, paths: dict[nn.Module, list[str]]) -> None:
    paths[module].append(path)
    if "_orig_mod" not in module._modules:  # torch.compile's wrapper
        for name, child in module._modules.items():
            if child is not None:
                _collect(child, f"{path}.{name}" if path else name, paths)


def _name(path: str, module: nn.Module) -> str:
    return path or type(module).__name__


def profile_step(workload: Workload, device: str, *, trace: Path | None = None) -> StepProfile:
    """Profile a step. A step before it names the parts, which become ranges from mark to mark.

    On CUDA each mark waits for the device, so that a phase's kernels lie within its range. The phase after the last
    mark is "rest". `trace` is the path of the Chrome trace. Raises ValueError if the two steps differ in their marks,
    RuntimeError under another profiler.
    """
    if torch.autograd._profiler_enabled():
        raise RuntimeError("profile_step runs a profiler of its own, and another one is running")
    marks: list[str] = []
    workload.prepare()
    workload.step(marks.append)
    workload.prepare()
    _synchronize(device)

    with ExitStack() as ranges, profile(activities=ACTIVITIES[device]) as profiler:
        names = ranges.enter_context(module_ranges(modules_of(workload)))
        phases = _Phases([*marks, REST], device)
        ranges.callback(phases.close)
        workload.step(phases.mark)
        phases.finish()
    if trace is not None:
        trace.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(trace))
    return read_profile(profiler, phases.names, names, device)


class _Phases:
    """Ranges from mark to mark. A range needs its name when it begins, so an earlier step gives the names."""

    def __init__(self, names: list[str], device: str) -> None:
        self.names = names
        self.device = device
        self._ended = 0
        self._range = ExitStack()
        self._open()

    def mark(self, part: str) -> None:
        expected = [*self.names[:-1], None][self._ended]
        if part != expected:
            before = repr(expected) if expected else "the step's end"
            raise ValueError(f"a step marks the same parts each time: {part!r} came where {before} had been")
        self._end()
        self._open()

    def finish(self) -> None:
        if self._ended != len(self.names) - 1:
            raise ValueError(f"a step marks the same parts each time: {self.names[self._ended]!r} did not come")
        self._end()

    def close(self) -> None:
        """End the open range, if there is one."""
        self._range.close()

    def _open(self) -> None:
        self._range.enter_context(named_range(self.names[self._ended]))

    def _end(self) -> None:
        _synchronize(self.device)
        self._range.close()
        self._ended += 1


def modules_of(workload: Workload) -> nn.Module:
    """The workload's module, or a module that holds its several modules by the names of their attributes."""
    found = {name: value for name, value in vars(workload).items() if isinstance(value, nn.Module)}
    if len(found) == 1:
        return next(iter(found.values()))
    together = nn.Module()
    for name, module in found.items():
        together.add_module(name, module)
    return together


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


@contextmanager
def memory_snapshot(path: Path, device: str) -> Iterator[list[Path]]:
    """Record the block's allocations and releases, with stacks, into `path` for pytorch.org/memory_viz.

    Yields a list of the files written when the block ends: none on CPU, whose allocator keeps no such history.
    """
    files: list[Path] = []
    if device != "cuda":
        yield files
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.cuda.memory._record_memory_history(stacks="python", max_entries=HISTORY, clear_history=True)
    try:
        yield files
        torch.cuda.memory._dump_snapshot(str(path))
        files.append(path)
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


class TraceFolder:
    """The folder of `--trace-dir`, created if it is missing, and the names of each test's files in it.

    With `others`, other processes of the run write to it too. Raises ValueError, in one line, for a path that is no
    folder and cannot become one.
    """

    def __init__(self, path: Path, others: bool = False) -> None:
        try:
            self._made = [each for each in (path, *path.parents) if not os.path.lexists(each)]
            path.mkdir(parents=True, exist_ok=True)
            if not os.access(path, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", error)
            raise ValueError(f"--trace-dir {path}: it is to be a folder, and cannot be: {why}") from None
        self.path = path.absolute()  # ranks may be elsewhere
        self._others = others
        self._tests: dict[str, str] = {}

    def close(self) -> None:
        """Remove the folders that were created and stayed empty."""
        for each in self._made:
            with suppress(OSError):
                each.rmdir()

    def stem(self, test_id: str, wanted: str) -> Path:
        """The test's file names without endings: `wanted`, with a digest if another test of this run has the same."""
        name = re.sub(r"[^\w.+=-]+", "_", wanted)[:150]
        if self._others or self._tests.setdefault(name, test_id) != test_id:
            name = f"{name}-{hashlib.sha256(test_id.encode()).hexdigest()[:8]}"
        return self.path / name
