"""The training step under torch.compile: which part of it is compiled, and with which options.

Parts that each implementation compiles into one call from Python:

    compile_model               the model's forward; its backward is compiled, too, and called by autograd
    compile_forward_backward    forward with the loss; and backward, as compiled autograd captures it
    compile_step                forward, loss, backward and the sum into `.grad` as one graph; then the update
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from impl.attention.compiled import MANY
from impl.training_step.accounting import eager_peak
from impl.training_step.eager import EagerStep
from shardmark.api import Race, Unsupported, register, requires_compiler, requires_cuda

OPTIONS = ("epilogue_fusion", "shape_padding", "max_autotune", "triton.cudagraphs")
"""Inductor's options that the ladder turns on, one at a time and all together.

Epilogue fusion puts pointwise operators into the matrix product kernels that the compiler generates, which it does only
under max autotune. Shape padding pads matrix products to the multiples that tensor cores need. Both are on by default
in PyTorch. A CUDA graph owns its memory: once it is replayed, the allocator's statistics, and so the meter, miss it.
"""


def options(*on: str) -> dict[str, Any]:
    """Return all of OPTIONS, the named ones on and the others off, whatever PyTorch's defaults are."""
    return {name: name in on for name in OPTIONS}


def _compiling(**config: Any) -> AbstractContextManager[None]:
    """Dynamo's configuration at each call, with raised recompile limits: above them it silently runs eager."""
    return torch._dynamo.config.patch(recompile_limit=MANY, accumulated_recompile_limit=MANY, **config)


class CompileModel(EagerStep):
    """`module.compile()`: the loss and the update stay eager. Contract: `impl.training_step`."""

    options: ClassVar[dict[str, Any] | None] = None
    """Inductor's options; None for PyTorch's defaults."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> None:
        super().__init__(model, optimizer, **options)
        model.compile(dynamic=False, options=self.options)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        if self.options and self.options["triton.cudagraphs"]:
            torch.compiler.cudagraph_mark_step_begin()  # the next graphs may overwrite outputs of the last step's
        with _compiling():
            return super().forward(tokens, targets)


class CompileForwardBackward(EagerStep):
    """Forward and loss in one compiled call; backward captured by compiled autograd and compiled in another.

    Compiled autograd is entered directly, with one compiler for all steps. With
    `torch._dynamo.config.compiled_autograd` each step would make a new compiler.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> None:
        super().__init__(model, optimizer, **options)
        self._compiled_forward = torch.compile(self._forward, fullgraph=True, dynamic=False)
        self._compile_backward = torch.compile(fullgraph=True, dynamic=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        with torch.autocast(self.device, enabled=False), _compiling():  # or backward would be compiled for the caller's
            return self._compiled_forward(tokens, targets)

    def backward(self, loss: Tensor) -> None:
        """Every node of autograd's graph, the sums into `.grad` included, in one compiled call."""
        from torch._dynamo import (
            compiled_autograd,  # imported here: it imports the compiler, which takes as long as importing torch
        )

        with _compiling(), compiled_autograd._enable(self._compile_backward, dynamic=False):
            super().backward(loss)


class CompileStep(EagerStep):
    """One compiled call for the full step. `forward`, `backward` and `update`, called separately, are eager.

    The compiler traces backward (`trace_autograd_ops`), so forward, loss, backward and the sums into `.grad` are one
    graph, and nothing is saved between two. PyTorch's optimizers cause a graph break around their step: a fused
    optimizer runs its own kernel, which is not compiled; the update of any other is compiled into a second graph.
    Unsupported for float16, where the host decides whether to skip a step.
    """

    accumulates: ClassVar[bool] = False
    """Gradients of several batches cannot accumulate before its one call, which has forward in it."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, **options: Any) -> None:
        super().__init__(model, optimizer, **options)
        if self.precision.compute == torch.float16:
            raise Unsupported("compile_step takes no float16: the host decides whether a step is skipped")
        self._compiled = torch.compile(self._step, dynamic=False)

    def __call__(self, tokens: Tensor, targets: Tensor, mark: Callable[[str], None] = lambda part: None) -> Tensor:
        with torch.autocast(self.device, enabled=False), _compiling(trace_autograd_ops=True):
            loss = self._compiled(tokens, targets)
        mark("step")
        return loss

    def _step(self, tokens: Tensor, targets: Tensor) -> Tensor:
        loss = self._forward(tokens, targets)
        loss.backward()  # without the scaler, which the compiler does not trace
        loss = loss.detach()  # before the graph break: a graph that returned a differentiable loss would end here
        self.optimizer.step()
        return loss


class CompileNoOptions(CompileModel):
    """The model compiled with each of OPTIONS off."""

    options = options()


class CompileEpilogueFusion(CompileModel):
    """Pointwise operators fused into the matrix products before them."""

    options = options("epilogue_fusion")


class CompileShapePadding(CompileModel):
    """Matrix products padded to multiples that tensor cores need."""

    options = options("shape_padding")


class CompileMaxAutotune(CompileModel):
    """Matrix products by the fastest kernel on this machine, the library's or one generated in Triton."""

    options = options("max_autotune")


class CompileCudagraphs(CompileModel):
    """Forward and backward each replayed as a CUDA graph; free the gradients before the next forward."""

    options = options("triton.cudagraphs")


class CompileAllOptions(CompileModel):
    """All of OPTIONS on."""

    options = options(*OPTIONS)


for _name, _called, _target, _peer, _requires in (
    ("compile_model", "the step with the model compiled", CompileModel, "eager", ()),
    ("compile_forward_backward", "the step with forward and backward compiled", CompileForwardBackward, "eager", ()),
    ("compile_step", "the step compiled as one", CompileStep, "eager", ()),
    ("compile_no_options", "the compiler without options", CompileNoOptions, "eager", ()),
    ("compile_epilogue_fusion", "the compiler with epilogue fusion", CompileEpilogueFusion, "compile_no_options", ()),
    ("compile_shape_padding", "the compiler with shape padding", CompileShapePadding, "compile_no_options", ()),
    (
        "compile_max_autotune",
        "the compiler with max-autotune",
        CompileMaxAutotune,
        "compile_no_options",
        (requires_cuda,),
    ),
    ("compile_cudagraphs", "the compiler with CUDA graphs", CompileCudagraphs, "compile_no_options", (requires_cuda,)),
    ("compile_all_options", "the compiler with all options", CompileAllOptions, "compile_no_options", (requires_cuda,)),
):
    register(
        "training_step",
        _name,
        _target,
        memory=eager_peak,
        time=Race(_peer),
        requires=(*_requires, requires_compiler),
        called=_called,
    )
