"""Random calls of a loss: sizes, values, targets, options, layouts, modes, and how backward is run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from correctness.engine.calls import BACKWARDS, MODES, nearly_twice
from correctness.engine.examples import autocast_takes
from correctness.engine.strides import EXPANDED, any_strides, any_strides_of_rows
from correctness.loss.accuracy import Inputs, random_inputs

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "columns_apart": lambda x: x.repeat_interleave(2, dim=-1)[:, ::2],
    "rows_inside": lambda x: x.mT.contiguous().mT,
    "rows_apart": lambda x: x.repeat_interleave(2, dim=0)[::2],
    "odd_offset": lambda x: torch.cat([x[:, :1], x], dim=-1)[:, 1:],
    "one_for_all_rows": EXPANDED["one_for_all_rows"],
    "any_strides": any_strides,
    "any_strides_of_rows": any_strides_of_rows,
}

OF_TARGETS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": LAYOUTS["contiguous"],
    "apart": any_strides,
    "one for all": lambda x: x[:1].expand_as(x),
}

F64, F32, BF16, F16 = torch.float64, torch.float32, torch.bfloat16, torch.float16


@dataclass(frozen=True)
class Call:
    """One random call; targets equal to `ignored` are ignored: a word of the vocabulary, or another number."""

    tokens: int
    dim: int
    vocab: int
    dtype: torch.dtype
    weight_dtype: torch.dtype
    """dtype of weight under autocast; else it has hidden's."""
    ignored: int
    label_smoothing: float
    z_loss: float
    scale: float
    values: str
    targets: str
    layouts: tuple[str, str]
    targets_layout: str
    shared: bool
    """hidden and weight are one tensor, as if a model scored its embedding against itself."""
    grad: float
    mode: str
    needs: str
    backward: str
    checkpointed: bool
    later: bool
    seed: int

    @property
    def options(self) -> dict[str, Any]:
        """Return only the options in use, as an implementation may not have the others."""
        options = {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}
        given = {name: value for name, value in options.items() if value}
        return given if self.ignored == -100 else {"ignore_index": self.ignored} | given

    @property
    def is_possible(self) -> bool:
        return autocast_takes(self.mode, self.dtype, self.weight_dtype)

    @property
    def product(self) -> torch.dtype:
        cast = "autocast" in self.mode and self.dtype != F64
        return getattr(torch, self.mode.rpartition(" ")[2]) if cast else self.dtype

    def inputs(self, device: str) -> Inputs:
        torch.manual_seed(self.seed)
        tokens = self.vocab if self.shared else self.tokens
        inputs = random_inputs(tokens, self.dim, self.vocab, device, ignored=self.ignored)
        hidden, weight, targets = self.scale * inputs.hidden, inputs.weight, inputs.targets
        if self.values == "large_hidden" and not self.shared:  # float16 cannot hold the sum
            hidden, weight = 2000 + hidden, weight / 2000
        elif self.values == "large_logits" and self.product != F16:  # that float16 cannot hold
            hidden = 1e5 * hidden
        elif self.values in ("all_high", "all_low") and self.dim > 1:  # adds a constant to every logit
            by = 30.0 if self.product.itemsize == 2 or self.z_loss else 1000.0
            hidden[:, 0], weight[:, 0] = 10.0, (by if self.values == "all_high" else -by) / 10
        if self.targets == "all_ignored":
            targets.fill_(self.ignored)
        elif self.targets == "last_alone":
            targets[:-1] = self.ignored
        elif self.targets in ("first_word", "last_word"):
            targets.fill_(0 if self.targets == "first_word" else self.vocab - 1)
        of_weight = self.weight_dtype if "autocast" in self.mode and self.dtype != F64 else self.dtype
        hidden, weight = LAYOUTS[self.layouts[0]](hidden.to(self.dtype)), LAYOUTS[self.layouts[1]](weight.to(of_weight))
        if self.shared:
            weight = hidden
        targets = OF_TARGETS[self.targets_layout](targets)
        return replace(inputs, hidden=hidden, weight=weight, targets=targets, grad=self._grad())

    def _grad(self) -> float:
        return 3.0 if self.values == "large_hidden" else self.grad  # in float16 the gradients would overflow

    def __str__(self) -> str:
        """Describe the call without its usual settings."""
        words = [
            f"{self.vocab if self.shared else self.tokens} tokens, dim {self.dim}, vocab {self.vocab} of {self.dtype}",
            f"weight of {self.weight_dtype}" if "autocast" in self.mode else "",
            ", ".join(f"{name}={value}" for name, value in self.options.items()),
            f"values {self.values}" if self.values != "usual" else "",
            f"targets {self.targets}" if self.targets != "random" else "",
            f"layouts {'/'.join(self.layouts)}" if set(self.layouts) != {"contiguous"} else "",
            f"targets {self.targets_layout}" if self.targets_layout != "contiguous" else "",
            "hidden is weight" if self.shared else "",
            self.mode,
            "checkpointed" if self.checkpointed else "",
        ]
        return ", ".join(filter(None, words))


layouts = st.just("contiguous") | st.sampled_from(list(LAYOUTS))

CALLS = st.builds(
    Call,
    tokens=st.integers(0, 40) | st.sampled_from([63, 64, 65, 127, 129, 257, 511, 513, 1025]),
    dim=st.integers(1, 20) | st.sampled_from([63, 64, 65, 129, 257]),
    vocab=st.integers(1, 40) | st.sampled_from([8, 16, 32, 63, 64, 65, 127, 128, 257, 1023, 1024, 1025, 2049]),
    dtype=st.sampled_from([F32, F64, BF16, F16]),
    weight_dtype=st.sampled_from([F32, BF16, F16]),
    ignored=st.sampled_from([-100, -100, 0, -1, 1, 2**40, -(2**31) - 1]),
    label_smoothing=st.sampled_from([0.0, 0.0, 0.1, 0.5, 1.0]),
    z_loss=st.sampled_from([0.0, 0.0, 1e-4, 1e-2, 1.0]),
    scale=st.sampled_from([1.0, 0.1, 10.0]),
    values=st.just("usual") | st.sampled_from(["large_hidden", "large_logits", "all_high", "all_low"]),
    targets=st.just("random") | st.sampled_from(["all_ignored", "last_alone", "first_word", "last_word"]),
    layouts=st.tuples(layouts, layouts),
    targets_layout=st.sampled_from(["contiguous", "apart", "apart", "one for all"]),
    shared=st.sampled_from([False, False, False, True]),
    grad=st.sampled_from([3.0, -1.0, 0.0, 512.0, 1.0]),
    mode=st.just("gradients") | st.sampled_from(list(MODES)),
    needs=st.just("hidden weight") | st.sampled_from(["hidden", "weight"]),
    backward=st.sampled_from(BACKWARDS),
    checkpointed=st.sampled_from([False, False, False, True]),
    later=st.booleans(),
    seed=st.integers(0, 2**20),
).filter(lambda call: call.is_possible)


@st.composite
def nothing_counts(draw: st.DrawFn) -> Call:
    """Draw a call in which all targets are ignored and sums overflow."""
    tokens, dim, dtype = draw(st.integers(8, 40)), draw(st.integers(8, 40)), draw(st.sampled_from([F16, F16, F32]))
    fixed = {"tokens": tokens, "dim": dim, "dtype": dtype, "scale": 1.0, "values": "large_hidden"}
    call = draw(CALLS.filter(lambda call: autocast_takes(call.mode, dtype)))
    return replace(call, targets="all_ignored", shared=False, **fixed)


ANY = CALLS | CALLS | CALLS | nothing_counts()

HISTORIES = st.lists(ANY, min_size=1, max_size=3) | nearly_twice(
    ANY, "dtype", "ignored", "label_smoothing", "z_loss", "tokens", "needs", dtype=F32, weight_dtype=F32
)
