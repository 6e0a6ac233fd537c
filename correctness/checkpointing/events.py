"""Models and passes for checkpointing policies, as Hypothesis draws them."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from correctness.engine.histories import one_in

DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
AUTOCASTS = ("bfloat16", "float16", "bfloat16, then disabled", "float16, then disabled")
MODES = ("train", "eval", "dropout alone trains", "dropout alone evaluates", "every second block evaluates")
AROUND = (None, None, None, "no_grad", "bfloat16", "float16", "disabled")
CHANGES = (
    None, None, None, "weights in place", "a state_dict", "a state_dict assigned", "parameters replaced", "copied",
    "freeze the first block", "thaw all", "no mode is set", "memory replaced", "another dtype",
)  # fmt: skip
BETWEEN = (None, None, None, "another model", "another model, made anew")
PLACES = (
    "itself", "itself", "in a tuple", "in a dict", "in a list", "in an object", "in a tuple in a dict",
    "in an object in a list", "in an object of slots", "after None", "the input", "as complex numbers",
)  # fmt: skip
CONTAINERS = ("a tuple", "a dict", "an object", "a named tuple")
OUTPUTS = ("a tensor", "a tensor", "a tensor", "a view written in place", *CONTAINERS)
ODD_BLOCKS = ("ignores its input", "returns its input")
AGAIN = (None, None, None, "retained", "differentiated")
LAYOUTS = ("contiguous", "contiguous", "transposed", "expanded", "another batch", "no rows")
WAYS = ("backward", "backward(inputs=some)", "grad of all", "grad of some")


def _described(drawn: Any, what: str, leave_out: str = "") -> str:
    """Describe a drawn object by its fields, without those that are False, None, 0 or empty."""
    fields = {name: value for name, value in vars(drawn).items() if value and name != leave_out}
    words = (
        name.replace("_", " ") + ("" if value is True else f" = {getattr(value, '__name__', value)}")
        for name, value in fields.items()
    )
    return f"{what}: {', '.join(words)}"


@dataclass(frozen=True)
class Pass:
    """One forward, and how its gradients are computed."""

    mode: str
    autocast: str | None
    backward_inside: bool
    """Run backward inside autocast."""
    around: str | None
    """Context of backward: `no_grad`, autocast to that dtype, or autocast disabled."""
    evaluated_first: str | None
    """Run another forward first in this mode, "no_grad" or "inference_mode"; under autocast, in `no_grad`, as PyTorch
    itself keeps weights that autocast cast under `inference_mode`."""
    dropped_first: bool
    """Run another forward first, without a backward."""
    way: str
    again: str | None
    """"retained": backward runs twice; "differentiated": then that of the gradients' squares runs."""
    subset: int
    layout: str
    waits: bool
    """Run its backward only after forward and backward of the next pass."""
    packed: bool
    """The caller's hooks of saved tensors are around forward, as those that offload them."""
    between: str | None
    """Before backward, forward and backward of another model with the same policy, one of `BETWEEN`."""
    on_a_thread: bool
    """Run backward on another thread, as autograd runs that of a GPU."""
    change: str | None
    """Change of the model before the pass, one of `CHANGES`."""

    def __str__(self) -> str:
        return _described(self, "pass")


@dataclass(frozen=True)
class History:
    """A model, and passes over it."""

    layers: int
    dropout: type[nn.Module] | None
    depth: int
    """Depth of the dropout module below the block."""
    x_needs_grad: bool
    frozen: int
    """Freeze each parameter whose index this divides; 0: none."""
    blocks: str
    """"different", "shared weights", or "the same": pairs of blocks are one object."""
    odd: tuple[str, int] | None
    """One of `ODD_BLOCKS`, and the index of that block: it ignores its input, as an embedding of positions does, or
    returns it, as a layer that is skipped does."""
    dtype: torch.dtype
    born: str
    """Mode of the model when the policy is applied."""
    extra: tuple[tuple[bool, bool, bool, str], ...]
    """Further arguments of the blocks. For each: passed by name, needs a gradient, is computed from a leaf (and is a
    mask where it needs no gradient), where it lies (one of `PLACES`)."""
    output: str
    """Output of a block, one of `OUTPUTS`."""
    hooks: tuple[tuple[str, bool, int], ...]
    """"pre", "post" or "backward" of a block, or "parameter"; registered before the policy or after; index of the
    block. Removed before the last pass."""
    last_forward_first: bool
    """Waiting backwards run last forward first; else first forward first."""
    events: tuple[Pass, ...]

    @property
    def ignores(self) -> bool:
        """True if some block ignores its input."""
        return self.odd is not None and "ignores" in self.odd[0]

    def __str__(self) -> str:
        return _described(self, "model", leave_out="events")


PASSES = st.builds(
    Pass,
    mode=st.sampled_from(MODES),
    autocast=st.none() | st.sampled_from(AUTOCASTS),
    backward_inside=st.booleans(),
    around=st.sampled_from(AROUND),
    evaluated_first=st.sampled_from((None, None, "no_grad", "inference_mode")),
    dropped_first=st.booleans(),
    way=st.sampled_from(WAYS),
    again=st.sampled_from(AGAIN),
    subset=st.integers(2, 4),
    layout=st.sampled_from(LAYOUTS),
    waits=st.booleans(),
    packed=one_in(4),
    between=st.sampled_from(BETWEEN),
    on_a_thread=one_in(4),
    change=st.sampled_from(CHANGES),
)
HISTORIES = st.builds(
    History,
    layers=st.integers(1, 5),
    dropout=st.none() | st.sampled_from(DROPOUTS),
    depth=st.integers(1, 3),
    x_needs_grad=st.booleans(),
    frozen=st.sampled_from((0, 0, 1, 2, 3)),
    blocks=st.sampled_from(("different", "different", "shared weights", "the same")),
    odd=st.none() | st.none() | st.tuples(st.sampled_from(ODD_BLOCKS), st.integers(0, 4)),
    dtype=st.sampled_from((torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.float16)),
    born=st.sampled_from(("train", "train", "eval")),
    extra=st.lists(
        st.tuples(st.booleans(), st.booleans(), st.booleans(), st.sampled_from(PLACES)), max_size=3
    ).map(tuple),
    output=st.sampled_from(OUTPUTS),
    hooks=st.lists(
        st.tuples(st.sampled_from(("pre", "post", "backward", "parameter")), st.booleans(), st.integers(0, 4)),
        max_size=2,
    ).map(tuple),
    last_forward_first=st.booleans(),
    events=st.lists(PASSES, min_size=1, max_size=3).map(tuple),
).filter(lambda history: not (history.frozen == 1 and history.ignores))  # fmt: skip
"""An output that depends on nothing that needs a gradient may require one or not, and is left out."""


class Unsqueezed(nn.Module):
    """Dropout of whole channels, which takes inputs of more dims."""

    def __init__(self, dropout: nn.Module) -> None:
        super().__init__()
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        dims = {nn.Dropout1d: 1, nn.Dropout2d: 2}.get(type(self.dropout), 3)
        return self.dropout(x.view(*x.shape, *[1] * dims)).view(x.shape)


class Block(nn.Module):
    """A block that multiplies its hidden layer by each further tensor in an even place, and adds each in an odd one.

    Where it returns more than a tensor, it also takes and returns a second one, which its layer `beside` makes. Nothing
    uses the last block's, so that its `beside` has no gradient.
    """

    def __init__(self, history: History, odd: str | None) -> None:
        super().__init__()
        self.output, self.odd = history.output, odd
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)
        self.beside = nn.Linear(12, 8) if history.output in CONTAINERS else None
        part: nn.Module = nn.Identity() if history.dropout is None else history.dropout(0.4)
        whole = isinstance(part, (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.FeatureAlphaDropout))
        if whole:
            part = Unsqueezed(part)
        for _ in range(history.depth - 1 - whole):
            part = nn.Sequential(part)
        self.part = part

    def forward(self, given: Any, *args: Any, flag: bool = False, **kwargs: Any) -> Any:
        if self.odd == "returns its input":
            return given
        x, beside = taken(given)
        if self.odd == "ignores its input":
            x = torch.ones_like(x)
        hidden = nn.functional.gelu(self.up(x if beside is None else x + beside))
        for place, each in enumerate(tree_leaves([args, kwargs])):
            scale = getattr(each, "scale", each)
            if isinstance(scale, Tensor):
                scale = torch.view_as_real(scale).sum(-1).to(hidden.dtype) if scale.is_complex() else scale
                hidden = hidden + scale[:, :1] if place % 2 else hidden * scale[:, :1]
        out = self.down(self.part(hidden)) + (x if flag else 0)
        if self.output == "a view written in place":
            out = out[:].sin_()
        return returned(self.output, out, hidden if self.beside is None else self.beside(hidden))


class Named(NamedTuple):
    x: Tensor
    nothing: None
    beside: Tensor
    mask: Tensor


def returned(how: str, x: Tensor, beside: Tensor) -> Any:
    """The output of a block, one of `OUTPUTS`."""
    match how:
        case "a named tuple":
            return Named(x, None, beside, (x > 0).to(x))
        case "a tuple":
            return x, None, beside, (x > 0).to(x)  # a mask, which has no gradient
        case "a dict":
            return {"x": x, "beside": beside, "rows": torch.arange(len(x), device=x.device)}
        case "an object":
            return SimpleNamespace(x=x, beside=beside)
    return x


def taken(output: Any) -> tuple[Tensor, Tensor | None]:
    """The tensor in a block's output, and the one beside it, if there is one."""
    if isinstance(output, Tensor):
        return output, None
    if isinstance(output, tuple):
        return output[0], output[2]
    of = output if isinstance(output, dict) else vars(output)
    return of["x"], of["beside"]


class Model(nn.Module):
    def __init__(self, history: History) -> None:
        super().__init__()
        odd, at = history.odd or (None, 0)
        blocks = [Block(history, odd if i == at % history.layers else None) for i in range(history.layers)]
        if history.blocks == "the same":
            blocks = [blocks[i // 2] for i in range(history.layers)]
        elif history.blocks == "shared weights":
            for block in blocks[1:]:
                block.down.weight = blocks[0].down.weight
        self.blocks = nn.ModuleList(blocks)

        self.containers: dict[str, None] = {}
        """Classes of what blocks have returned in the last call, tensors left out; a policy may join blocks."""

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Tensor:
        self.containers.clear()
        for block in self.blocks:
            x = block(x, *args, **kwargs)
            if not isinstance(x, Tensor):
                self.containers[type(x).__name__] = None
        return taken(x)[0]
