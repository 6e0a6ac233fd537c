"""The training step under torch.compile: how much of it is handed to the compiler, and with which options.

What each placement hands over, in one call from Python to compiled code:

    compile_model               the model's forward; its backward is compiled with it, and called by autograd
    compile_forward_backward    forward with the loss; backward as compiled autograd captures it
    compile_step                forward, loss, backward and the sum into `.grad` as one graph, then the update
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from impl.attention.compiled import MANY
from impl.precision import FLOAT32, Precision
from impl.training_step.accounting import eager_peak
from impl.training_step.eager import EagerStep
from shardmark.machine import requires_compiler
from shardmark.registry import Race, Unsupported, register, requires_cuda

OPTIONS = ("epilogue_fusion", "shape_padding", "max_autotune", "triton.cudagraphs")
"""Inductor's options that the ladder turns on, alone and together.

Epilogue fusion puts pointwise work into the matrix products that the compiler writes itself, which it does under max
autotune alone; shape padding widens products to multiples that tensor cores like. PyTorch has these two on by default.
A CUDA graph's memory belongs to the graph: the allocator's statistics, and so the meter, miss it once it is replayed.
"""


def options(*on: str) -> dict[str, Any]:
    """All of OPTIONS, those named on and the others off, so that what PyTorch's default is does not matter."""
    return {name: name in on for name in OPTIONS}


def _compiling(**config: Any) -> AbstractContextManager[None]:
    """Dynamo's configuration at each call: as many shapes and models as a process has, else it turns silently eager."""
    return torch._dynamo.config.patch(recompile_limit=MANY, accumulated_recompile_limit=MANY, **config)


class CompileModel(EagerStep):
    """`module.compile()`: loss, backward's start and the update stay eager. Contract: `impl.training_step`."""

    options: ClassVar[dict[str, Any] | None] = None
    """Inductor's options; None for PyTorch's defaults."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, precision: Precision = FLOAT32) -> None:
        super().__init__(model, optimizer, precision=precision)
        model.compile(dynamic=False, options=self.options)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy."""
        if self.options and self.options["triton.cudagraphs"]:
            torch.compiler.cudagraph_mark_step_begin()  # what the last step's graphs gave out may be overwritten
        with _compiling():
            return super().forward(tokens, targets)


class CompileForwardBackward(EagerStep):
    """Forward and loss in one compiled call; backward captured by compiled autograd and compiled in another.

    Compiled autograd is entered directly, with one compiler for the life of the step: under
    `torch._dynamo.config.compiled_autograd` each step makes a compiler anew.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, precision: Precision = FLOAT32) -> None:
        super().__init__(model, optimizer, precision=precision)
        self._forward = torch.compile(super().forward, fullgraph=True, dynamic=False)
        self._compile_backward = torch.compile(fullgraph=True, dynamic=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean cross entropy."""
        with _compiling():
            return self._forward(tokens, targets)

    def backward(self, loss: Tensor) -> None:
        """Every node of autograd's graph, the sums into `.grad` included, in one compiled call."""
        from torch._dynamo import (
            compiled_autograd,  # with it comes the compiler, which takes as long as torch to import
        )

        with _compiling(), compiled_autograd._enable(self._compile_backward, dynamic=False):
            super().backward(loss)


class CompileStep(EagerStep):
    """One compiled call for all of it. `forward`, `backward` and `update`, called apart, are eager.

    The compiler is told to trace backward, so that forward, loss, backward and the sums into `.grad` are one graph and
    nothing is saved between two. PyTorch's optimizers ask for a graph break around their step. A fused optimizer then
    runs its own kernel, which the compiler leaves alone; the update of any other is compiled into a second graph.
    Float16 is Unsupported: whether its step is skipped is decided on the host.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, *, precision: Precision = FLOAT32) -> None:
        super().__init__(model, optimizer, precision=precision)
        if precision.compute == torch.float16:
            raise Unsupported("compile_step takes no float16: the host decides whether a step is skipped")
        self._compiled = torch.compile(self._step, dynamic=False)

    def __call__(self, tokens: Tensor, targets: Tensor, mark: Callable[[str], None] = lambda part: None) -> Tensor:
        """Forward, backward, update."""
        with _compiling(trace_autograd_ops=True):
            loss = self._compiled(tokens, targets)
        mark("step")
        return loss

    def _step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = self.forward(tokens, targets)
        loss.backward()  # not by way of the scaler, which the compiler does not trace
        loss = loss.detach()  # before the break: were the graph to give out a loss to differentiate, it would end there
        self.optimizer.step()
        return loss


class CompileNoOptions(CompileModel):
    """The model compiled with each of OPTIONS off."""

    options = options()


class CompileEpilogueFusion(CompileModel):
    """Pointwise work fused into what comes before it."""

    options = options("epilogue_fusion")


class CompileShapePadding(CompileModel):
    """Matrix products padded to sizes that the hardware likes."""

    options = options("shape_padding")


class CompileMaxAutotune(CompileModel):
    """Matrix products by whichever kernel, library or Triton, is fastest here."""

    options = options("max_autotune")


class CompileCudagraphs(CompileModel):
    """Forward and backward each replayed as a CUDA graph; gradients are to be let go of before the next forward."""

    options = options("triton.cudagraphs")


class CompileAllOptions(CompileModel):
    """All of OPTIONS."""

    options = options(*OPTIONS)


for _name, _target, _peer, _requires in (
    ("compile_model", CompileModel, "eager", ()),
    ("compile_forward_backward", CompileForwardBackward, "eager", ()),
    ("compile_step", CompileStep, "eager", ()),
    ("compile_no_options", CompileNoOptions, "eager", ()),
    ("compile_epilogue_fusion", CompileEpilogueFusion, "compile_no_options", ()),
    ("compile_shape_padding", CompileShapePadding, "compile_no_options", ()),
    ("compile_max_autotune", CompileMaxAutotune, "compile_no_options", (requires_cuda,)),
    ("compile_cudagraphs", CompileCudagraphs, "compile_no_options", (requires_cuda,)),
    ("compile_all_options", CompileAllOptions, "compile_no_options", (requires_cuda,)),
):
    register(
        "training_step",
        _name,
        _target,
        memory=eager_peak,
        time=Race(_peer),
        requires=(*_requires, requires_compiler),
    )
