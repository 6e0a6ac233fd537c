"""The memory meter: exact bytes, phases and peaks, whatever libraries and other threads do."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from shardmark.api import stage
from shardmark.meter import recording as blocks
from shardmark.meter.allocations import Allocated, Block, Released
from shardmark.meter.memory import Memory, Workspace, _Live, available_bytes, is_out_of_memory, meter
from shardmark.meter.recording import recording
from shardmark.ranks.world import World

N = 100_000
FUNCTIONAL: Any = torch.ops._c10d_functional


def test_bytes_equal_those_counted_by_hand(device: str) -> None:
    """An SGD step of a linear layer in float32, with every tensor counted; on CUDA forward's thread and backward's have
    a workspace of cuBLAS each."""
    rows, inputs, outputs, size = 64, 128, 256, 4
    with meter(device) as memory:
        x = torch.randn(rows, inputs, device=device)
        weight = torch.randn(outputs, inputs, device=device).requires_grad_()
        grad_y = torch.randn(rows, outputs, device=device)
        memory.mark("after_init")
        y = x @ weight.T
        memory.mark("after_forward")
        y.backward(grad_y)
        memory.mark("after_backward")
        with torch.no_grad():
            weight -= 0.1 * weight.grad  # a temporary as large as the weight; 0.1 as a float64
        memory.mark("after_step")
    bytes_x, bytes_weight, bytes_y = (size * n for n in (rows * inputs, outputs * inputs, rows * outputs))
    of_a_thread = memory.workspace.nbytes // 2 if device == "cuda" else 0
    assert memory.phases["after_init"] == bytes_x + bytes_weight + bytes_y
    assert memory.phases["after_forward"] == bytes_x + bytes_weight + 2 * bytes_y + of_a_thread
    after_backward = bytes_x + 2 * bytes_weight + 2 * bytes_y + 2 * of_a_thread
    assert memory.phases["after_backward"] == memory.phases["after_step"] == after_backward
    assert memory.tensors == bytes_x + 3 * bytes_weight + 2 * bytes_y + (8 if device == "cpu" else 0)


OWN = torch.library.Library("shardmark_test", "DEF")
OWN.define("doubled(Tensor x) -> Tensor")
OWN.impl("doubled", lambda x: (torch.ones_like(x) * 2).mul_(x).clone(), "CPU")


def test_what_a_library_takes_within_its_operator_is_workspace_and_no_tensor() -> None:
    """SDPA's flash kernel returns its output and log-sum-exp; the threads' tiles are workspace."""
    q = torch.randn(1, 2, 300, 16)
    with meter("cpu") as memory:
        scaled_dot_product_attention(q, q, q)
    log_sum_exp = 4 * 2 * 300
    assert memory.tensors == 4 * q.numel() + log_sum_exp
    assert memory.workspace.operator == "aten::_scaled_dot_product_flash_attention_for_cpu"
    assert memory.peak == memory.tensors + memory.workspace.nbytes > memory.tensors


def test_what_a_library_keeps_until_it_is_asked_for_is_workspace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as cuBLAS's workspace: allocated within an operator, and freed when the recording ends."""
    kept: list[torch.Tensor] = []
    monkeypatch.setattr(blocks, "have_libraries_give_back", lambda device: kept.clear())
    matrix = torch.randn(100, 100)
    with meter("cpu") as memory:
        tensor = torch.empty(N)
        kept.append(matrix @ matrix)
        memory.mark("after_step")
    assert memory.workspace == Workspace(4 * matrix.numel(), "aten::mm") and memory.tensors == 4 * tensor.numel()
    assert memory.peak == 4 * (tensor.numel() + matrix.numel()) and memory.phases == {"after_step": memory.tensors}


def test_what_libraries_give_back_is_workspace_though_the_profiler_does_not_report_it() -> None:
    """As on CUDA, where the allocator's own history has the addresses."""
    with recording("cpu") as recorded:
        matrix = torch.randn(100, 100)
        kept = matrix @ matrix
    assert all(not event.block.workspace for event in recorded.replay() if isinstance(event, Allocated))
    recorded.given_back = frozenset([kept.data_ptr()])
    *_, last = recorded.replay()
    assert isinstance(last, Released) and last.block.workspace == "aten::mm" and last.block.nbytes == kept.nbytes


def test_what_operators_leave_between_them_are_tensors_whoever_calls_them() -> None:
    """Whether a technique's code calls them, a user's library, or a composite operator of PyTorch."""
    x, q = torch.randn(N), torch.randn(1, 1, 300, 16)
    for call in (lambda: (x + 1) * 2, lambda: torch.ops.shardmark_test.doubled(x)):
        with meter("cpu") as memory:
            call()
        assert memory.tensors >= 2 * 4 * N and memory.workspace.nbytes <= 12  # numbers, converted
    with meter("cpu") as memory, sdpa_kernel(SDPBackend.MATH):
        scaled_dot_product_attention(q, q, q)
    assert memory.tensors >= 2 * 4 * 300 * 300  # scores and their softmax


def test_the_peaks_of_steps_are_those_of_tensors() -> None:
    q = torch.randn(1, 2, 300, 16)
    with meter("cpu") as memory:
        scaled_dot_product_attention(q, q, q)
        memory.keep_peak("first")
        memory.reset_peak()
        torch.empty(N)
    assert memory.peaks == {"first": 4 * q.numel() + 4 * 2 * 300}
    assert memory.tensors == memory.peak == 4 * N and memory.workspace == Workspace()


def test_sizes_are_those_requested_where_the_profiler_sees_them_rounded_up() -> None:
    """CUDA's allocator remembers the requests at each address in order; after the last, the profiler's size counts."""
    with recording("cpu") as recorded:
        for _ in range(3):
            torch.empty(N)
    addresses = [event.block.address for event in recorded.replay() if isinstance(event, Allocated)]
    recorded.requested = {addresses[0]: deque([7])}
    sizes = [event.block.nbytes for event in recorded.replay() if isinstance(event, Allocated)]
    assert sizes == [7, 4 * N, 4 * N]


def test_the_peak_can_begin_again(device: str) -> None:
    with meter(device) as memory:
        kept = torch.empty(N, device=device)
        torch.empty(9 * N, device=device)
        memory.reset_peak()
        torch.empty(N, device=device)
    assert memory.peak == 8 * N and kept.numel() == N


def test_stages_tell_what_is_live_and_the_most_there_was_whatever_peak_begins_again(device: str) -> None:
    stage("nothing")  # without a meter it goes nowhere
    with meter(device) as memory:
        kept = torch.empty(N, device=device)
        torch.empty(3 * N, device=device)
        stage("first")
        memory.reset_peak()
        more = torch.empty(N, device=device)
        stage("second")
    assert [(held.live, held.peak) for held in memory.stages.values()] == [(4 * N, 16 * N), (8 * N, 16 * N)]
    assert list(memory.stages) == ["first", "second"] and memory.peak == 8 * N
    assert all((held.reserved or 0) >= (16 * N if device == "cuda" else 0) for held in memory.stages.values())
    del kept, more


def test_bytes_begin_at_zero_whatever_a_library_has_kept_from_before(device: str) -> None:
    x = torch.randn(64, 64, device=device)
    x @ x  # on CUDA, cuBLAS keeps a workspace from now on
    with meter(device) as memory:
        memory.mark("after_init")
    assert memory.phases == {"after_init": 0} and memory.peak == 0


def test_a_workspace_that_is_kept_counts_after_the_peak_has_begun_again() -> None:
    live = _Live()
    live.follow(Allocated(Block(100, address=0, workspace="aten::mm")))
    live.begin_again()
    assert live.largest_workspace == Workspace(100, "aten::mm") and live.peak == 100 and live.peak_of_tensors == 0


def test_what_was_there_before_does_not_count(device: str) -> None:
    with meter(device):  # so that the profiler knows the tensor, and reports its release
        before = [torch.empty(N, device=device)]
    with meter(device) as memory:
        if device == "cpu":
            before.clear()
        new = torch.empty(10, device=device)
        memory.mark("after_init")
    assert memory.phases["after_init"] == 40 and new.numel() == 10


def test_what_another_thread_releases_is_gone_when_its_place_is_given_out_again() -> None:
    places = set()
    with meter("cpu") as memory:
        for _ in range(50):
            tensors = [torch.empty(N)]
            places.add(tensors[0].data_ptr())
            thread = threading.Thread(target=tensors.clear)  # the profiler does not hear of this release
            thread.start()
            thread.join()
        memory.mark("after_step")
    assert memory.phases["after_step"] <= len(places) * 4 * N < 50 * 4 * N


def test_a_pass_that_raises_still_ends_the_meter(device: str) -> None:
    with pytest.raises(LookupError), meter(device):
        raise LookupError
    with meter(device) as memory:
        torch.empty(N, device=device)
    assert memory.peak == 4 * N


def reduced_by_handle(tensor: torch.Tensor) -> None:
    handle = dist.all_reduce(tensor, async_op=True)
    assert handle is not None
    del tensor  # the worker and the handle hold the only references
    handle.wait()


def started(operator: str, *arguments: object) -> torch.Tensor:
    """Start a functional collective. Returns its result, not yet waited for."""
    assert dist.group.WORLD is not None
    result: torch.Tensor = getattr(FUNCTIONAL, operator)(*arguments, dist.group.WORLD.group_name)
    return result


def reduced_by_operator(tensor: torch.Tensor) -> None:
    FUNCTIONAL.wait_tensor(started("all_reduce_", tensor, "sum"))


def scattered_by_handle(tensor: torch.Tensor) -> None:
    handle = dist.reduce_scatter_tensor(torch.empty(tensor.numel() // 2), tensor, async_op=True)
    assert handle is not None
    del tensor
    handle.wait()


def scattered_by_operator(tensor: torch.Tensor) -> None:
    scattered = started("reduce_scatter_tensor", tensor, "sum", 2)
    del tensor
    FUNCTIONAL.wait_tensor(scattered)


def gathered_by_operator(tensor: torch.Tensor) -> None:
    FUNCTIONAL.wait_tensor(started("all_gather_into_tensor", tensor[: tensor.numel() // 2].clone(), 2))


def metered_collectives(collective: Callable[[torch.Tensor], None]) -> Memory:
    """The tensors grow, so that no new one at an old address tells the meter that the old one is freed."""
    with meter("cpu") as memory:
        for i in range(200):
            collective(torch.ones(1000 * (i + 1)))
        memory.mark("after_step")
    return Memory(memory.phases, memory.peak)


@pytest.mark.parametrize(
    ("collective", "times"),
    [
        (reduced_by_handle, 1),
        pytest.param(reduced_by_operator, 1, marks=pytest.mark.sweep),
        pytest.param(scattered_by_handle, 2.5, marks=pytest.mark.sweep),
        pytest.param(scattered_by_operator, 2.5, marks=pytest.mark.sweep),
        (gathered_by_operator, 3.5),
    ],
)
def test_tensors_of_collectives_are_seen_to_be_freed(
    collective: Callable[[torch.Tensor], None], times: float, pair: World
) -> None:
    """The peak holds the input and the output of the last collective, and Gloo's copies."""
    if pair.device != "cpu":
        pytest.skip("it is Gloo's worker thread that frees them unseen")
    for memory in pair.run(metered_collectives, collective):
        assert memory.phases["after_step"] == 0
        assert memory.peak == times * 200 * 4000


def test_available_bytes_are_within_the_machine(device: str) -> None:
    assert 2**20 < available_bytes(device) < 2**50


def test_on_cuda_a_share_of_what_is_free_is_left_for_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80_000, 85_000))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    assert 0.92 * 80_000 <= available_bytes("cuda") <= 0.95 * 80_000


def test_out_of_memory_is_told_from_other_errors() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    assert not is_out_of_memory(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert not is_out_of_memory(ValueError("can't allocate memory for names"))
    assert not is_out_of_memory(None)
