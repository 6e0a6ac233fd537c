"""Ranges by module and phase, what a profiled step says of its kernels, and the files of --trace-dir."""

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from impl.model import Transformer
from shardmark.api.workload import Mark
from shardmark.meter.trace import TraceFolder, memory_snapshot, module_ranges, profile_step
from tests.support.training_step import TINY


def _ranges(profiler: profile) -> list[tuple[str, str | None]]:
    """Each range with the range around it, in order of their beginning."""
    events = sorted(
        (event for event in profiler.events() if event.is_user_annotation), key=lambda e: e.time_range.start
    )
    return [(event.name, event.cpu_parent.name if event.cpu_parent else None) for event in events]


def test_ranges_carry_the_modules_names_and_nest_as_they_do() -> None:
    model = Transformer(TINY, context_length=32)
    with profile() as profiler, module_ranges(model) as names:
        model(torch.randint(TINY.vocab, (2, 32)))
    found = _ranges(profiler)
    assert found[:7] == [
        ("Transformer", None),
        ("embedding", "Transformer"),
        ("blocks.0", "Transformer"),
        ("blocks.0.attention_norm", "blocks.0"),
        ("blocks.0.attention", "blocks.0"),
        ("blocks.0.attention.query", "blocks.0.attention"),
        ("blocks.0.attention.key", "blocks.0.attention"),
    ]
    called = {name for name, _ in model.named_modules(remove_duplicate=False)} - {"", "blocks"}  # a list is not called
    assert {name for name, _ in found} == called | {"Transformer"} <= names
    # The layers share one rotary embedding, and each calls it by its own path, for q and for k.
    rotary = Counter(pair for pair in found if pair[0].endswith("rotary"))
    assert rotary == {(f"blocks.{i}.attention.rotary", f"blocks.{i}.attention"): 2 for i in range(TINY.layers)}


def _hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_no_hook_is_left_behind() -> None:
    model = Transformer(TINY, context_length=32)
    with module_ranges(model):
        assert _hooks(model) > 0
        model(torch.randint(TINY.vocab, (2, 32)))
    assert _hooks(model) == 0
    with pytest.raises(KeyError), module_ranges(model):
        raise KeyError
    assert _hooks(model) == 0


class Fails(nn.Module):
    def __init__(self, error: type[BaseException]) -> None:
        super().__init__()
        self.error = error

    def forward(self, x: Tensor) -> Tensor:
        raise self.error


class Tries(nn.Module):
    def __init__(self, bad: nn.Module) -> None:
        super().__init__()
        self.bad, self.good = bad, nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        try:
            return self.bad(x)
        except RuntimeError:
            return self.good(x)


@pytest.fixture
def nvtx(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """NVTX's calls on a machine that claims to have CUDA: a name for each push, a dash for each pop."""
    told: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append("-"))
    return told


def test_an_exception_that_the_model_catches_leaves_the_ranges_around_it(nvtx: list[str]) -> None:
    model = Tries(Fails(RuntimeError))
    with module_ranges(model):
        model(torch.ones(1))
        assert nvtx == ["Tries", "bad", "-", "good", "-", "-"]


def test_a_hook_that_fails_before_ours_ends_nothing_else(nvtx: list[str]) -> None:
    """The inner module's range never began; the outer one's must not end in its place."""

    def refuse(*args: Any) -> None:
        raise RuntimeError("refused")

    model = Tries(nn.ReLU())
    with module_ranges(model):
        model.bad.register_forward_pre_hook(refuse, prepend=True)
        model(torch.ones(1))
        assert nvtx == ["Tries", "good", "-", "-"]


def test_what_is_interrupted_ends_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks with `always_call` do not run on Ctrl-C, and the garbage collector would be too late."""
    told: list[str] = []

    class Range:
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            told.append(self.name)

        def __exit__(self, *error: object) -> None:
            told.append(f"-{self.name}")

    monkeypatch.setattr("shardmark.meter.trace.named_range", Range)
    with pytest.raises(KeyboardInterrupt), module_ranges(model := nn.Sequential(Fails(KeyboardInterrupt))):
        model(torch.ones(1))
    assert told == ["Sequential", "0", "-0", "-Sequential"]


def test_a_compiled_module_is_one_range() -> None:
    model = nn.Sequential(torch.compile(nn.Sequential(nn.ReLU(), nn.ReLU()), backend="eager"), nn.ReLU())
    with module_ranges(model) as names:
        assert names == {"Sequential", "0", "1"}


class Marks:
    """Makes the given marks in each step."""

    backend = "none"

    def __init__(self, *steps: list[str]) -> None:
        self.steps = iter(steps)

    def prepare(self) -> None: ...

    def step(self, mark: Mark) -> None:
        for part in next(self.steps):
            torch.ones(2) @ torch.ones(2)
            mark(part)
        torch.ones(3).exp()


def test_a_part_marked_twice_is_one_phase_and_what_follows_is_the_rest() -> None:
    profile = profile_step(Marks(["forward", "backward", "forward"], ["forward", "backward", "forward"]), "cpu")
    assert list(profile.elapsed) == ["forward", "backward", "rest"]
    counts = Counter((call.name, call.phase) for call in profile.calls)
    assert [counts["aten::dot", phase] for phase in profile.elapsed] == [2, 1, 0] and counts["aten::exp", "rest"] == 1


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (["backward"], "a step marks the same parts each time: 'backward' came where 'forward' had been"),
        (["forward"], "a step marks the same parts each time: 'backward' did not come"),
        (
            ["forward", "backward", "rest"],
            "a step marks the same parts each time: 'rest' came where the step's end had",
        ),
    ],
    ids=["another", "fewer", "more"],
)
def test_steps_that_differ_in_their_marks_are_refused(second: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        profile_step(Marks(["forward", "backward"], second), "cpu")
    assert not torch.autograd._profiler_enabled()


def test_profilers_do_not_nest() -> None:
    with profile(), pytest.raises(RuntimeError, match="another one is running"):
        profile_step(Marks([], []), "cpu")


def test_two_modules_of_a_workload_are_told_apart() -> None:
    class Pair(Marks):
        def __init__(self) -> None:
            self.student, self.teacher = (nn.Linear(2, 2) for _ in range(2))

        def step(self, mark: Mark) -> None:
            self.student(self.teacher(torch.ones(1, 2)))

    assert {"student", "teacher"} <= {call.module for call in profile_step(Pair(), "cpu").calls}


def test_cpu_has_no_memory_snapshot(tmp_path: Path) -> None:
    with memory_snapshot(tmp_path / "here.pickle", "cpu") as files:
        pass
    assert files == [] and not list(tmp_path.iterdir())


def test_on_cuda_the_snapshot_is_written_and_the_history_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.cuda.memory, "_record_memory_history", lambda *args, **kwargs: asked.append(kwargs))
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda name: Path(name).write_bytes(b"snapshot"))
    path = tmp_path / "new" / "step.pickle"
    with memory_snapshot(path, "cuda") as files:
        assert asked[-1]["stacks"] == "python" and not files
    assert files == [path] and path.read_bytes() == b"snapshot"
    assert asked[-1] == {"enabled": None}
    with pytest.raises(KeyError), memory_snapshot(tmp_path / "failed.pickle", "cuda"):
        raise KeyError
    assert len(asked) == 4 and asked[-1] == {"enabled": None} and not (tmp_path / "failed.pickle").exists()


def test_file_names_are_safe_and_each_tests_own(tmp_path: Path) -> None:
    folder = TraceFolder(tmp_path / "made" / "here")
    assert (tmp_path / "made" / "here").is_dir()
    first = folder.stem("perf/a.py::test[one]", "b2 s64/../x-naive")
    assert first == tmp_path / "made" / "here" / "b2_s64_.._x-naive"
    assert folder.stem("perf/a.py::test[one]", "b2 s64/../x-naive") == first
    second = folder.stem("perf/a.py::test[two]", "b2 s64/../x-naive")
    assert second.parent == first.parent and second.name.startswith(f"{first.name}-") and second != first
    assert json.dumps(str(second))
    beside = TraceFolder(tmp_path, others=True)  # whose names nobody here knows
    assert len({beside.stem(f"perf/a.py::test[{number}]", "naive").name for number in range(2)} | {"naive"}) == 3


def test_on_cuda_every_mark_waits_for_the_device(nvtx: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: nvtx.append("wait"))
    monkeypatch.setattr("shardmark.meter.trace.ACTIVITIES", {"cuda": [ProfilerActivity.CPU]})
    profile = profile_step(Marks(["forward", "backward"], ["forward", "backward"]), "cuda")
    assert nvtx == ["wait", "forward", "wait", "-", "backward", "wait", "-", "rest", "wait", "-"]
    assert list(profile.elapsed) == ["forward", "backward"] and not profile.calls  # no device, so no kernels
