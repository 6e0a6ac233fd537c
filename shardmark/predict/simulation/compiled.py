"""Run what `torch.compile` compiles in a simulation: the graphs of its compiler, without the code that it generates.

Dynamo traces the program, and AOTAutograd's partitioner chooses what forward keeps for backward, as in a real run. Each
graph then runs operator by operator, with two differences from eager: operators that the compiler fuses are one kernel,
which reads what comes from outside and writes what leaves it; and a tensor is freed after its last use, or written
over by the kernel that uses it last.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch._dynamo
from torch import Tensor, fx
from torch._C._dynamo.eval_frame import set_eval_frame
from torch._dynamo.convert_frame import CatchErrorsWrapper, input_codes
from torch._dynamo.eval_frame import skip_code
from torch._dynamo.exc import TorchDynamoException
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

from shardmark.api.registry import Unsupported
from shardmark.api.requirements import error_line
from shardmark.predict.simulation.costs import Cost
from shardmark.predict.simulation.fusion import Kernel, kernels_of

T = TypeVar("T")

RECOMPILE_LIMIT = 10_000
"""Above PyTorch's own limit of 8 a program is eager, without a word."""

Allocate = Callable[[Any], Any]
"""Allocates tensors like these, without values."""
Launch = Callable[[Cost], None]
"""Launches a kernel of that cost."""

_SIMULATED: list[tuple[Allocate, Launch]] = []
"""How the simulations that run allocate and launch, the innermost last."""


class Compiled:
    """One of Inductor's graphs, run kernel by kernel. It may write over those of its inputs that are `donated`."""

    def __init__(self, graph: fx.GraphModule, donated: Sequence[int] = ()) -> None:
        self._boxed_call = True  # it empties the list of its arguments, so that they are freed after their last use
        self._graph = graph
        self._inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
        (self._output,) = [node for node in graph.graph.nodes if node.op == "output"]
        self._kernels = kernels_of(graph.graph, {self._inputs[i] for i in donated})
        self._dead = _dead_after(self._kernels, self._inputs, self._output)

    def __call__(self, args: list[Any]) -> Any:
        """Return the graph's results; empties `args`."""
        if not _SIMULATED:
            raise RuntimeError("this graph was compiled in a simulation, which is over")
        allocate, launch = _SIMULATED[-1]
        known: dict[fx.Node, Any] = dict(zip(self._inputs, args, strict=True))
        args.clear()
        _drop(known, self._dead[-1])
        for kernel, dead in zip(self._kernels, self._dead, strict=False):
            if kernel.cost is None:
                known |= {node: self._run(node, known) for node in kernel.nodes}
            else:
                for node in kernel.nodes:
                    over = kernel.over.get(node)
                    if over is not None and over in dead and over in known:
                        known[node] = known.pop(over)
                    else:
                        known[node] = allocate(node.meta["val"])
                launch(kernel.cost)
            _drop(known, dead)
        return fx.map_arg(self._output.args[0], lambda node: known[node])

    def _run(self, node: fx.Node, known: dict[fx.Node, Any]) -> Any:
        given, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: known[each])
        if node.op == "call_function":
            function: Any = node.target
            args: Any = given
            if function is run_and_save_rng_state:
                function, *args = args
                return torch.get_rng_state(), function(*args, **kwargs)
            if function is run_with_rng_state:
                _, function, *args = args
            if isinstance(function, HigherOrderOperator):
                raise Unsupported(f"a simulation does not run {function}, which torch.compile compiles as a whole")
            return function(*args, **kwargs)
        found: Any = self._graph
        for part in str(node.target).split("."):
            found = getattr(found, part)
        return found


def _drop(known: dict[fx.Node, Any], dead: set[fx.Node]) -> None:
    for node in dead:
        known.pop(node, None)


def _dead_after(kernels: Sequence[Kernel], inputs: Sequence[fx.Node], output: fx.Node) -> list[set[fx.Node]]:
    """The values that nothing needs after each kernel; last, the inputs that nothing needs at all."""
    last = {node: i for i, kernel in enumerate(kernels) for node in (*kernel.nodes, *kernel.reads)}
    last = dict.fromkeys(inputs, len(kernels)) | last
    dead: list[set[fx.Node]] = [set() for _ in range(len(kernels) + 1)]
    for node in last.keys() - set(output.all_input_nodes):
        dead[last[node]].add(node)
    return dead


def untraced(function: Callable[..., T]) -> Callable[..., T]:
    """The function, which Dynamo does not trace where a program that it compiles calls it."""

    def call(*args: Any, **kwargs: Any) -> T:
        tracing = set_eval_frame(None)
        try:
            return function(*args, **kwargs)
        finally:
            set_eval_frame(tracing)

    skip_code(call.__code__)
    return call


@contextmanager
def compiling_graphs(past_kernels: Callable[[], Any], allocate: Allocate, launch: Launch) -> Iterator[None]:
    """In the block code is compiled to graphs that a simulation runs. Code compiled before is compiled again in it, and
    code compiled in it is compiled again afterwards."""
    catching = CatchErrorsWrapper.__call__
    compiling = torch._TorchCompileInductorWrapper.__call__

    def traced(wrapper: CatchErrorsWrapper, *args: Any) -> Any:
        before = logging.root.manager.disable
        logging.disable(logging.WARNING)  # warnings are for those who run the program
        try:
            with past_kernels(), torch._dynamo.config.patch(assume_static_by_default=True):
                return catching(wrapper, *args)
        except TorchDynamoException as error:
            raise _in_one_line(error) from None
        finally:
            logging.disable(before)

    def to_graphs(wrapper: Any, *args: Any, **kwargs: Any) -> Any:
        from torch._inductor import compile_fx, config  # which takes a second

        graph: Any = _graph
        into_graphs = partial(compile_fx.compile_fx, inner_compile=graph)
        # A cache has the code of a real run, and should not get ours.
        with config.patch(force_disable_caches=True), patch.object(compile_fx, "compile_fx", into_graphs):
            return compiling(wrapper, *args, **kwargs)

    dynamo = torch._dynamo.config.patch(
        recompile_limit=RECOMPILE_LIMIT, accumulated_recompile_limit=RECOMPILE_LIMIT, automatic_dynamic_shapes=False
    )
    with ExitStack() as stack:
        stack.enter_context(dynamo)
        stack.enter_context(patch.object(CatchErrorsWrapper, "__call__", traced))
        stack.enter_context(patch.object(torch._TorchCompileInductorWrapper, "__call__", to_graphs))
        _forget()
        _SIMULATED.append((allocate, launch))
        try:
            yield
        finally:
            _SIMULATED.pop()
            _forget()


def _graph(graph: fx.GraphModule, examples: Sequence[Any], *, is_backward: bool = False, **options: Any) -> Compiled:
    """In place of the function by which Inductor generates a graph's code."""
    if any(isinstance(node.target, OpOverload) and _is_dynamic(node.meta.get("val")) for node in graph.graph.nodes):
        raise Unsupported("a simulation has no dynamic shapes, which torch.compile was asked for")
    context = torch._guards.TracingContext.try_get()
    donated = None
    if is_backward and context is not None and torch._functorch.config.donated_buffer:
        donated = getattr(context.fw_metadata, "bw_donated_idxs", None)
    return Compiled(graph, donated or ())


def _is_dynamic(value: Any) -> bool:
    return isinstance(value, Tensor) and any(isinstance(size, torch.SymInt) for size in value.shape)


def _in_one_line(error: TorchDynamoException) -> Unsupported:
    inner = getattr(error, "inner_exception", None)
    if isinstance(inner, Unsupported):
        return inner
    return Unsupported(f"torch.compile: {error_line(error)}")


def _forget() -> None:
    """Forget compiled code, and which kernels operators have: a simulation registers others."""
    if input_codes.seen:
        torch._dynamo.reset()
    for packet in list(vars(torch.ops.aten).values()):
        for overload in list(getattr(packet, "__dict__", {}).values()):
            if isinstance(overload, OpOverload):
                overload._dispatch_cache.clear()
