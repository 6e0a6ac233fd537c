"""Every attention against float64: the keys a query sees, outputs, gradients, shapes, strides, dtypes."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from correctness.attention.accuracy import assert_as_accurate_as_eager, random_inputs, results
from correctness.attention.events import LAYOUTS
from correctness.engine.examples import one_beyond_tiles
from correctness.engine.strides import alike_and_each_its_own, far_apart
from correctness.support.contracts import assert_near, skip_if_slow
from impl.attention import eager_attention
from shardmark.api import Implementation

pytestmark = [pytest.mark.family("attention"), pytest.mark.usefixtures("poisoned")]

MASKS = pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
FLOAT16 = pytest.param(torch.float16, marks=pytest.mark.judged)

LENGTHS = {  # q_len, k_len
    "three": (3, 3),
    "fewer_keys_seen": (600, 300),
    "more_keys_seen": (300, 600),
    "beyond_2048": (2070, 2070),
    "queries_beyond_32768": (32_800, 3),
    "keys_beyond_32768": (3, 32_800),
}


def _marked(names: Iterable[str]) -> list[Any]:
    """Mark shapes that are slow in Triton's interpreter as `large`, and one of two similar shapes as `judged`."""
    marks = dict.fromkeys(LARGE, pytest.mark.large) | dict.fromkeys(("more_keys", "windows"), pytest.mark.judged)
    return [pytest.param(name, marks=marks.get(name, ())) for name in names]


LARGE = (
    *("tiles", "tile", "tile_and_one", "one_less_than_tiles", "beyond_1024", "keys_beyond_4096"),
    *(
        "one_query_of_long_keys",
        "beyond_2048",
        "queries_beyond_32768",
        "keys_beyond_32768",
        "fewer_keys_seen",
        "more_keys_seen",
    ),
)


@MASKS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FLOAT16], ids=str)
@pytest.mark.parametrize("shape_id", _marked(LENGTHS))
def test_a_query_sees_the_keys_up_to_its_own(
    implementation: Implementation, shape_id: str, dtype: torch.dtype, is_causal: bool, device: str
) -> None:
    """With all scores zero, each query gives equal weights to the keys that it sees.

    Column c of v is 1 at one key and 0 elsewhere, so out[i, c] is the weight that query i gives that key. Column c of
    the output's gradient is 1 at one query, so [j, c] of v's gradient is the weight that this query gives key j.
    """
    q_len, k_len = LENGTHS[shape_id]
    if "beyond" in shape_id:

        def part(share: int) -> object:
            shapes = (-(-q_len // share), 16), (-(-k_len // share), 16)
            return results(implementation.watched, random_inputs(*shapes, dtype, device), is_causal)

        skip_if_slow(implementation, part, device)
    keys, queries = _around_powers_of_two(k_len), _around_powers_of_two(q_len)
    q, k, v = (torch.zeros(n, 64, dtype=dtype, device=device) for n in (q_len, k_len, k_len))
    grad = torch.zeros_like(q)
    v[keys, torch.arange(len(keys))] = 1
    grad[queries, torch.arange(len(queries))] = 1
    found = results(implementation.watched, [q, k, v, grad], is_causal)
    positions, columns = torch.arange(q_len, device=device), torch.arange(k_len, device=device)
    seen = columns <= positions[:, None] if is_causal else torch.ones(q_len, k_len, dtype=torch.bool, device=device)
    weights = seen / seen.sum(-1, keepdim=True)  # (q_len, k_len)
    _assert_weights("forward", found["out"][:, : len(keys)], weights[:, keys], None, keys)
    _assert_weights("backward", found["dv"][:, : len(queries)].mT, weights[queries], queries, None)


def _around_powers_of_two(length: int) -> Tensor:
    """Return at most 40 positions: the first, the last, and those where tiles and small integer types end."""
    near = {2**power + more for power in range(3, 16) for more in (-1, 0, 1)}
    return torch.tensor(sorted((near | {0, 1, 2, length - 1}) & set(range(length)))[-40:])


def _assert_weights(when: str, found: Tensor, wanted: Tensor, queries: Tensor | None, keys: Tensor | None) -> None:
    rtol = 0.1 if found.dtype.itemsize == 2 else 1e-3  # enough to tell a visible key from a hidden one
    wrong = ~((found - wanted).abs() <= rtol * wanted + 1e-7)
    if wrong.any():
        row, column = wrong.nonzero()[0].tolist()
        query, key = (x if at is None else int(at[x]) for x, at in ((row, queries), (column, keys)))
        weight, expected = found[row, column].item(), wanted[row, column].item()
        pytest.fail(f"{when}: query {query} gives key {key} the weight {weight:.3g}, expected {expected:.3g}")


@pytest.mark.large
@pytest.mark.examples(25, 100, 399)
@pytest.mark.parametrize("of", ["queries", "keys"])
def test_none_is_lost_of_any_number(implementation: Implementation, examples: int, of: str, device: str) -> None:
    """For any tile size, the last key is seen and the last query is computed."""
    for n in one_beyond_tiles(examples):
        shapes = ((n, 16), (3, 16)) if of == "queries" else ((3, 16), (n, 16))
        inputs = random_inputs(*shapes, torch.float32, device)
        found = results(implementation.watched, inputs, is_causal=False)
        assert_near(found, results(eager_attention, [x.double() for x in inputs], is_causal=False), f"{n} {of}")


def test_is_causal_only_where_asked(implementation: Implementation, device: str) -> None:
    q, k, v, _ = random_inputs((2, 9, 16), (2, 9, 16), torch.float32, device)
    assert_near({"out": implementation.watched(q, k, v)}, {"out": eager_attention(q, k, v)}, "without is_causal")


SHAPES = {  # leading dims, q_len, k_len, head_dim
    "one_key": ((2,), 3, 1, 16),
    "one_query": ((2,), 1, 5, 16),
    "no_leading_dims": ((), 7, 7, 8),
    "many_leading_dims": ((1, 2, 1, 1, 3), 33, 33, 24),
    "tile": ((2,), 256, 256, 64),
    "tile_and_one": ((1,), 257, 257, 64),
    "one_less_than_tiles": ((1,), 511, 511, 16),
    "fewer_keys": ((2, 2), 301, 97, 32),
    "more_keys": ((2, 2), 97, 301, 32),
    "beyond_1024": ((1,), 1027, 1025, 16),
    "keys_beyond_4096": ((2,), 3, 4097, 16),
    "head_dim_5": ((2,), 9, 10, 5),
    "head_dim_80": ((1,), 70, 33, 80),
    "head_dim_96": ((1,), 33, 70, 96),
    "head_dim_128": ((1,), 140, 150, 128),
    "head_dim_160": ((1,), 33, 40, 160),
    "head_dim_257": ((1,), 9, 17, 257),
}


def _inputs(shape_id: str, dtype: torch.dtype, device: str) -> list[Tensor]:
    """Random q, k, v and the output's gradient."""
    leading, q_len, k_len, head_dim = SHAPES[shape_id]
    return random_inputs((*leading, q_len, head_dim), (*leading, k_len, head_dim), dtype, device)


def _part(implementation: Implementation, inputs: list[Tensor], is_causal: bool, share: int) -> object:
    some = [x[..., : -(-x.shape[-2] // share), :] for x in inputs]
    return results(implementation.watched, some, is_causal)


@MASKS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, FLOAT16], ids=str)
@pytest.mark.parametrize("shape_id", _marked(SHAPES))
@pytest.mark.compiled_every_time("fewer_keys-torch.float32-causal", "tile_and_one-torch.bfloat16-full")
def test_is_as_accurate_as_eager(
    implementation: Implementation, shape_id: str, dtype: torch.dtype, is_causal: bool, device: str
) -> None:
    inputs = _inputs(shape_id, dtype, device)
    if "beyond" in shape_id:
        skip_if_slow(implementation, partial(_part, implementation, inputs, is_causal), device)
    assert_as_accurate_as_eager(implementation.watched, inputs, is_causal)


@pytest.mark.large
@MASKS
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_many_queries_are_as_accurate_as_eager(
    implementation: Implementation, dtype: torch.dtype, is_causal: bool, device: str
) -> None:
    """Half precision is left out: on CPU, PyTorch's SDPA sums the gradients of v in it."""
    inputs = random_inputs((2, 4097, 16), (2, 3, 16), dtype, device)
    skip_if_slow(implementation, partial(_part, implementation, inputs, is_causal), device)
    assert_as_accurate_as_eager(implementation.watched, inputs, is_causal)


def test_leading_indices_do_not_see_each_other(implementation: Implementation, device: str) -> None:
    """The first sequence's scores are 900 times those of the others, which are as without it."""
    inputs = random_inputs((3, 40, 16), (3, 40, 16), torch.float32, device)
    wanted = results(eager_attention, [x[1:].double() for x in inputs], is_causal=True)
    for x in inputs[:2]:
        x[0] *= 30
    found = {name: x[1:] for name, x in results(implementation.watched, inputs, is_causal=True).items()}
    assert_near(found, wanted, "beside a sequence with large scores")


GROUPED = {  # shapes of q, and of k and v
    "two_groups": ((2, 4, 45, 16), (2, 2, 33, 16)),
    "one_key_head": ((2, 3, 45, 16), (2, 1, 33, 16)),
    "heads_alone": ((6, 45, 16), (2, 33, 16)),
    "many_leading_dims": ((1, 2, 1, 1, 4, 45, 16), (1, 2, 1, 1, 2, 33, 16)),
    "one_query": ((2, 4, 1, 16), (2, 2, 33, 16)),
    "one_query_of_long_keys": ((1, 8, 1, 64), (1, 2, 2100, 64)),
    "tiles": ((3, 200, 16), (1, 210, 16)),
    "more_than_16_in_a_group": ((1, 34, 5, 16), (1, 2, 9, 16)),
}


@MASKS
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.judged)], ids=str
)
@pytest.mark.parametrize("heads", _marked(GROUPED))
def test_takes_grouped_query_heads(
    implementation: Implementation, heads: str, dtype: torch.dtype, is_causal: bool, device: str
) -> None:
    """A tile may begin in one head's queries and end in the next one's: in `tiles` it ends in the next one's first."""
    assert_as_accurate_as_eager(implementation.watched, random_inputs(*GROUPED[heads], dtype, device), is_causal)


@pytest.mark.large
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_adds_up_the_gradients_of_a_large_group(
    implementation: Implementation, dtype: torch.dtype, device: str
) -> None:
    """Each of 64 heads adds to the gradient of v in the same direction, and roundings of partial sums would show."""
    inputs = random_inputs((1, 64, 32, 16), (1, 1, 32, 16), dtype, device)
    inputs[3].abs_()
    assert_as_accurate_as_eager(implementation.watched, inputs, False)


NON_CONTIGUOUS: dict[str, Callable[[Tensor], Tensor]] = {
    **{how: layout for how, layout in LAYOUTS.items() if how != "contiguous" and "any_strides" not in how},
    # one projection for q, k and v
    "one_projection": lambda x: torch.cat([x, x, x], dim=-1)[..., x.shape[-1] : 2 * x.shape[-1]],
}


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("how", _marked(NON_CONTIGUOUS))
def test_takes_non_contiguous_inputs(implementation: Implementation, how: str, dtype: torch.dtype, device: str) -> None:
    for layouts in alike_and_each_its_own(how, [*NON_CONTIGUOUS]):
        drawn = random_inputs((2, 3, 33, 24), (2, 3, 33, 24), dtype, device)
        inputs = [NON_CONTIGUOUS[each](x) for each, x in zip(layouts, drawn, strict=True)]
        assert not any(x.is_contiguous() for x in inputs)
        assert_as_accurate_as_eager(implementation.watched, inputs, is_causal=True)


@pytest.mark.long
@pytest.mark.parametrize(
    ("how", "long"),
    [
        *(pytest.param(how, False, id=how) for how in NON_CONTIGUOUS if how != "windows"),
        pytest.param("heads_of_a_projection", True, marks=pytest.mark.large, id="long_keys"),
    ],
)
def test_takes_one_query_of_non_contiguous_grouped_heads(
    implementation: Implementation, how: str, long: bool, device: str
) -> None:
    """A decoder's query may be the first of several, so that the stride of its heads is not that of its rows."""
    shapes = ((1, 8, 3, 64), (1, 2, 2100, 64)) if long else ((2, 4, 3, 16), (2, 2, 33, 16))
    q, k, v, grad = (NON_CONTIGUOUS[how](x) for x in random_inputs(*shapes, torch.float32, device))
    assert_as_accurate_as_eager(implementation.watched, [q[..., :1, :], k, v, grad[..., :1, :]], is_causal=False)


@pytest.mark.parametrize("shape", [(3, 16), (3, 2, 5, 16), (2, 3, 5, 16)], ids=["rows", "sequences", "heads"])
def test_takes_offsets_beyond_32_bits(implementation: Implementation, shape: tuple[int, ...], device: str) -> None:
    """The number of one times its stride, as of a slice of a buffer for all layers, is more than 32 bits hold."""
    inputs = far_apart(shape.index(3), *random_inputs(shape, shape, torch.bfloat16, device))
    assert_as_accurate_as_eager(implementation.watched, inputs, is_causal=True)


OF_THE_GRADIENT: dict[str, Callable[[Tensor], Tensor]] = {
    # as from `out.sum()`: one element in memory, all strides zero
    "of_a_sum": lambda x: x.flatten()[0].expand(x.shape),
    **NON_CONTIGUOUS,
}


@pytest.mark.long
@pytest.mark.parametrize("layout", _marked(OF_THE_GRADIENT))
def test_takes_any_layout_of_the_outputs_gradient(implementation: Implementation, layout: str, device: str) -> None:
    *qkv, grad = _inputs("many_leading_dims", torch.float32, device)
    inputs = [*qkv, OF_THE_GRADIENT[layout](grad)]
    wanted = results(eager_attention, [x.double() for x in inputs], is_causal=True)
    assert_near(results(implementation.watched, inputs, is_causal=True), wanted, f"output's gradient {layout}", 1e-4)


@pytest.mark.parametrize("needed", ["q", "k", "v", "qk", "kv"])
def test_gives_gradients_to_the_inputs_that_require_them(
    implementation: Implementation, needed: str, device: str
) -> None:
    inputs = _inputs("no_leading_dims", torch.float32, device)
    wanted = results(eager_attention, [x.double() for x in inputs], is_causal=True)
    q, k, v = (x.requires_grad_(name in needed) for name, x in zip("qkv", inputs[:3], strict=True))
    implementation.watched(q, k, v, is_causal=True).backward(inputs[3])
    for name, x in (("q", q), ("k", k), ("v", v)):
        if name in needed:
            assert x.grad is not None, f"{name} requires a gradient and has none, where {needed} require one"
            assert_near({f"d{name}": x.grad}, {f"d{name}": wanted[f"d{name}"]}, f"where {needed} require gradients")
        else:
            assert x.grad is None, f"{name} has a gradient and requires none"


@pytest.mark.judged
@pytest.mark.parametrize("many", ["queries", "keys", "sequences", "sequences_of_heads"])
def test_more_than_65536_of_them(implementation: Implementation, many: str, device: str) -> None:
    """Beyond what 16 bits count, in which kernels may number tiles, rows or programs."""
    batch, q_len, k_len = (
        65_600 if many.startswith(one) else few for one, few in (("sequences", 1), ("queries", 3), ("keys", 3))
    )
    leading = (batch, 1) if many == "sequences_of_heads" else (batch,)
    inputs = random_inputs((*leading, q_len, 16), (*leading, k_len, 16), torch.float32, device)

    def part(share: int) -> object:
        some = [x[: max(1, batch // share), ..., : max(3, x.shape[-2] // share), :] for x in inputs]
        return results(implementation.watched, some, False)

    skip_if_slow(implementation, part, device, share=64)
    assert_as_accurate_as_eager(implementation.watched, inputs, is_causal=False)
