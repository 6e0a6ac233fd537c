"""Activation checkpointing: bytes at the peak of a training step, and FLOPs that are computed again.

In float32 alone, ValueError for another dtype. T tokens, d = d_model, f = d_ff.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from impl.accounting.beside import BYTES, FLOAT, Technique, beside, peak_of_part
from impl.accounting.ledger import Bytes, Ledger
from impl.accounting.plain import PlainLanguageModel
from impl.checkpointing.nesting import Series, again, every, halves, inputs, numbers, segments, tuples
from impl.model.mlp import MLP_SIZES, MLPSize
from impl.model.sizes import SIZES, TransformerSize
from shardmark.api import AFTER_FORWARD, BACKWARD, ENTER, LEAVE, Moment, followed

if TYPE_CHECKING:
    from impl.training_step.cases import TrainingStepCase

BLOCK = "activations of blocks.*"
"""Bytes that a block itself allocates: the residual stream, including its output."""


class Checkpointing(Technique):
    """Forward runs a checkpointed block as usual, then frees its activations except the input, and the input too where
    the block is not the first under its checkpoint. Before its backward a checkpoint is recomputed, up to its last
    product, which backward does not read. The blocks that it has inside, and in no checkpoint further in, save their
    activations then."""

    def __init__(self, case: TrainingStepCase, series: Series) -> None:
        self.case, self.series = case, series
        size: MLPSize | TransformerSize = MLP_SIZES[case.model] if case.model in MLP_SIZES else SIZES[case.model]
        self.layers = size.layers
        self.stream = FLOAT * case.tokens * (size.dim if isinstance(size, MLPSize) else size.d_model)
        self.under_checkpoint = {block for checkpoint in tuples(series) for block in numbers(checkpoint)}
        self.kept = {next(numbers(nest)) for nest in series}
        """Blocks whose inputs forward keeps."""
        self.freed: dict[int, dict[str, int]] = {}
        self.before: dict[str, int] = {}

    def at(self, moment: Moment) -> None:
        folder, _, number = moment.name.partition(".")
        if moment.kind == AFTER_FORWARD:
            self.after_forward()
        if moment.kind == BACKWARD and folder == "embedding" and self.checkpointed(0):
            self.left_backward(0)
        if folder == "blocks" and number.isdecimal():
            self.at_block(int(number), moment)

    def at_block(self, block: int, moment: Moment) -> None:
        """Forward arrives at a block or has left it; or backward arrives at it, having left the block after it."""
        if moment.kind == ENTER:
            self.before = dict(moment.live)
        elif moment.kind == LEAVE and self.checkpointed(block):
            made = {name: nbytes - self.before.get(name, 0) for name, nbytes in moment.live.items()}
            made[BLOCK] -= self.stream  # its output
            self.freed[block] = self.free(made)
            self.left(block)
            if block not in self.kept:
                self.ledger.free(BLOCK, self.stream)  # its input
        elif moment.kind == BACKWARD:
            if block + 1 < self.layers and self.checkpointed(block + 1):
                self.left_backward(block + 1)
            live, self.kept = self.kept & set(range(block + 1)), inputs(self.series, block)
            self.ledger.take(BLOCK, len(self.kept - live) * self.stream)
            for checkpoint in tuples(self.series):
                if block == max(numbers(checkpoint)):
                    for each in checkpoint:
                        if isinstance(each, int):
                            self.compute_again(each)

    def checkpointed(self, block: int) -> bool:
        return block in self.under_checkpoint

    def free(self, made: dict[str, int]) -> dict[str, int]:
        """Free these activations of the block; return the bytes freed by name."""
        freed = {name: nbytes for name, nbytes in made.items() if nbytes > 0}
        for name, nbytes in freed.items():
            self.ledger.free(name, nbytes)
        return freed

    def left(self, block: int) -> None:
        """Forward has left the block."""

    def after_forward(self) -> None:
        """Called when forward is done."""

    def compute_again(self, block: int) -> None:
        for name, nbytes in self.freed.pop(block).items():
            self.ledger.take(name, nbytes)

    def left_backward(self, block: int) -> None:
        """Called when backward has left the block."""


class OfMLP(Checkpointing):
    """Under autocast, half-precision copies of weights and biases live until its context ends, and the recomputation
    has a context of its own; without checkpointing a copy of a block's input is kept in place of the input."""

    def __init__(self, case: TrainingStepCase) -> None:
        super().__init__(case, every(MLP_SIZES[case.model].layers))
        size, self.c = MLP_SIZES[case.model], BYTES[case.dtype]
        half = self.c != FLOAT
        self.weights = 2 * self.c * size.dim * size.hidden if half else 0
        self.biases = self.c * (size.dim + size.hidden) if half else 0

    def free(self, made: dict[str, int]) -> dict[str, int]:
        size = MLP_SIZES[self.case.model]
        for name, bias in ((f"{BLOCK}.w1", size.hidden), (f"{BLOCK}.w2", size.dim)):
            made[name] = made.get(name, 0) - (self.weights // 2 + self.c * bias if self.weights else 0)
        return super().free(made)

    def left(self, block: int) -> None:
        self.ledger.take(BLOCK, self.stream if self.weights else 0)  # its input

    def left_backward(self, block: int) -> None:
        self.ledger.free(BLOCK, self.stream if self.weights else 0)

    def after_forward(self) -> None:
        for name in (f"{BLOCK}.w1", f"{BLOCK}.w2") if self.weights else ():
            self.ledger.free(name, self.layers * self.weights // 2)

    def compute_again(self, block: int) -> None:
        super().compute_again(block)
        for name in (f"{BLOCK}.w1", f"{BLOCK}.w2"):
            self.ledger.take(name, self.weights // 2)
        self.ledger.borrow("biases in half precision", self.biases)


class Selective(Checkpointing):
    """Each block keeps its input and the outputs of its matrix products and attention. ValueError unless attention
    is SDPA."""

    def __init__(self, case: TrainingStepCase, series: Series) -> None:
        if case.attention != "sdpa":
            raise ValueError(f"selective's bytes have a closed form with sdpa, not with {case.attention} attention")
        super().__init__(case, series)

    def free(self, made: dict[str, int]) -> dict[str, int]:
        for product in ("attention.value", "feed_forward.w1", "feed_forward.w3"):
            made.pop(f"{BLOCK}.{product}")
        # Attention's output and log-sum-exp stay; the copy with heads side by side, if there is one, is freed.
        made[f"{BLOCK}.attention"] = self.stream if made[f"{BLOCK}.attention"] >= 2 * self.stream else 0
        return super().free(made)

    def left(self, block: int) -> None:
        """Account for the activations that forward frees without checkpointing."""
        self.ledger.take("q and k before RoPE", 2 * self.stream)
        self.ledger.take("attention projection", self.stream)
        self.ledger.take("feed-forward output", self.stream)

    def compute_again(self, block: int) -> None:
        self.ledger.free("q and k before RoPE", 2 * self.stream)  # the recomputation reads both
        self.ledger.free("attention projection", self.stream)
        super().compute_again(block)

    def left_backward(self, block: int) -> None:
        self.ledger.free("feed-forward output", self.stream)  # backward does not read it


@dataclass(frozen=True)
class Checkpointed:
    """The bytes and FLOPs of one policy."""

    arrange: Callable[[int, TrainingStepCase], Series]
    """Checkpoints around so many blocks, for a case."""
    technique: Callable[[TrainingStepCase, Series], Technique] = Checkpointing
    products_again: bool = True
    """Whether the recomputation has matrix products and attention in it."""

    def series(self, case: TrainingStepCase) -> Series:
        return self.arrange(SIZES[case.model].layers, case)

    def kept(self, case: TrainingStepCase) -> int:
        """Bytes that forward leaves for backward, the loss included."""
        marks = self._run(case).marks
        return marks["after_forward"] - marks["before_step"]

    def peak(self, case: TrainingStepCase, device: str = "cpu") -> Bytes:
        return self._run(case, device).peak

    def recomputed(self, case: TrainingStepCase) -> int:
        """FLOPs of the recomputation; causal attention counts half, as in `training_work`."""
        if not self.products_again:
            return 0
        block, last = _block_flops(case)
        but_for_last, whole = again(self.series(case))
        return but_for_last * (block - last) + whole * block

    def _run(self, case: TrainingStepCase, device: str = "cpu") -> Ledger:
        if case.dtype != "float32":
            raise ValueError(f"checkpointing's bytes have a closed form in float32, not in {case.dtype}")
        return beside(followed(PlainLanguageModel.of(case), device), self.technique(case, self.series(case)))


def full_peak(case: TrainingStepCase, device: str = "cpu") -> Bytes:
    """Peak in bytes of the part of a step that the case names, if each block keeps only its input; for the
    transformer in float32, for the MLP also under autocast."""
    technique = OfMLP(case) if case.model in MLP_SIZES else FULL.technique(case, FULL.series(case))
    return peak_of_part(beside(followed(PlainLanguageModel.of(case), device), technique), case.mode)


NONE = Checkpointed(lambda blocks, case: tuple(range(blocks)))

FULL = Checkpointed(lambda blocks, case: every(blocks))

EVERY_2 = Checkpointed(lambda blocks, case: every(blocks, 2))

SEGMENTS = Checkpointed(lambda blocks, case: segments(blocks, getattr(case, "length", None)))

RECURSIVE = Checkpointed(lambda blocks, case: halves(blocks))

SELECTIVE = Checkpointed(lambda blocks, case: every(blocks), Selective, products_again=False)

POLICIES = {
    "none": NONE,
    "full": FULL,
    "every_2": EVERY_2,
    "segments": SEGMENTS,
    "recursive": RECURSIVE,
    "selective": SELECTIVE,
}
"""Accounting of each policy, by its name in the registry."""


def _block_flops(case: TrainingStepCase) -> tuple[int, int]:
    """FLOPs of a block's forward, and of its last product, the feed-forward's output projection."""
    size, tokens = SIZES[case.model], case.batch * case.context
    last = 2 * tokens * size.d_model * size.d_ff
    attention = 2 * tokens * case.context * size.d_model  # two products, each half as large when causal
    return 8 * tokens * size.d_model**2 + 3 * last + attention, last
