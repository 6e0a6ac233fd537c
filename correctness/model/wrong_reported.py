"""Planted defects: transformers that are wrong as public trackers report."""

from torch import Tensor

from correctness.model.transformer_parts import Parts
from correctness.support.planting import defect
from impl.model import Transformer, TransformerSize


@defect(cause="two calls", caught_by="test_calls_of_other_shapes")
class TablesOfAnEvaluation(Parts):
    """Dao-AILab/flash-attention#299: caches RoPE's tables, also under inference_mode, where autograd cannot save them
    later."""

    kept: tuple[Tensor, Tensor] | None = None

    def tables(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.kept is None or self.kept[0].dtype != x.dtype or len(self.kept[0]) < x.shape[-2]:
            self.kept = super().tables(x)
        cos, sin = (table[: x.shape[-2]] for table in self.kept)
        return cos, sin


@defect(cause="gradients", caught_by="test_two_forwards_before_either_backward")
class WordZeroIsPadding(Transformer):
    """ibalazevic/TuckER#17: `padding_idx=0` leaves word 0, a word like any other, without a gradient."""

    def __init__(self, size: TransformerSize, *, context_length: int) -> None:
        super().__init__(size, context_length=context_length)
        self.embedding.padding_idx = 0
