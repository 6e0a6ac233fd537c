"""Every implementation of the collectives against sums and concatenations done by hand."""

import gc
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import product

import pytest
import torch
import torch.distributed as dist

from correctness.collectives.summing import Call, small_integers
from correctness.engine.examples import BESIDE_LAUNCHES
from correctness.engine.histories_on_ranks import even_and_odd_ranks
from correctness.support.communication import delayed
from correctness.support.on_ranks import assert_nothing_wrong
from impl.collectives import Backend, OnGloo, accounting, count_bytes_sent, segments
from impl.collectives.cases import COLLECTIVES
from shardmark.api import Implementation
from shardmark.meter.communication import tcp_bytes_sent
from shardmark.plugin import WorldsBySize
from shardmark.plugin.session import SESSION
from shardmark.ranks.world import World, available_ranks
from shardmark.ranks.worlds import Worlds

OURS = ("ring", "direct")

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8]
SIZES = [0, 1, 97]
"""Sizes of the smaller tensor, or of an all-reduce's; most numbers of ranks do not divide them."""

LARGE = 300_007
"""Size of the larger tensor: more than 1 MiB of float32, and no multiple of it."""


RANKS = [
    *range(1, 5),
    *(pytest.param(n, marks=pytest.mark.judged if n == 7 else pytest.mark.sweep) for n in range(5, 9)),
]
"""World sizes that judge `--impl`. The others run in the sweep: these already include powers of two and odd numbers."""


@pytest.fixture(scope="module", params=RANKS, ids=lambda n: f"{n}ranks")
def size_and_worlds(request: pytest.FixtureRequest, device: str) -> Iterator[tuple[int, Worlds]]:
    """Each world size up to eight in turn."""
    if available_ranks(device) < request.param:
        pytest.skip(f"needs {request.param} ranks")
    with closing(Worlds(device)) as worlds:
        yield request.param, worlds


@pytest.fixture
def any_world(size_and_worlds: tuple[int, Worlds], worlds: WorldsBySize, pytestconfig: pytest.Config) -> World:
    """A world of that size, a new one if a test has broken it; `worlds` sets a deadline that reports hangs."""
    size, own = size_and_worlds
    own.deadline = pytestconfig.stash[SESSION].worlds.deadline
    return own.get(size)


def wrong_results(
    implementation: Implementation, name: str, device: str, dtypes: list[torch.dtype], segment_bytes: int | None
) -> list[str]:
    """Describe this rank's wrong results, over sizes and dtypes, out of place and in place."""
    target, wrong = implementation.watched, []
    with _segments_of(segment_bytes):
        places = [False] if name == "all_reduce" else [False, True]
        calls = product(dtypes, SIZES, places, [False])
        large = LARGE if name == "all_reduce" else LARGE // dist.get_world_size() + 1
        sizes = SIZES if segment_bytes else [*SIZES, large]  # a large tensor would have too many small segments
        some = product([torch.float32], sizes, places, [True])
        for dtype, size, in_place, async_op in [*calls, *some]:
            call = Call(name, small_integers(dtype), size, device, in_place=in_place)
            handle = call.start(target, async_op)
            if async_op:
                handle.wait()
            how = (" with the smaller tensor in the larger" if in_place else "") + (
                ", asynchronous" if async_op else ""
            )
            wrong += [line + how for line in call.wrong()]
    return wrong


@contextmanager
def _segments_of(nbytes: int | None) -> Iterator[None]:
    """Cut parts into segments of that size, so that small tensors have many."""
    before = segments.SEGMENT_BYTES
    segments.SEGMENT_BYTES = nbytes or before
    try:
        yield
    finally:
        segments.SEGMENT_BYTES = before


@pytest.mark.family("collectives")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_results_are_those_done_by_hand_on_one_to_eight_ranks(
    implementation: Implementation, any_world: World, name: str, device: str
) -> None:
    assert_nothing_wrong(any_world.run(wrong_results, implementation, name, device, DTYPES, None))


def wrong_complex_results(implementation: Implementation, name: str, device: str) -> list[str]:
    """Describe wrong results of complex numbers, which may be an error, on all ranks alike."""
    wrong = []
    with suppress(Exception):
        wrong += wrong_results(implementation, name, device, [torch.complex64, torch.complex128], None)
    with suppress(Exception):
        wrong += wrong_conjugates(implementation, name, device)
    return wrong


def wrong_conjugates(implementation: Implementation, name: str, device: str) -> list[str]:
    """Describe wrong results of `x.conj()`, whose memory holds x."""
    size, rank, inputs = dist.get_world_size(), dist.get_rank(), small_integers(torch.complex64)
    terms = [inputs(other, 5 * size) for other in range(size)]
    given, total = terms[rank].to(device, copy=True).conj(), sum(terms)
    if name == "all_reduce":
        found, expected = given, total
        implementation.watched.all_reduce(given)
    elif name == "reduce_scatter":
        found, expected = given.new_empty(5), total[5 * rank :][:5]
        implementation.watched.reduce_scatter(found, given)
    else:
        found, expected = given.new_empty(5 * size * size), torch.cat(terms)
        implementation.watched.all_gather(found, given)
    is_right = torch.equal(found.cpu().resolve_conj(), expected.conj().resolve_conj())
    return [] if is_right else [f"{name} of x.conj(), which is lazy, is not that of the conjugates"]


@pytest.mark.family("collectives")
@pytest.mark.parametrize("name", COLLECTIVES)
def test_results_of_complex_numbers_are_right_or_an_error(
    implementation: Implementation, world: World, name: str, device: str
) -> None:
    assert_nothing_wrong(world.run(wrong_complex_results, implementation, name, device))


@pytest.mark.family("collectives", only=OURS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_results_do_not_depend_on_the_segments(
    implementation: Implementation, any_world: World, name: str, device: str
) -> None:
    assert_nothing_wrong(any_world.run(wrong_results, implementation, name, device, [torch.float32], 40))


def so_many_at_once(implementation: Implementation, count: int, device: str) -> list[str]:
    """Start `count` collectives of each kind; wait for the last one first."""
    wrong = []
    for name in COLLECTIVES:
        calls = [Call(name, small_integers(torch.float32, seed), 3, device) for seed in range(count)]
        for handle in [call.start(implementation.watched, async_op=True) for call in calls][::-1]:
            handle.wait()
        wrong += [f"{i + 1} of {count} under way: {line}" for i, call in enumerate(calls) for line in call.wrong()]
    return wrong


@pytest.mark.family("collectives")
@pytest.mark.examples(1, 4, 9)
def test_any_number_may_be_under_way(implementation: Implementation, world: World, examples: int, device: str) -> None:
    for count in BESIDE_LAUNCHES[:examples]:
        assert_nothing_wrong(world.run(so_many_at_once, implementation, count, device))


def of_the_default_group_by_both_names(implementation: Implementation, device: str) -> list[str]:
    """Start all-reduces of `None` and of the world, which are one group, without waiting; the last rank is late."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    all_reduce = implementation.watched.all_reduce
    all_reduce(torch.ones(1, device=device), group=dist.group.WORLD)
    names = [None, None, dist.group.WORLD, None]
    tensors = [torch.full((4,), float(10**i + rank), device=device) for i in range(len(names))]
    handles = []
    with delayed(on=ranks - 1):  # by nothing: the operators that it replaces stay so while threads communicate
        for tensor, group in zip(tensors, names, strict=True):
            with delayed(before=0.1, on=ranks - 1):
                handles.append(all_reduce(tensor, group=group, async_op=True))
        for handle in handles:
            handle.wait()
    found = [tensor[0].item() for tensor in tensors]
    expected = [float(ranks * 10**i + ranks * (ranks - 1) // 2) for i in range(len(names))]
    return [] if found == expected else [f"by None, None, WORLD and None all-reduces give {found}, not {expected}"]


@pytest.mark.family("collectives")
def test_the_default_group_is_one_group_by_either_name(
    implementation: Implementation, world: World, device: str
) -> None:
    assert_nothing_wrong(world.run(of_the_default_group_by_both_names, implementation, device))


@pytest.mark.family("collectives")
def test_all_calls_are_of_one_object(implementation: Implementation) -> None:
    """A class may keep a thread on which everything runs in the order in which it was started."""
    assert implementation.adapted is implementation.adapted


def in_groups_side_by_side(implementation: Implementation, device: str) -> list[str]:
    """Use two groups side by side and, at the same time, the world."""
    return _wrong_in(implementation, [even_and_odd_ranks()[1], None], device)


def _wrong_in(implementation: Implementation, groups: list[dist.ProcessGroup | None], device: str) -> list[str]:
    """Describe wrong results in this rank's groups, with synchronous and asynchronous collectives."""
    target, wrong = implementation.watched, []
    for async_op in (False, True):
        calls = [
            Call(name, small_integers(torch.float32, seed), 13, device, group=group)
            for name in COLLECTIVES
            for seed, group in enumerate(groups)
        ]
        handles = [call.start(target, async_op) for call in calls]
        for handle in handles[::-1] if async_op else ():
            handle.wait()
        when = "after all waits, in the order from last to first: " if async_op else ""
        wrong += [when + line for call in calls for line in call.wrong()]
    return wrong


@pytest.mark.family("collectives")
def test_groups_side_by_side_have_their_own_results(
    implementation: Implementation, any_world: World, device: str
) -> None:
    assert_nothing_wrong(any_world.run(in_groups_side_by_side, implementation, device))


def in_groups_that_come_and_go(implementation: Implementation, device: str) -> list[str]:
    """Use the world's ranks and this rank alone in turns, each time in a group that is made anew, and ended."""
    rank, ranks, wrong = dist.get_rank(), dist.get_world_size(), []
    for _ in range(6):
        for kind in ([[*range(ranks)]], [[other] for other in range(ranks)]):
            made = [dist.new_group(members) for members in kind]
            own = made[rank if len(made) > 1 else 0]
            wrong += _wrong_in(implementation, [own], device)
            dist.barrier()
            dist.destroy_process_group(own)
            del made, own
            gc.collect()
    return wrong


@pytest.mark.family("collectives")
def test_groups_come_and_go(implementation: Implementation, world: World, device: str) -> None:
    """A later group may have the address of an earlier one."""
    assert_nothing_wrong(world.run(in_groups_that_come_and_go, implementation, device))


def all_but_rank_0(implementation: Implementation, device: str) -> list[str]:
    group = dist.new_group([*range(1, dist.get_world_size())])
    return _wrong_in(implementation, [group], device) if dist.get_rank() else []


@pytest.mark.family("collectives")
def test_a_rank_outside_the_group_takes_no_part(implementation: Implementation, world: World, device: str) -> None:
    if world.size == 1:
        pytest.skip("one rank is in every group")
    assert_nothing_wrong(world.run(all_but_rank_0, implementation, device))


def bytes_counted(implementation: Implementation, name: str, elements: int, device: str) -> int:
    """Bytes that this rank's counter records as sent. `elements`: size of the larger tensor, in float64."""
    ranks = dist.get_world_size()
    arguments = {
        "all_reduce": [elements],
        "reduce_scatter": [elements // ranks, elements],
        "all_gather": [elements, elements // ranks],
    }
    tensors = [torch.zeros(n, dtype=torch.float64, device=device) for n in arguments[name]]
    with count_bytes_sent() as sent:
        getattr(implementation.watched, name)(*tensors)
    getattr(implementation.watched, name)(*tensors)  # not counted
    return sent.nbytes


@pytest.mark.family("collectives", only=OURS)
@pytest.mark.parametrize("name", COLLECTIVES)
def test_bytes_sent_are_those_of_theory(
    implementation: Implementation, any_world: World, name: str, device: str
) -> None:
    n = any_world.size
    elements = 840 * 300 + (1 if name == "all_reduce" else 0)  # parts of two sizes
    exact = {"ring": accounting.ring_bytes_sent, "direct": accounting.direct_bytes_sent}[implementation.name]
    sent = any_world.run(bytes_counted, implementation, name, elements, device)
    assert sent == [exact(name, elements, 8, rank, n) for rank in range(n)]
    assert sum(sent) == (2 if name == "all_reduce" else 1) * (n - 1) * elements * 8
    if name != "all_reduce":
        assert sent == [accounting.bytes_sent(name, elements * 8, n)] * n


MEGABYTES = 8


def bytes_on_the_wire(target: object, name: str) -> float:
    """Bytes that the kernel counts as sent by this rank, as a share of the larger tensor."""
    ranks = dist.get_world_size()
    large = torch.zeros(MEGABYTES * 2**18)
    small = large[: large.numel() // ranks].clone()
    tensors = {"all_reduce": [large], "reduce_scatter": [small, large], "all_gather": [large, small]}[name]
    dist.barrier()
    before = tcp_bytes_sent()
    getattr(target, name)(*tensors)
    dist.barrier()  # all messages have left
    return (tcp_bytes_sent() - before) / large.nbytes


def test_gloos_reduce_scatter_is_an_all_reduce_and_ours_moves_half_the_bytes(device: str) -> None:
    """2(n-1)/n against (n-1)/n of the bytes, to a hundredth; the collectives chosen for Gloo send only what they
    must."""
    with World(2, "cpu") as world:
        shares = {name: world.run(bytes_on_the_wire, Backend(), name) for name in COLLECTIVES}
        ours = {name: world.run(bytes_on_the_wire, OnGloo(), name) for name in COLLECTIVES}
    assert shares["reduce_scatter"] == pytest.approx([1, 1], abs=0.01)
    for name, fraction in {"all_reduce": 1, "reduce_scatter": 0.5, "all_gather": 0.5}.items():
        assert ours[name] == pytest.approx([fraction] * 2, abs=0.01)
