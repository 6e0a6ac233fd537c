"""Random calls of attention: shapes, values, layouts, which tensors share memory, modes, and how backward is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from hypothesis import strategies as st
from torch import Tensor

from correctness.attention.accuracy import random_inputs
from correctness.engine.calls import BACKWARDS, MODES, nearly_twice
from correctness.engine.examples import autocast_takes
from correctness.engine.strides import EXPANDED, any_strides, any_strides_of_rows

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "heads_inside": lambda x: x.transpose(-3, -2).contiguous().transpose(-3, -2) if x.ndim > 2 else x,
    "columns_apart": lambda x: x.repeat_interleave(2, dim=-1)[..., ::2],
    "rows_inside": lambda x: x.mT.contiguous().mT,
    "odd_offset": lambda x: torch.cat([x[..., :1], x], dim=-1)[..., 1:],
    "rows_of_more": lambda x: _rows_of_more(x),
    "heads_of_a_projection": lambda x: _rows_of_more(x.transpose(-3, -2)).transpose(-3, -2) if x.ndim > 2 else x,
    **EXPANDED,
    # PyTorch's SDPA on a CPU has errors for rows that overlap: in half precision, and of fewer rows than columns.
    "windows": lambda x: (_rows_of_more if x.itemsize == 2 or x.shape[-2] < x.shape[-1] else EXPANDED["windows"])(x),
    "any_strides": any_strides,
    "any_strides_of_rows": any_strides_of_rows,
}


def _rows_of_more(x: Tensor) -> Tensor:
    return torch.cat([x, x], dim=-2)[..., : x.shape[-2], :]


PROFILES: dict[str, Callable[[Tensor], Tensor]] = {  # profile of the scores over keys at 0 to 1, as a share
    "none": torch.zeros_like,
    "rising": lambda at: at,
    "falling": lambda at: -at,
    "first_key": lambda at: (at == 0).to(at.dtype),
    "last_key": lambda at: (at == 1).to(at.dtype),
    "low_halves": lambda at: -(at * 8 % 2).floor(),
    "all_low": lambda at: -torch.ones_like(at),
}


@dataclass(frozen=True)
class Call:
    """One random call; the last of `leading` is the number of heads of k, and q has `group` times as many."""

    leading: tuple[int, ...]
    group: int
    q_len: int
    k_len: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    size: float
    """Size of v and of the output's gradient; float16 has 1."""
    profile: str
    top: float
    """The profile's height in scores: weights of exp(-25) count in float64, those of exp(-200) in no dtype."""
    is_causal: bool
    layouts: tuple[str, ...]
    shared: str
    """Inputs that are one tensor, or the first rows of another."""
    nan: tuple[str, float] | None
    """Put a NaN into v at that share of the keys; then only the output is checked. PyTorch's SDPA loses some NaNs in
    k."""
    mode: str
    needs: str
    backward: str
    checkpointed: bool
    later: bool
    """Run backward after all calls, last call first."""
    seed: int

    def inputs(self, device: str) -> list[Tensor]:
        """Draw q, k, v, and the output's gradient."""
        torch.manual_seed(self.seed)
        q_leading = (*self.leading[:-1], self.leading[-1] * self.group) if self.leading else ()
        shapes = (*q_leading, self.q_len, self.head_dim), (*self.leading, self.k_len, self.head_dim)
        q, k, v, grad = random_inputs(*shapes, torch.float32, device)
        q, k = self.scale * q, self.scale * k
        if self.arithmetic != torch.float16:  # which rounds small numbers to zero, and whose large sums overflow
            v, grad = self.size * v, self.size * grad
        if self._has_profile():
            at = torch.linspace(0, 1, self.k_len, device=device) if self.k_len > 1 else torch.ones(1, device=device)
            q[..., 0], k[..., 0] = 4.0, PROFILES[self.profile](at) * self._top() * self.head_dim**0.5 / 4
        tensors = [x.to(self.dtype) for x in (q, k, v, grad)]
        if self.nan:
            tensors["qkv".index(self.nan[0])][..., self.nan_key, 0] = torch.nan
        q, k, v, grad = (LAYOUTS[how](x) for how, x in zip(self.layouts, tensors, strict=True))
        if self.nan:  # other layouts may skip the element
            k, v = tensors[1:3]
        elif self.shared == "k_and_v":
            v = k
        elif self.shared == "q_in_k" and self.group == 1 and self.q_len <= self.k_len:
            q = k[..., : self.q_len, :]
        elif self.shared != "none" and shapes[0] == shapes[1]:
            q, k, v = {
                "q_and_k": (k, k, v),
                "q_in_k": (k, k, v),
                "all": (k, k, k),
                "one_projection": torch.cat([q, k, v], dim=-1).split(self.head_dim, dim=-1),
            }[self.shared]
        return [q, k, v, grad]

    def _has_profile(self) -> bool:
        """Return False if large numbers in k would be q's or v's too: float16 has no such scores or gradients."""
        return self.profile != "none" and self.shared in ("none", "one_projection")

    def _top(self) -> float:
        half = self.dtype.itemsize == 2 or "autocast" in self.mode
        return min(self.top, 200.0) if half else self.top  # float16 ends at 65,504

    @property
    def is_possible(self) -> bool:
        return autocast_takes(self.mode, self.dtype)

    @property
    def nan_key(self) -> int:
        return int(self.nan[1] * (self.k_len - 1)) if self.nan else -1

    @property
    def arithmetic(self) -> torch.dtype:
        """The dtype that products may have."""
        cast = "autocast" in self.mode and self.dtype != torch.float64
        return getattr(torch, self.mode.rpartition(" ")[2]) if cast else self.dtype

    def __str__(self) -> str:
        """Describe the call without its usual settings."""
        q = (*self.leading[:-1], self.leading[-1] * self.group) if self.leading else ()
        words = [
            f"q {(*q, self.q_len, self.head_dim)}, k {(*self.leading, self.k_len, self.head_dim)} of {self.dtype}",
            "causal" if self.is_causal else "full",
            f"scores {self.profile} by {self._top():g}" if self._has_profile() else "",
            f"{self.shared} share memory" if self.shared != "none" else "",
            f"a NaN in {self.nan[0]} at key {self.nan_key}" if self.nan else "",
            f"layouts {'/'.join(self.layouts)}" if set(self.layouts) != {"contiguous"} else "",
            f"values of {self.size:g}" if self.size != 1 else "",
            self.mode,
            "checkpointed" if self.checkpointed else "",
        ]
        return ", ".join(filter(None, words))


LENGTHS = st.integers(1, 20) | st.sampled_from([31, 32, 33, 63, 64, 65, 127, 128, 129])

layouts = st.just("contiguous") | st.sampled_from(list(LAYOUTS))

CALLS = st.builds(
    Call,
    leading=st.lists(st.integers(1, 3), max_size=3).map(tuple)
    | st.lists(st.integers(1, 3), max_size=3).map(tuple)
    | st.sampled_from([(1, 2, 1, 2), (2, 1, 1, 1, 2)]),
    group=st.integers(1, 3) | st.sampled_from([1, 8, 17]),
    q_len=LENGTHS,
    k_len=LENGTHS,
    head_dim=st.sampled_from([16, 8, 32, 12, 64, 1, 3, 24, 40, 72, 128, 136, 192, 256]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    scale=st.sampled_from([1.0, 0.1, 5.0]),
    size=st.just(1.0) | st.sampled_from([1e-8, 1e6]),
    profile=st.just("none") | st.sampled_from(list(PROFILES)),
    top=st.sampled_from([25.0, 200.0, 30_000.0]),
    is_causal=st.booleans(),
    layouts=st.tuples(*[layouts] * 4) | layouts.map(lambda how: (how,) * 4),
    shared=st.just("none") | st.sampled_from(["k_and_v", "q_and_k", "q_in_k", "all", "one_projection"]),
    nan=st.none() | st.none() | st.tuples(st.just("v"), st.sampled_from([0.0, 0.3, 1.0])),
    mode=st.just("gradients") | st.sampled_from(list(MODES)),
    needs=st.just("qkv") | st.sampled_from(["q", "k", "v", "qk", "qv", "kv"]),
    backward=st.sampled_from(BACKWARDS),
    checkpointed=st.sampled_from([False, False, False, True]),
    later=st.booleans(),
    seed=st.integers(0, 2**20),
).filter(lambda call: call.is_possible)


@st.composite
def self_attention(draw: st.DrawFn) -> Call:
    """Draw one tensor, or one projection, for q, k and v, or k's first rows for q, as the last layer's queries may be;
    most roots of head_dim are no powers of two."""
    call, length = draw(CALLS), draw(LENGTHS)
    shared = draw(st.sampled_from(["q_and_k", "q_in_k", "all", "one_projection"]))
    k_len = length + draw(LENGTHS) * (shared == "q_in_k")
    head_dim = draw(st.sampled_from([12, 24, 40, 3, 16]))
    return replace(call, group=1, q_len=length, k_len=k_len, head_dim=head_dim, shared=shared, nan=None)


@st.composite
def scores_far_apart(draw: st.DrawFn) -> Call:
    """Draw few queries and many keys: full tiles with tiny weights, a NaN whose weight rounds to zero, large masked
    scores."""
    call, nan = draw(CALLS), draw(st.none() | st.tuples(st.just("v"), st.sampled_from([0.0, 0.3, 1.0])))
    return replace(
        call,
        q_len=draw(st.integers(1, 40)),
        k_len=draw(st.sampled_from([2, 17, 40, 64, 65, 129])),
        dtype=draw(st.sampled_from([torch.float64, torch.float64, torch.float32])),
        profile=draw(st.sampled_from(["rising", "falling", "first_key", "last_key", "low_halves"])),
        top=draw(st.sampled_from([25.0, 30.0, 200.0, 30_000.0])),
        scale=draw(st.sampled_from([0.1, 1.0])),
        layouts=("contiguous",) * 4,
        shared="none",
        nan=nan,
        mode=draw(st.sampled_from(["gradients", "gradients", "no_grad"])),
    )


@st.composite
def one_query(draw: st.DrawFn) -> Call:
    """Draw one query without gradients, which in causal attention sees the first key alone."""
    mode = draw(st.sampled_from(["nothing_requires_grad", "no_grad", "inference_mode"]))
    group, is_causal = draw(st.sampled_from([1, 1, 2])), draw(st.sampled_from([True, True, False]))
    k_len = draw(st.sampled_from([1, 2, 40]))
    return replace(draw(CALLS), group=group, q_len=1, k_len=k_len, is_causal=is_causal, shared="none", mode=mode)


ANY = CALLS | CALLS | self_attention() | scores_far_apart() | one_query()

HISTORIES = st.lists(ANY, min_size=1, max_size=3) | nearly_twice(
    ANY, "dtype", "is_causal", "k_len", "group", "needs", "scale", dtype=torch.float32
)
