"""Memory of a pipeline in closed form: bytes that a rank holds after each of its actions.

    held = held_after(case, plan, rank=0)       # one for each action of plan[0]
    max(held).entries                           # {"activations": 5251072, ...}

Between its forward and its backward pass a micro-batch's activations are held: as many as are in flight, times a
stage's. Where a backward pass is cut in two (Qi et al., "Zero Bubble Pipeline Parallelism", 2023), the inputs of linear
layers, and the gradients of their outputs, are held from the first part to the second. A pass holds more while it runs.
"""

from __future__ import annotations

from collections import Counter
from math import prod

from impl.accounting.ledger import Bytes
from impl.mesh.cases import SIZES
from impl.mesh.stages import layers_of
from impl.pipeline.actions import Action, Kind, Plan, ranks_of_stages
from impl.pipeline.cases import DecoderCase
from impl.pipeline.exchange import MOST_UNDER_WAY

_FLOAT, _DOUBLE, _INDEX = 4, 8, 8


class OfStage:
    """Bytes of one stage of a case: of its parameters, and of what one micro-batch leaves. ValueError for experts, tied
    embeddings, fused products, and other dtypes than float32."""

    def __init__(self, case: DecoderCase, stage: int, stages: int) -> None:
        self.size, self.tokens = SIZES[case.model], case.rows * case.context
        if self.size.experts or self.size.tied or self.size.fused or case.dtype != "float32":
            raise ValueError(f"no closed form: {case} is not of plain layers in float32")
        self.layers = len(layers_of(stage, stages, self.size.layers))
        self.first, self.last = stage == 0, stage == stages - 1
        self.kv = self.size.dim // self.size.heads * self.size.kv_heads

    @property
    def matrices(self) -> list[tuple[int, int]]:
        """Shapes of linear layers' weights."""
        dim, hidden = self.size.dim, self.size.hidden
        layer = [(dim, dim)] * 2 + [(self.kv, dim)] * 2 + [(hidden, dim)] * 3
        return layer * self.layers + [(self.size.vocabulary, dim)] * self.last

    @property
    def linear_parameters(self) -> int:
        """Bytes of linear layers' weights."""
        return _FLOAT * sum(map(prod, self.matrices))

    @property
    def other_parameters(self) -> int:
        """Bytes of the norms' and the embedding's parameters."""
        return _FLOAT * self.size.dim * (self.norms + self.first * self.size.vocabulary)

    @property
    def norms(self) -> int:
        return 2 * self.layers + self.last

    @property
    def tensors(self) -> int:
        """Number of parameters, each with one's own count of steps in AdamW."""
        return len(self.matrices) + self.norms + self.first

    @property
    def boundary(self) -> int:
        """A tensor that stages pass to one another."""
        return _FLOAT * self.tokens * self.size.dim

    @property
    def activations(self) -> int:
        """Between forward and backward, without the stage's input and output."""
        dim, hidden, heads = self.size.dim, self.size.hidden, self.size.heads
        of_norm = dim + (dim + 1) + dim  # its input, what that is scaled to, and the output: products' input
        layer = 2 * of_norm + dim + 2 * self.kv + 2 * dim + heads + 2 * dim // heads + 4 * hidden
        last = self.last * (of_norm + self.size.vocabulary)
        of_loss = self.last * 2 * _FLOAT  # the loss, and its total weight
        received = 0 if self.first else self.boundary  # the first norm's input
        return _FLOAT * self.tokens * (self.layers * layer + last) + of_loss - received

    @property
    def for_weights(self) -> int:
        """From the gradient of the input to those of weights, without the gradient of the stage's output."""
        dim, hidden = self.size.dim, self.size.hidden
        inputs, gradients = 3 * dim + hidden, 2 * dim + 2 * self.kv + 2 * hidden + dim
        last = self.last * (dim + self.size.vocabulary)
        received = 0 if self.last else self.boundary
        return _FLOAT * self.tokens * (self.layers * (inputs + gradients) + last) - received


def state(case: DecoderCase, plan: Plan, rank: int) -> Bytes:
    """A rank's bytes before a step: parameters, AdamW's moments, tokens and targets, and the last step's loss."""
    stages = ranks_of_stages(plan)
    own = [OfStage(case, stage, len(stages)) for stage, of in stages.items() if of == rank]
    parameters = sum(each.linear_parameters + each.other_parameters for each in own)
    return Bytes(
        {
            "parameters": parameters,
            "first moments": parameters,
            "second moments": parameters,
            "counts of steps": _FLOAT * sum(each.tensors for each in own),
            "tokens and targets": 2 * _INDEX * case.micro_batches * case.rows * case.context,
            "loss": _DOUBLE,
        }
    )


def held_after(case: DecoderCase, plan: Plan, rank: int) -> list[Bytes]:
    """A rank's bytes after each of its actions, by what they are."""
    holding, before = _Holding(case, plan, rank), state(case, plan, rank)
    return [before.add(holding.after(action)) for action in plan[rank]]


class _Holding:
    """Tensors that a rank holds, each by some holders, while it carries out its actions as the suite's runner does."""

    def __init__(self, case: DecoderCase, plan: Plan, rank: int) -> None:
        self.rank_of = ranks_of_stages(plan)
        own = [stage for stage, of in self.rank_of.items() if of == rank]
        self.of = {stage: OfStage(case, stage, len(self.rank_of)) for stage in own}
        self.holders: Counter[tuple[str, int, int]] = Counter()
        self.gradients: dict[tuple[int, str], int] = {}
        self.under_way: list[tuple[str, int, int]] = []

    def after(self, action: Action) -> dict[str, int]:
        """Bytes by name once the action is done."""
        stage, number = action.stage, action.micro_batch
        match action.kind:
            case Kind.RECEIVE_FORWARD:
                self.holders["outputs of stages", stage - 1, number] += 1
            case Kind.RECEIVE_BACKWARD:
                self.holders["gradients of outputs", stage, number] += 1
            case Kind.SEND_FORWARD:
                self._send("outputs of stages", stage, number)
            case Kind.SEND_BACKWARD:
                self._send("gradients of outputs", stage - 1, number)
            case Kind.FORWARD:
                self.holders["activations", stage, number] += 1
                self._leave(action, "outputs of stages", stage)
                if not self.of[stage].last:
                    self.holders["outputs of stages", stage, number] += 1
            case Kind.BACKWARD | Kind.INPUT:
                self._backward(action)
            case Kind.WEIGHT:
                self._drop("kept for gradients of weights", stage, number)
                self._drop("gradients of outputs", stage, number)
                self.gradients[stage, "linear"] = self.of[stage].linear_parameters
        found = Counter({"gradients": sum(self.gradients.values())})
        for key in self.holders:
            found[key[0]] += self._bytes(*key)
        return found

    def _backward(self, action: Action) -> None:
        stage, number, of = action.stage, action.micro_batch, self.of[action.stage]
        self._drop("activations", stage, number)
        self._drop("outputs of stages", stage, number)
        self._drop("outputs of stages", stage - 1, number)
        self.gradients[stage, "other"] = of.other_parameters
        if action.kind == Kind.INPUT:  # the received gradient is that of the last layer's output
            self.holders["kept for gradients of weights", stage, number] += 1
        else:
            self._drop("gradients of outputs", stage, number)
            self.gradients[stage, "linear"] = of.linear_parameters
        self._leave(action, "gradients of outputs", stage - 1)

    def _leave(self, action: Action, what: str, stage: int) -> None:
        """Give what was found to a send, or to the next stage on this rank."""
        if 0 <= stage < len(self.rank_of) - 1:
            self.holders[what, stage, action.micro_batch] += 1

    def _send(self, what: str, stage: int, number: int) -> None:
        """Hold what is sent until the other rank has taken it, of at most MOST_UNDER_WAY sends at once."""
        while len(self.under_way) >= MOST_UNDER_WAY:
            self._drop(*self.under_way.pop(0))
        self.under_way.append((what, stage, number))

    def _drop(self, *key: str | int) -> None:
        """Take one holder from a tensor; what has none left is freed."""
        self.holders[key] -= 1  # type: ignore[index]
        self.holders = +self.holders

    def _bytes(self, what: str, stage: int, number: int) -> int:
        match what:
            case "activations":
                return self.of[stage].activations
            case "kept for gradients of weights":
                return self.of[stage].for_weights
        return next(iter(self.of.values())).boundary
