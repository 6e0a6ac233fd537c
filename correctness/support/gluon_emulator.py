"""Run Gluon kernels for Hopper on CPU: their Python itself, with what is asynchronous as early or as late as allowed.

    monkeypatch.setattr(flash_gluon, "gluon_forward", emulated(gluon_forward, copies_first=True))

A program's partitions take turns, and only one runs at a time, so that a run always goes the same way. A kernel that
reads before it may finds old values or NaN; partitions that all wait raise `Hang`.

Emulated per group of warps, not per thread: barriers among threads, layouts, registers, alignment, and the range of
int32 have no effect here.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import FunctionType, ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language import constexpr

from correctness.support.gluon_language import Language
from correctness.support.gluon_memory import Action, Barrier, Block, Descriptor, Pointer, Shared, end_all


def emulated(module: ModuleType, copies_first: bool) -> SimpleNamespace:
    """Copy of the module whose kernels are launched here, with tensors on CPU. Helpers must be in the same module.

    `copies_first`: the last partition, which loads, has priority; copies end at once, and products read shared memory
    when they are waited for. Shows what is overwritten too early. Otherwise the first partition has priority; copies
    end when they are waited for, and products read at once. Shows what is read too early.
    """
    program = Program(copies_first)
    names = {
        **vars(module),
        **{name: value.value for name, value in vars(module).items() if isinstance(value, constexpr)},
        **dict.fromkeys(("gl", "tl"), Language(program)),
        **{"tma": Copies(program), "mbarrier": Barriers(program)},
        **{name: getattr(program, name) for name in ("fence_async_shared", "warpgroup_mma", "warpgroup_mma_wait")},
        **{"warpgroup_mma_init": lambda acc: acc, "thread_barrier": lambda: None},
    }
    launchers = {}
    for name, value in vars(module).items():
        if isinstance(function := getattr(value, "fn", None), FunctionType):
            names[name] = FunctionType(function.__code__, names, name, function.__defaults__)
            launchers[name] = Launcher(names[name], program)
    return SimpleNamespace(**{**vars(module), **launchers})


class Hang(Exception):
    """Every partition waits for another."""


class Launcher:
    """`kernel[grid](*arguments, **options)`: one program after the other."""

    def __init__(self, function: FunctionType, program: Program) -> None:
        self.function, self.program = function, program
        self.taken = inspect.signature(function).parameters

    def __getitem__(self, grid: Sequence[int]) -> Callable[..., None]:
        return partial(self._launch, grid[0])

    def _launch(self, programs: int, *arguments: Any, **options: Any) -> None:
        options = {name: value for name, value in options.items() if name in self.taken}  # num_warps may be none
        for index in range(programs):
            self.program.index, self.program.turns = index, Turns([Partition()])
            self.function(*map(_in_kernel, arguments), **options)


def _in_kernel(argument: Any) -> Any:
    """An argument of a launch, as the kernel takes it."""
    match argument:
        case Tensor():
            return Pointer.to(argument)
        case TensorDescriptor():
            return Descriptor(argument)
        case tuple():
            return tuple(map(_in_kernel, argument))
    return argument


class Partition:
    """A group of warps: what it has started and not waited for, and whether it can go on."""

    def __init__(self) -> None:
        self.products: list[Action] = []
        self.stores: list[Action] = []
        self.unfenced: list[Action] = []
        self.is_ready: Callable[[], bool] = lambda: True


class Turns:
    """Runs partitions in threads, one at a time: always the first one that is ready."""

    def __init__(self, partitions: list[Partition]) -> None:
        self.partitions, self.running = partitions, partitions[0]
        self.error: BaseException | None = None
        self.passed = threading.Condition()

    def run(self, bodies: list[Action]) -> None:
        """Run each partition's body; raise the first error, once no thread is left."""
        pairs = zip(list(self.partitions), bodies, strict=True)
        threads = [threading.Thread(target=self._run, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.error:
            raise self.error

    def pass_on(self, is_ready: Callable[[], bool] = lambda: True) -> None:
        """Let others run who are before this partition; return when this one `is_ready`."""
        partition = self.running
        partition.is_ready = is_ready
        self._choose()
        self._wait_for_turn(partition)

    def _run(self, partition: Partition, body: Action) -> None:
        try:
            self._wait_for_turn(partition)
            body()
            self.partitions.remove(partition)
            self._choose()
        except BaseException as error:  # `run` raises it
            with self.passed:
                self.error = self.error or error
                self.passed.notify_all()

    def _choose(self) -> None:
        chosen = next((each for each in self.partitions if each.is_ready()), None)
        if chosen is None and self.partitions:
            raise Hang(f"{len(self.partitions)} partitions wait, and no other runs")
        with self.passed:
            self.running = chosen or self.running
            self.passed.notify_all()

    def _wait_for_turn(self, partition: Partition) -> None:
        with self.passed:
            self.passed.wait_for(lambda: self.running is partition or self.error)
        if self.error:
            raise Hang("another partition has failed")


class Program:
    """The program that runs: its index in the grid, its partitions, and their matrix units."""

    def __init__(self, copies_first: bool) -> None:
        self.copies_first, self.index, self.turns = copies_first, 0, Turns([Partition()])

    @property
    def partition(self) -> Partition:
        return self.turns.running

    def warp_specialize(self, calls: list[tuple[Callable[..., Any], tuple[Any, ...]]], *_: Any) -> None:
        bodies = [partial(function, *arguments) for function, arguments in calls]
        self.turns = Turns([Partition() for _ in bodies])
        self.turns.run(bodies[::-1] if self.copies_first else bodies)

    def warpgroup_mma(self, a: Any, b: Any, acc: Block, is_async: bool = False) -> Block:
        """acc + a @ b, NaN until it is waited for; `a` may be in registers."""
        assert is_async
        result = torch.full_like(acc, torch.nan)

        def operands() -> list[Tensor]:
            return [(x.asynchronous if isinstance(x, Shared) else x).float() for x in (a, b)]

        read_at_once = None if self.copies_first else operands()

        def compute() -> None:
            left, right = read_at_once or operands()
            result.copy_(acc + left @ right)

        self.partition.products.append(compute)
        return result

    def warpgroup_mma_wait(self, num_outstanding: int, deps: Sequence[Any]) -> Any:
        end_all(self.partition.products, but=num_outstanding)
        return deps[0] if len(deps) == 1 else tuple(deps)

    def fence_async_shared(self) -> None:
        """Make this partition's stores to shared memory visible to matrix units and TMA."""
        end_all(self.partition.unfenced)


class Barriers:
    """`mbarrier`: each call may pass the turn on."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def MBarrierLayout(self) -> type[Barrier]:
        return Barrier

    def init(self, barrier: Barrier, count: int) -> None:
        barrier.count = barrier.pending = count

    def expect(self, barrier: Barrier, num_bytes: int, pred: bool = True) -> None:
        if pred:
            barrier.change(arrivals=1, num_bytes=num_bytes)
            self.program.turns.pass_on()

    def arrive(self, barrier: Barrier, count: int = 1, pred: bool = True) -> None:
        if pred:
            barrier.change(arrivals=count)
            self.program.turns.pass_on()

    def wait(self, barrier: Barrier, phase: int, pred: bool = True) -> None:
        if pred:
            self.program.turns.pass_on(lambda: barrier.has_passed(phase))


class Copies:
    """`tma`: copies of tiles, with zeros out of bounds."""

    def __init__(self, program: Program) -> None:
        self.program = program

    def async_copy_global_to_shared(
        self, tensor: Descriptor, place: list[int], barrier: Barrier, tile: Shared, pred: bool = True
    ) -> None:
        def copy() -> None:
            inside, of_tile = tensor.box(place)
            for memory in (tile.generic, tile.asynchronous):
                memory.zero_()
                memory[of_tile] = tensor.x[inside]
            barrier.change(num_bytes=-tile.generic.nbytes)

        if pred:
            barrier.copies.append(copy)
            if self.program.copies_first:
                end_all(barrier.copies)

    def async_copy_shared_to_global(self, tensor: Descriptor, place: list[int], tile: Shared) -> None:
        def copy() -> None:
            inside, of_tile = tensor.box(place)
            tensor.x[inside] = tile.asynchronous[of_tile]

        self.program.partition.stores.append(copy)
        if self.program.copies_first:
            self.store_wait(0)

    def store_wait(self, pendings: int) -> None:
        end_all(self.program.partition.stores, but=pendings)
