"""Every data-parallel wrapper starts with rank 0's parameters and buffers, bit for bit."""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.data_parallel.averaging import wrap
from correctness.support.global_state import global_state_stays
from correctness.support.on_ranks import on_every_rank
from shardmark.api import Implementation

pytestmark = pytest.mark.family("data_parallel")


FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
INTEGERS = [torch.int64, torch.int32, torch.int8, torch.uint8]
COMPLEX = [torch.complex64, torch.complex128]


class Extremes(nn.Module):
    """Parameters and buffers whose bits arithmetic would change; bits differ between ranks."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        draw = torch.Generator().manual_seed(rank)
        self.p = nn.ParameterList(nn.Parameter(_bits(dtype, draw, rank)) for dtype in FLOATS)
        self.frozen = nn.Parameter(_bits(torch.float32, draw, rank), requires_grad=False)
        self.with_gaps = nn.Parameter(_bits(torch.float32, draw, rank).view(4, -1)[:, 1:4])
        for dtype in [*FLOATS, *INTEGERS, *COMPLEX, torch.bool]:
            self.register_buffer(f"buffer_of_{str(dtype).removeprefix('torch.')}", _bits(dtype, draw, rank))
        self.register_buffer("not_persistent", _bits(torch.float32, draw, rank), persistent=False)
        self.register_buffer("transposed", _bits(torch.float32, draw, rank).view(4, -1).T)
        self.register_buffer("positions", torch.arange(24).roll(rank).expand(1, -1))


class Alike(nn.Module):
    """Equal numbers in another order on each rank, and zeros of another sign: equal sums, other values."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.p = nn.ParameterList(nn.Parameter(torch.arange(24.0).roll(rank).to(dtype)) for dtype in FLOATS)
        self.zeros = nn.Parameter(torch.full((24,), -0.0 if rank else 0.0))
        for dtype in [*INTEGERS, *COMPLEX]:
            self.register_buffer(
                f"buffer_of_{str(dtype).removeprefix('torch.')}", torch.arange(24).roll(rank).to(dtype)
            )


class Unusual(nn.Module):
    """Buffers that Gloo has no broadcast for, and buffers whose elements share memory."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.ones(2))
        for dtype in [torch.int16, torch.float8_e4m3fn]:
            name = f"buffer_of_{str(dtype).removeprefix('torch.')}"
            self.register_buffer(name, torch.arange(24).roll(rank).to(dtype))
        self.register_buffer("expanded", torch.tensor([rank + 1.0, -rank]).unsqueeze(1).expand(2, 3))
        self.register_buffer("one_number", torch.tensor(rank + 0.5).expand(4))


def _bits(dtype: torch.dtype, draw: torch.Generator, rank: int) -> Tensor:
    """(24,): random bytes, including NaN payloads, subnormals and the dtype's extremes."""
    if dtype == torch.bool:
        return torch.randint(2, (24,), generator=draw).bool()
    bits = torch.randint(256, (16 * dtype.itemsize,), generator=draw).to(torch.uint8).view(dtype)
    if dtype.is_complex:
        return torch.view_as_complex(_bits(dtype.to_real(), draw, rank).view(12, 2)).repeat(2)
    if not dtype.is_floating_point:
        limits = torch.iinfo(dtype)
        return torch.cat([bits, torch.tensor([limits.min, limits.max, limits.max - 1, 0] * 2, dtype=dtype).roll(rank)])
    number = torch.finfo(dtype)
    tiny = number.smallest_normal * number.eps
    special = [-0.0, 0.0, torch.inf, -torch.inf, torch.nan, tiny, -tiny, number.max]
    return torch.cat([bits, torch.tensor(special, dtype=torch.float64).to(dtype).roll(rank)])


ANY_BUFFER = pytest.mark.should("buffers may be of every dtype, and expanded")


@pytest.mark.parametrize("kind", [Extremes, Alike, pytest.param(Unusual, marks=ANY_BUFFER)])
@on_every_rank
def test_every_rank_starts_with_rank_0s_to_the_bit(
    implementation: Implementation, kind: type[Extremes] | type[Alike] | type[Unusual], device: str
) -> list[str]:
    module = wrap(implementation, kind(dist.get_rank()).to(device)).module
    expected = kind(0)
    found = dict(module.named_parameters()) | dict(module.named_buffers())
    wrong = []
    for name, first in [*expected.named_parameters(), *expected.named_buffers()]:
        mine, first = (x.detach().cpu().flatten().contiguous() for x in (found[name], first))
        differ = (
            torch.ne(*(x.view(torch.uint8).view(len(x), -1) for x in (mine, first))).any(1).nonzero().flatten().tolist()
        )
        wrong += [
            f"after wrapping: {name!r} is not rank 0's to the bit: {len(differ)} of {len(first)} elements differ; "
            f"found {mine[i].item()!r} at [{i}], rank 0's is {first[i].item()!r}"
            for i in differ[:1]
        ]
    return wrong


@on_every_rank
def test_the_random_state_is_the_callers(implementation: Implementation, device: str) -> list[str]:
    """Ranks seed their data and their dropout differently, before they wrap a module."""
    module = nn.Linear(3, 2).to(device)
    with global_state_stays("wrapping a module"):
        wrap(implementation, module)
    return []
