"""The transformer language model's training step, operator by operator as eager PyTorch does it on one rank.

    TransformerStep(case, FullySharded(ranks=2)).run().peak.entries

The strategy says what happens to parameters and gradients on the way.
"""

from __future__ import annotations

from impl.accounting.ledger import Ledger
from impl.accounting.programs.forward import FINAL_NORM, TransformerForward
from impl.accounting.programs.parameters import EMBEDDING, FLOAT, ROOT
from impl.accounting.strategies import GRADIENTS


class TransformerStep(TransformerForward):
    """One AdamW step, fused and so without temporaries, that is not the first: its state is there."""

    def run(self) -> Ledger:
        """Marks "before_step", "after_forward" and "after_backward"; the ledger's peak is that of the step."""
        self.ledger.take("RoPE's tables", FLOAT * self.case.context * self.size.head_dim)
        self.ledger.take("tokens and targets", 16 * self.case.tokens)  # int64
        self.strategy.begin(self)
        self.ledger.mark("before_step")
        self.forward()
        self.ledger.mark("after_forward")
        self.backward()
        self.ledger.mark("after_backward")
        self.strategy.finish()
        return self.ledger

    def backward(self) -> None:
        take, free, strategy = self.ledger.take, self.ledger.free, self.strategy
        take("gradient of the loss", self.s)
        take("gradient of the log-probabilities", self.logits_bytes)
        free("number of targets")
        take("gradient of the logits", self.logits_bytes)
        free("gradient of the log-probabilities")
        free("log-probabilities")
        if self.copies:
            self.cast("gradient of the logits", self.logits_bytes, self.logits_bytes // 2)
        strategy.enter_backward(self.output)
        self.unit = self.output
        self.linear_backward("output", "gradient of the logits", "norm: output", "gradient of RMSNorm's output")
        strategy.leave_backward(self.output)
        self.unit = ROOT
        self.norm_backward(FINAL_NORM, residual=False)
        strategy.enter_backward(self.output - 1)
        for block in reversed(self.blocks):
            self.unit = block
            self.backward_block()
            strategy.pass_backward(block, block - 1)
        self.unit = EMBEDDING
        take(GRADIENTS, self.s * self.of[EMBEDDING]["embedding"].values)
        free("gradient of the residual stream")
        strategy.gradient(self.of[EMBEDDING]["embedding"])
        strategy.leave_backward(EMBEDDING)
        strategy.leave_backward(ROOT)
        free("gradient of the loss")

    def backward_block(self) -> None:
        self.feed_forward_backward()
        self.norm_backward("feed_forward_norm")
        self.attention_backward()
        self.norm_backward("attention_norm")

    def cast(self, name: str, before: int, after: int) -> None:
        """To another dtype: both exist for a moment."""
        self.ledger.take(f"{name}, cast", after)
        self.ledger.free(name, before)
        self.ledger.rename(f"{name}, cast", name, after)

    def linear_backward(
        self, name: str, of_output: str, inputs: str, of_input: str, *, casts_input: bool = True, added: bool = False
    ) -> None:
        """Makes the gradients of the weight and of the `inputs`, then frees the output's gradient and the inputs.

        The names are those of entries: `of_output` and `of_input` of gradients, "" where there is nothing to free.
        `added` where the inputs have a gradient from another layer already, to which this one is added.
        """
        take, free, parameter = self.ledger.take, self.ledger.free, self.of[self.unit][name]
        nbytes = self.ffn_bytes if name == "feed_forward.w2" else self.hidden_bytes
        weight = "half-precision gradient of a weight" if self.copies else GRADIENTS
        of_input_now = f"{of_input} by {name}" if added else of_input
        self.strategy.read(parameter)
        take(weight, self.c * parameter.values)
        take(of_input_now, nbytes)
        self.strategy.drop(parameter)
        if of_output:
            free(of_output)
        if self.copies:
            free(f"{name}: weight in half precision", self.c * parameter.values)
            if casts_input:
                free(f"{name}: input in half precision", self.hidden_bytes)
                self.cast(of_input_now, nbytes, self.residual_bytes)
        if inputs and not (self.copies and casts_input):
            free(inputs, nbytes)
        if added:
            in_place = self.copies or name == "attention.query"
            if not in_place:
                take(f"{of_input}, summed", nbytes)
                free(of_input)
                self.ledger.rename(f"{of_input}, summed", of_input, nbytes)
            free(of_input_now)
        if self.copies:
            take(GRADIENTS, FLOAT * parameter.values)
            free(weight)
        self.strategy.gradient(parameter)

    def norm_backward(self, name: str, residual: bool = True) -> None:
        """Makes the gradient of its input of that of its output; with `residual` adds it to the residual stream's."""
        take, free, parameter = self.ledger.take, self.ledger.free, self.of[self.unit][name]
        residual_bytes, column = self.residual_bytes, self.column_bytes
        self.strategy.read(parameter)
        take("gradient of RMSNorm's weight, before its sum", residual_bytes)
        take("gradient of x / rms(x)", residual_bytes)
        self.strategy.drop(parameter)
        take(GRADIENTS, self.s * parameter.values)
        free("gradient of RMSNorm's weight, before its sum")
        free("gradient of RMSNorm's output")
        free(f"{name}: x / rms(x)", residual_bytes)
        self.strategy.gradient(parameter)
        take("gradient of 1 / rms(x), before its sum", residual_bytes)
        take("gradient of RMSNorm's input" if residual else "gradient of the residual stream", residual_bytes)
        take("gradient of 1 / rms(x)", column)
        free("gradient of 1 / rms(x), before its sum")
        free("gradient of x / rms(x)")
        if residual:
            free("gradient of RMSNorm's input")
        self.ledger.borrow("gradients of rms(x)", 3 * column)
        free("gradient of 1 / rms(x)")
        take("gradient of mean(x^2)", residual_bytes)
        free(f"{name}: 1 / rms(x)", column)
        self.ledger.borrow("gradients of x^2", 3 * residual_bytes)
        free("gradient of mean(x^2)")
        first = self.unit == self.blocks.start and name == "attention_norm"
        free("embedding output" if first else "residual stream", residual_bytes)

    def feed_forward_backward(self) -> None:
        """Frees SwiGLU's activations and leaves the gradient of RMSNorm's output; the residual stream's stays."""
        take, free, ffn = self.ledger.take, self.ledger.free, self.ffn_bytes
        of_output = self.half_gradient()
        self.linear_backward(
            "feed_forward.w2", of_output, "SwiGLU product", "gradient of SwiGLU's product", casts_input=False
        )
        take("gradient of SwiGLU's up-projection", ffn)
        take("gradient of silu", ffn)
        free("gradient of SwiGLU's product")
        free("SwiGLU up-projection", ffn)
        free("silu of the SwiGLU gate", ffn)
        self.linear_backward(
            "feed_forward.w3", "gradient of SwiGLU's up-projection", "", "gradient of RMSNorm's output"
        )
        take("gradient of SwiGLU's gate", ffn)
        free("gradient of silu")
        free("SwiGLU gate", ffn)
        self.linear_backward(
            "feed_forward.w1",
            "gradient of SwiGLU's gate",
            "feed_forward_norm: output",
            "gradient of RMSNorm's output",
            added=True,
        )

    def half_gradient(self) -> str:
        """Under autocast, the residual stream's gradient is cast: the copy's name, or "" where there is none."""
        if not self.copies:
            return ""
        self.ledger.take("half-precision gradient of the block's output", self.hidden_bytes)
        return "half-precision gradient of the block's output"

    def attention_backward(self) -> None:
        """Frees attention's activations and leaves the gradient of RMSNorm's output; the residual stream's stays."""
        free, hidden = self.ledger.free, self.hidden_bytes
        inputs = self.kernel.input_of_projection
        self.linear_backward(
            "attention.output", self.half_gradient(), inputs, "gradient of attention's output", casts_input=False
        )
        self.kernel.backward()
        for _ in ("k", "q"):
            self.ledger.borrow("RoPE: gradients of halves of q or k", 2 * hidden)
            free("RoPE's tables in half precision", self.rope_bytes)
        self.kernel.backward_of_value()
        self.linear_backward("attention.value", "gradient of v", "", "gradient of RMSNorm's output")
        for name in ("attention.key", "attention.query"):
            last = name == "attention.query"
            self.ledger.borrow("gradient of q or k, heads side by side", hidden)
            of_output = "gradients of q and k"
            if not last:  # the one of k is freed, the one of q stays
                self.ledger.rename(of_output, "gradient of k", hidden)
                of_output = "gradient of k"
            inputs = "attention_norm: output" if last else ""
            self.linear_backward(name, of_output, inputs, "gradient of RMSNorm's output", added=True)
