"""Gluon kernels of attention, run on CPU by an emulator of their asynchronous parts: results, and planted faults."""

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", exc_type=ImportError)

from correctness.attention.accuracy import assert_as_accurate_as_eager, random_inputs, results
from correctness.attention.textbook import scores_of
from correctness.support.gluon_emulator import Hang, emulated
from correctness.support.kernel_faults import every_fourth, with_fault
from impl.attention import Attention, as_attention, eager_attention, flash_gluon, gluon_backward, gluon_forward
from impl.attention.flash_gluon import HEAD_DIMS

pytestmark = pytest.mark.usefixtures("poisoned")

Emulate = Callable[..., Attention]

CAUSAL = pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
ORDER = pytest.mark.parametrize("copies_first", [True, False], ids=["copies_first", "products_first"])


@pytest.fixture
def emulate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Emulate]:
    """Attention by the Gluon kernels of two modules, emulated. The products are small: PyTorch's threads would only
    wait for one another."""

    def attention(
        copies_first: bool, forward: ModuleType = gluon_forward, backward: ModuleType = gluon_backward
    ) -> Attention:
        monkeypatch.setattr(flash_gluon, "gluon_forward", emulated(forward, copies_first))
        monkeypatch.setattr(flash_gluon, "gluon_backward", emulated(backward, copies_first))
        monkeypatch.setattr(flash_gluon, "requires_hopper", lambda device: None)
        return as_attention(flash_gluon.FlashAttentionGluon)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield attention
    torch.set_num_threads(threads)


CALLS = [
    pytest.param(True, True, id="causal-copies_first"),
    pytest.param(False, False, id="full-products_first"),
    pytest.param(True, False, id="causal-products_first", marks=pytest.mark.sweep),
    pytest.param(False, True, id="full-copies_first", marks=pytest.mark.sweep),
]


@pytest.mark.parametrize(("is_causal", "copies_first"), CALLS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_results_are_as_accurate_as_eager(head_dim: int, is_causal: bool, copies_first: bool, emulate: Emulate) -> None:
    """Grouped heads, a batch of 2, and tiles of queries and keys that are partly out of bounds."""
    inputs = random_inputs((2, 2, 201, head_dim), (2, 1, 301, head_dim), torch.float16, "cpu")
    assert_as_accurate_as_eager(emulate(copies_first), inputs, is_causal)
    _assert_log_sum_exp(inputs, is_causal)


def _assert_log_sum_exp(inputs: list[Tensor], is_causal: bool) -> None:
    q, k, v = inputs[:3]
    _, found = flash_gluon.forward(q, k, v, is_causal)
    heads = k.repeat_interleave(q.shape[-3] // k.shape[-3], dim=-3)
    exact = scores_of(q.double(), heads.double(), is_causal).logsumexp(-1)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5)


LENGTHS = [(1, 1), (1, 300), (300, 1), (64, 128), (65, 129), (192, 128), (193, 257), (400, 97), (97, 500), (330, 390)]


@pytest.mark.sweep
@ORDER
@CAUSAL
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: "x".join(map(str, lengths)))
def test_any_lengths_are_as_accurate_as_eager(
    lengths: tuple[int, int],
    head_dim: int,
    is_causal: bool,
    copies_first: bool,
    emulate: Emulate,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Programs go through at most 3 heads before the next."""
    monkeypatch.setattr(flash_gluon, "CACHE_BYTES", 3 * 4 * lengths[1] * head_dim)
    inputs = random_inputs((2, 4, lengths[0], head_dim), (2, 2, lengths[1], head_dim), torch.bfloat16, "cpu")
    assert_as_accurate_as_eager(emulate(copies_first), inputs, is_causal)
    _assert_log_sum_exp(inputs, is_causal)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "heads_inside": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "wide_rows": lambda x: torch.cat([x, x], dim=-1)[..., : x.shape[-1]],
    "odd_offset": lambda x: torch.cat([x[..., :1], x], dim=-1)[..., 1:],
    "expanded": lambda x: x[:, :, :1].expand_as(x),
}


@pytest.mark.parametrize("view", VIEWS)
def test_any_strides_are_read(view: str, emulate: Emulate) -> None:
    """A descriptor reads the first two; of the others there are copies."""
    inputs = [VIEWS[view](x) for x in random_inputs((2, 2, 70, 64), (2, 2, 131, 64), torch.float16, "cpu")]
    assert_as_accurate_as_eager(emulate(copies_first=True), inputs, is_causal=True)


@ORDER
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_an_infinite_key_that_no_query_attends_to_counts_for_nothing(
    head_dim: int, copies_first: bool, emulate: Emulate
) -> None:
    """In the gradient of q, eager multiplies it by zero, too."""
    inputs = random_inputs((2, 70, head_dim), (1, 75, head_dim), torch.float16, "cpu")
    exact = results(eager_attention, [x.double() for x in inputs], is_causal=True)
    inputs[1][:, 71:] = math.inf
    found = results(emulate(copies_first), inputs, is_causal=True)
    for name in ("out", "dk", "dv"):
        _assert_close(found[name], exact[name])


def _assert_infinity_stays_in_its_row(attention: Attention) -> None:
    """The gradient of one query's output is infinite: gradients that do not depend on it are right."""
    row = 5
    inputs = random_inputs((2, 70, 64), (1, 75, 64), torch.float16, "cpu")
    exact = results(eager_attention, [x.double() for x in inputs], is_causal=True)
    inputs[3][:, row] = math.inf
    found = results(attention, inputs, is_causal=True)
    for name, others in {"dq": [*range(row), *range(row + 1, 70)], "dk": [*range(row + 1, 75)]}.items():
        _assert_close(found[name][:, others], exact[name][:, others])


def _assert_close(found: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(found.double(), exact, rtol=5e-3, atol=5e-3)


@ORDER
def test_an_infinite_gradient_of_a_row_stays_in_its_row(copies_first: bool, emulate: Emulate) -> None:
    _assert_infinity_stays_in_its_row(emulate(copies_first))


def test_without_a_second_mask_an_infinite_gradient_reaches_later_keys(emulate: Emulate, tmp_path: Path) -> None:
    again = "of_rows = gl.where(_seen(rows, columns, q_len, k_len, IS_CAUSAL), of_rows, 0.0)"
    unmasked = with_fault(gluon_backward, tmp_path, again, "pass")
    with pytest.raises(AssertionError, match="not close"):
        _assert_infinity_stays_in_its_row(emulate(True, backward=unmasked))


WRONG, HANGS, TOO_MANY = "error", "partitions wait", "more arrivals than"
WAIT_FOR_OUT = "        acc, operand = warpgroup_mma_wait(0, deps=[added, following])\n        thread_barrier()\n"
RELEASE_V = "        mbarrier.arrive(v_empty.index(last), count=1)\n"
RELEASE_K = "        mbarrier.arrive(k_empty.index(stage), count=1)\n"
WAIT_FOR_V = "        mbarrier.wait(v_full.index(last), last_phase)\n"
ADD = "        added = warpgroup_mma(operand, v_tiles.index(last).reshape([BLOCK_N, HEAD_DIM]), acc, is_async=True)\n"
RESCALE = "acc = acc * gl.expand_dims(gl.convert_layout(rescale, gl.SliceLayout(1, OF_OUT)), 1)"
MASK_PROBS = "probs = gl.where(_seen(rows, columns, q_len, k_len, IS_CAUSAL), probs, 0.0)"
IN_FORWARD = {  # text in the source, its faulty replacement, whether copies go first, and how it is seen
    "k is not released": (RELEASE_K, "", True, HANGS),
    "v is released while its product reads it": (WAIT_FOR_OUT + RELEASE_V, RELEASE_V + WAIT_FOR_OUT, True, WRONG),
    "k is loaded before it is released": ("mbarrier.wait(k_empty.index(stage), phase ^ 1)", "pass", True, HANGS),
    "k's release has the wrong phase": ("k_empty.index(stage), phase ^ 1", "k_empty.index(stage), phase", True, HANGS),
    "k is released by the first group": ("k_empty.index(i), count=GROUPS", "k_empty.index(i), count=1", True, HANGS),
    "q is not waited for": ("mbarrier.wait(q_full, 0)", "pass", False, WRONG),
    "v is waited for too late": (WAIT_FOR_V + ADD, ADD + WAIT_FOR_V, False, WRONG),
    "v is waited for in phase 0 alone": (WAIT_FOR_V, WAIT_FOR_V.replace("last_phase", "0"), False, WRONG),
    "half of v is expected": ("v_full.index(stage), BLOCK_N *", "v_full.index(stage), BLOCK_N // 2 *", True, HANGS),
    "scores are read early": ("wait(1, deps=[product])", "wait(2, deps=[product])", True, WRONG),
    "output is read early": ("wait(0, deps=[added, ", "wait(1, deps=[added, ", True, WRONG),
    "output is copied without a fence": ("    fence_async_shared()\n    tma", "    tma", True, WRONG),
    "output is not waited for": ("tma.store_wait(0)", "pass", False, WRONG),
    "output is not rescaled": (RESCALE, "pass", True, WRONG),
    "sums are not rescaled": ("row_sum * rescale", "row_sum", True, WRONG),
    "later keys are not masked": ("<= gl.expand_dims(rows, 1)", "< 2 * k_len", True, WRONG),
    "keys past the last are not masked": ("columns < k_len", "columns >= 0", True, WRONG),
}  # fmt: skip
IN_BACKWARD = {
    "k and v are not waited for": ("mbarrier.wait(keys_loaded, 0)", "pass", False, WRONG),
    "q is not waited for": ("mbarrier.wait(loaded.index(stage), (step // STAGES) & 1)", "pass", False, TOO_MANY),
    "q is overwritten while products read it": ("STAGES = gl.constexpr(2)", "STAGES = gl.constexpr(1)", True, WRONG),
    "phases start again with each head": ("(step // STAGES) & 1", "(t // STAGES) & 1", True, HANGS),
    "scores are read early": ("wait(1, deps=[of_scores])", "wait(2, deps=[of_scores])", True, WRONG),
    "gradient of probabilities is read early": ("wait(1, deps=[of_probs])", "wait(2, deps=[of_probs])", True, WRONG),
    "gradient of q is read early": ("wait(1, deps=[of_queries])", "wait(2, deps=[of_queries])", True, WRONG),
    "sums of k and v are read early": ("wait(0, deps=[acc_k, acc_v])", "wait(1, deps=[acc_k, acc_v])", True, WRONG),
    "scores are stored without a fence": ("                fence_async_shared()\n", "", True, WRONG),
    "statistics are the next tile's": ("row_lse = own.slice", "own.store(following); row_lse = own.slice", True, WRONG),
    "probabilities are not masked": (MASK_PROBS, "pass", True, WRONG),
    "buffer is not zero at first": ("tl.store(buffer", "(lambda *_: None)(buffer", True, WRONG),
}  # fmt: skip
FAULTS = {
    f"{module.__name__.split('_')[-1]}: {name}": (module, *fault)
    for module, faults in ((gluon_forward, IN_FORWARD), (gluon_backward, IN_BACKWARD))
    for name, fault in faults.items()
}


def _assert_right(attention: Attention) -> None:
    """Four tiles of keys, as many as stages have phases."""
    for is_causal in (True, False):
        inputs = random_inputs((2, 70, 64), (1, 390, 64), torch.float16, "cpu")
        assert_as_accurate_as_eager(attention, inputs, is_causal)


@ORDER
def test_without_a_fault_nothing_is_seen(copies_first: bool, emulate: Emulate) -> None:
    _assert_right(emulate(copies_first))


@pytest.mark.parametrize("fault", every_fourth(FAULTS))
def test_a_planted_fault_is_seen(fault: str, emulate: Emulate, tmp_path: Path) -> None:
    module, right, wrong, copies_first, seen_as = FAULTS[fault]
    direction = "forward" if module is gluon_forward else "backward"
    attention = emulate(copies_first, **{direction: with_fault(module, tmp_path, right, wrong)})
    with pytest.raises((AssertionError, Hang), match=seen_as):
        _assert_right(attention)


def test_a_hang_is_an_error_and_leaves_no_thread(emulate: Emulate, tmp_path: Path) -> None:
    emulate(copies_first=True, forward=with_fault(gluon_forward, tmp_path, RELEASE_V, ""))
    before = threading.enumerate()
    q, k, v, _ = random_inputs((70, 64), (390, 64), torch.float16, "cpu")
    with pytest.raises(Hang, match="4 partitions wait"):
        flash_gluon.forward(q, k, v, is_causal=False)
    assert threading.enumerate() == before
