"""The language model's training step operator by operator, as eager PyTorch does it on one rank, in bytes.

What a way of sharding adds comes at moments of it: before and after each unit, forward and backward, where a parameter
is read, and where its gradient is there. T tokens, d = d_model, f = d_ff, V = vocab; c bytes a value, of everything.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from impl.accounting.mlp import Ledger
from impl.model.sizes import SIZES

if TYPE_CHECKING:
    from impl.fsdp.cases import FSDPCase


FLOAT = 4  # bytes of a float32, which shards, their gradients and moments are
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}

Shape = tuple[int, ...]
"""Of a parameter."""

ROOT, EMBEDDING = 0, 1
"""The first units in the order of forward; blocks follow, and the output projection is the last. The root is the whole,
whose own is the final norm."""


def by_rows(parameter: Shape, ranks: int) -> int:
    """Values of a parameter, with as many more rows as make them divide by the ranks."""
    rows, *columns = parameter
    return -(-rows // ranks) * ranks * math.prod(columns)


class Step:
    """One step, in which nothing is sharded: gradients stay. Subclasses override what happens at its moments.

    With `norm_alone` the final norm is a unit of its own, and the last in order.
    """

    def __init__(self, case: FSDPCase, norm_alone: bool = False) -> None:
        size = SIZES[case.model]
        d, f = size.d_model, size.d_ff
        self.case, self.c, self.ledger = case, BYTES[case.dtype], Ledger()
        self.narrow, self.wide, self.logits = (self.c * case.tokens * width for width in (d, f, size.vocab))
        self.means = self.c * case.tokens
        self.log_sum_exp = FLOAT * case.tokens * size.heads
        self.turned = 0 if self.c == FLOAT else self.c * case.context * size.head_dim  # sines and cosines, cast
        self.norm, self.square, self.gate, self.down, self.table = (d,), (d, d), (f, d), (d, f), (size.vocab, d)
        block = [self.norm, *4 * [self.square], self.norm, self.gate, self.down, self.gate]
        self.units: list[list[Shape]] = [[self.norm], [self.table], *size.layers * [block], [self.table]]
        self.output, self.last_norm = len(self.units) - 1, ROOT
        if norm_alone:
            self.last_norm = len(self.units)
            self.units = [[], *self.units[1:], [self.norm]]
        rotary, counters = FLOAT * case.context * size.head_dim, FLOAT * sum(map(len, self.units))
        self.ledger.take(rotary + counters + 16 * case.tokens)  # int64 tokens and targets

    def enter(self, unit: int) -> None:
        """Forward comes to a unit."""

    def leave(self, unit: int) -> None:
        """Forward is through with it."""

    def enter_backward(self, unit: int) -> None:
        """Backward comes to it."""

    def leave_backward(self, unit: int) -> None:
        """All of its gradients are there."""

    def read(self, parameter: Shape) -> None:
        """An operator of forward or backward will use a parameter."""

    def drop(self, parameter: Shape) -> None:
        """It has used it."""

    def reduce(self, parameter: Shape) -> None:
        """The parameter's gradient is there, and what was needed for it gone."""

    def peak(self) -> int:
        """Bytes at the peak of the step."""
        self._forward()
        self._backward()
        return self.ledger.peak

    def values(self, *parameters: Shape) -> int:
        """How many values they have together."""
        return sum(map(math.prod, parameters))

    def borrow(self, *sizes: int) -> None:
        """Bytes that are needed for a moment."""
        self.ledger.take(*sizes)
        self.ledger.give(*sizes)

    def _forward(self) -> None:
        take, give = self.ledger.take, self.ledger.give
        self.enter(ROOT)
        self.enter(EMBEDDING)
        self._product(self.table, self.narrow)
        self.leave(EMBEDDING)
        for block in range(EMBEDDING + 1, self.output):
            self.enter(block)
            self._normalize()
            self._attend()
            self._normalize()
            self._feed_forward()
            self.leave(block)
        if self.last_norm != ROOT:
            self.enter(self.last_norm)
        self._normalize()
        if self.last_norm != ROOT:
            self.leave(self.last_norm)
        self.enter(self.output)
        self._product(self.table, self.logits)
        self.leave(self.output)
        self.leave(ROOT)
        take(self.logits, 2 * self.c)  # log-probabilities, the loss and the number of targets
        give(self.logits)

    def _product(self, weight: Shape, result: int) -> None:
        self.read(weight)
        self.ledger.take(result)
        self.drop(weight)

    def _normalize(self) -> None:
        """Leaves roots of mean squares, x over them, and that times the weight."""
        squares, float32 = self.narrow, 0 if self.c == FLOAT else FLOAT * self.narrow // self.c
        self.borrow(squares, self.means, float32)
        self.ledger.take(self.means, self.narrow)
        self._product(self.norm, self.narrow)

    def _attend(self) -> None:
        """Leaves queries and keys that are turned, values, the result, its copy by token, and the sum."""
        take, give, half = self.ledger.take, self.ledger.give, self.narrow // 2
        for _ in range(3):
            self._product(self.square, self.narrow)
        for _ in ("query", "key"):
            take(self.turned)
            self.borrow(4 * half)
            take(self.narrow)
        take(self.narrow, self.log_sum_exp)
        take(self.narrow)
        self._product(self.square, self.narrow)
        give(2 * self.narrow)  # queries and keys as they were
        take(self.narrow)
        give(self.narrow)

    def _feed_forward(self) -> None:
        """Leaves both gates, silu of the one, their product, and the sum."""
        self._product(self.gate, self.wide)
        self.ledger.take(self.wide)
        self._product(self.gate, self.wide)
        self.ledger.take(self.wide)
        self._product(self.down, self.narrow)
        self.ledger.take(self.narrow)
        self.ledger.give(self.narrow)

    def _backward(self) -> None:
        take, give = self.ledger.take, self.ledger.give
        take(self.c)  # the loss's own gradient
        take(self.logits)
        give(self.c)
        take(self.logits)
        give(2 * self.logits)
        self.enter_backward(self.output)
        self._product_backward(self.table, self.narrow)
        give(self.logits, self.narrow)
        self.reduce(self.table)
        self.leave_backward(self.output)
        if self.last_norm != ROOT:
            self.enter_backward(self.last_norm)
        self._normalize_backward(residual=False)
        if self.last_norm != ROOT:
            self.leave_backward(self.last_norm)
        for block in reversed(range(EMBEDDING + 1, self.output)):
            self.enter_backward(block)
            self._feed_forward_backward()
            self._normalize_backward()
            self._attend_backward()
            self._normalize_backward()
            self.leave_backward(block)
        self.enter_backward(EMBEDDING)
        take(self.c * self.values(self.table))
        give(self.narrow)
        self.reduce(self.table)
        self.leave_backward(EMBEDDING)
        self.leave_backward(ROOT)

    def _product_backward(self, weight: Shape, of_input: int) -> None:
        """Gradients of the weight and of what it multiplied; the one that came is still there."""
        self.read(weight)
        self.ledger.take(self.c * self.values(weight))
        self.ledger.take(of_input)
        self.drop(weight)

    def _normalize_backward(self, residual: bool = True) -> None:
        """The gradient that came becomes the input's, and is added to the one that flows past."""
        take, give, narrow, means = self.ledger.take, self.ledger.give, self.narrow, self.means
        self.read(self.norm)
        take(narrow, narrow)
        self.drop(self.norm)
        take(self.c * self.values(self.norm))
        give(3 * narrow)  # the product, the gradient that came, and x over its root
        self.reduce(self.norm)
        take(narrow, narrow, means)
        give(2 * narrow if not residual else 3 * narrow)
        self.borrow(3 * means)
        give(means)
        take(narrow)
        give(means)
        self.borrow(3 * narrow)
        give(2 * narrow)

    def _feed_forward_backward(self) -> None:
        """The gradient that came flows past; a second one comes out."""
        take, give, narrow, wide = self.ledger.take, self.ledger.give, self.narrow, self.wide
        self._product_backward(self.down, wide)
        give(wide)
        self.reduce(self.down)
        take(2 * wide)
        give(3 * wide)
        self._product_backward(self.gate, narrow)
        give(wide)
        self.reduce(self.gate)
        take(wide)
        give(2 * wide)
        self._product_backward(self.gate, narrow)
        give(wide, narrow)
        take(narrow)  # the sum of both gates'
        give(2 * narrow)
        self.reduce(self.gate)

    def _attend_backward(self) -> None:
        """The same of attention."""
        take, give, narrow, half = self.ledger.take, self.ledger.give, self.narrow, self.narrow // 2
        self._product_backward(self.square, narrow)
        give(narrow)
        self.reduce(self.square)
        take(3 * narrow)
        give(5 * narrow, self.log_sum_exp)
        for _ in ("key", "query"):
            self.borrow(4 * half)
            give(self.turned)
        self._product_backward(self.square, narrow)  # of values
        give(narrow)
        self.reduce(self.square)
        for last in (False, True):  # of keys and queries
            self.borrow(narrow)
            self._product_backward(self.square, narrow)
            give(narrow)
            if last:
                give(2 * narrow)  # what was normalized, and what is added
            else:
                take(narrow)
                give(2 * narrow)
            self.reduce(self.square)
