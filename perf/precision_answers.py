"""Mixed precision accounted for: what sums of small numbers lose, and which dtype each tensor of a step has.

`perf/test_precision_answers.py` holds them to arithmetic bit by bit and to a step that runs, and puts them into the
report. The document:

    python -m perf.precision_answers > docs/precision-answers.md
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from perf.part import Part
from shardmark.predict.simulation.autocast import autocast_of_cuda

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


@dataclass(frozen=True)
class Sum:
    """A number that is rounded to `added` and added so many times to a sum in `sum`, which begins at zero."""

    number: float
    times: int
    sum: torch.dtype
    added: torch.dtype
    widened: bool = False
    """Whether it is cast to the sum's dtype before it is added, which changes nothing."""

    @property
    def way(self) -> str:
        """As in "float32 += float16"."""
        return f"{_name(self.sum)} += {_name(self.added)}" + (f" as {_name(self.sum)}" if self.widened else "")

    def found(self) -> float:
        """The sum, one addition after the other, each rounded to the sum's dtype."""
        total = torch.zeros((), dtype=self.sum)
        for _ in range(self.times):
            addend = torch.tensor(self.number, dtype=self.added)
            total += addend.to(self.sum) if self.widened else addend
        return total.item()


HUNDREDTHS = tuple(
    Sum(0.01, 1_000, *dtypes)
    for dtypes in ((F32, F32), (F16, F16), (F32, F16), (F32, F16, True), (BF16, BF16), (F32, BF16))
)
THOUSANDTHS = tuple(Sum(0.001, 10_000, dtype, dtype) for dtype in (F32, F16, BF16))


def sums() -> Part:
    """Sums whose right value is 10."""
    rows = [(each, each.found()) for each in (*HUNDREDTHS, *THOUSANDTHS)]
    narrow = {each.way: found for each, found in rows[: len(HUNDREDTHS)]}
    return Part(
        "What does a sum of small numbers lose in half precision?",
        "sums in half precision",
        f"A thousand times 0.01 gives {narrow['float16 += float16']:.5g} in float16 and "
        f"{narrow['bfloat16 += bfloat16']:.5g} in bfloat16; in float32 what is lost is the rounding of 0.01 itself, "
        f"{narrow['float32 += float16']:.6g} and {narrow['float32 += bfloat16']:.6g}.",
        (
            f"0.01 is {torch.tensor(0.01, dtype=F16).item():.9g} in float16 and "
            f"{torch.tensor(0.01, dtype=BF16).item():.9g} in bfloat16: a float32 sum of these is off by that alone, "
            "and a cast to float32 before the addition changes nothing.",
            "Between 4 and 8 neighbours in bfloat16 are 2^-5 = 0.03125 apart: half of that is more than 0.01, so each "
            "further addition is rounded away, and the sum stays at 4.",
            "Between 8 and 16 neighbours in float16 are 2^-7 = 0.0078125 apart: each addition of 0.01 counts as one of "
            "these. 0.001 is lost from 4 on, where half of 2^-8 is more than that.",
            "So gradients, losses and moments are summed in float32, whatever dtype the addends come in.",
        ),
        ("sum", "of", "gives", "off by"),
        tuple(
            (each.way, f"{each.times:,} times {each.number:g}", f"{found!r}", f"{found - 10:+.3g}")
            for each, found in rows
        ),
    )


class Toy(nn.Module):
    """Two linears without bias, with ReLU and layer norm between them: (rows, 20) -> (rows, 5)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = (
            nn.Linear(20, 10, bias=False),
            nn.LayerNorm(10),
            nn.Linear(10, 5, bias=False),
        )

    def forward(self, x: Tensor, seen: dict[str, Tensor]) -> Tensor:
        """Note each tensor under its name."""
        seen["output of the first linear"] = hidden = self.first(x)
        seen["output of ReLU"] = hidden = hidden.relu()
        seen["output of layer norm"] = hidden = self.norm(hidden)
        seen["logits"] = logits = self.second(hidden)
        return logits


def dtypes_of_a_step(dtype: torch.dtype, of_cuda: bool) -> dict[str, torch.dtype]:
    """The dtype of each tensor of a step under autocast to `dtype`, by the CPU's lists of operators or CUDA's."""
    model, seen = Toy(), {}
    with autocast_of_cuda() if of_cuda else nullcontext():
        with torch.autocast("cpu", dtype=dtype):
            logits = model(torch.randn(4, 20), seen)
            loss = cross_entropy(logits, torch.zeros(4, dtype=torch.int64))
        seen |= {"log-probabilities in the loss": _log_probabilities(loss), "loss": loss}
        loss.backward()
    found = {"parameters": next(model.parameters()).dtype} | {name: tensor.dtype for name, tensor in seen.items()}
    gradients = {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None}
    assert len(gradients) == 1
    return found | {"gradients of parameters": gradients.pop()}


def _log_probabilities(loss: Tensor) -> Tensor:
    """Those that a cross entropy saved for backward."""
    node = loss.grad_fn
    while node is not None and not hasattr(node, "_saved_result"):
        node = node.next_functions[0][0]
    assert node is not None
    return node._saved_result


def autocast() -> Part:
    """The dtypes of the toy's tensors."""
    lists = {
        f"{_name(dtype)}, {device}": dtypes_of_a_step(dtype, device == "CUDA")
        for device in ("CUDA", "CPU")
        for dtype in (F16, BF16)
    }
    first = next(iter(lists.values()))
    return Part(
        "Which dtype has each tensor of a step under autocast?",
        "dtypes under autocast",
        "Parameters, their gradients and the loss stay float32, and products are in half precision; layer norm's "
        "output is float32 on CUDA, and on a CPU in half precision.",
        (
            "Autocast has lists of operators: products, which it casts to half precision, and others that it casts to "
            "float32. Layer norm is on CUDA's second list, and on none of the CPU's. Cross entropy is on the CPU's "
            "alone: on CUDA PyTorch asks for its log-softmax in the logits' dtype, and float32 begins after it.",
            "That takes 2 bytes less for each logit at the peak, and rounds log-probabilities to 8 bits in bfloat16. "
            "`logits.float()` before the loss keeps their digits.",
            "CUDA's lists are those of the installed PyTorch's header, applied to CPU tensors.",
            "Layer norm's sums and its variance lose digits in half precision, and in float16 squares overflow from "
            "256 on: on CUDA that is why it is in float32. bfloat16 has float32's range, but 8 bits of digits.",
        ),
        ("tensor", *lists),
        tuple((name, *(_name(each[name]) for each in lists.values())) for name in first),
    )


def parts() -> Sequence[Part]:
    """The parts of the document, in its order."""
    return sums(), autocast()


def document() -> str:
    """docs/precision-answers.md."""
    return INTRODUCTION + "".join("\n" + "\n".join(part.markdown()) + "\n" for part in parts())


INTRODUCTION = """# Mixed precision, accounted for

The same sums, and the same toy model, as in CS336, assignment 2, part 1.1.5 (Stanford, 2025).
`perf/test_precision_answers.py` holds each figure to arithmetic bit by bit, and to a step that runs.
`python -m perf.precision_answers` writes this page.
"""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


if __name__ == "__main__":
    print(document(), end="")
