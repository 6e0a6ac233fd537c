"""compute_dtype and reduce_dtype: visible in matrix products and in what is communicated, not only in the errors."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from correctness.fsdp.checks import (
    Odd,
    SGDs,
    averaged_gradients,
    full,
    gradients_of,
    make,
    on_every_rank,
    parameters_as_expected,
    wrap,
)
from correctness.support.communication import recorded
from correctness.support.whole_batch import DIM, batch, own_batch
from impl.distributed import local
from shardmark.api import Implementation
from shardmark.meter.communication import Communication
from shardmark.ranks.world import World

pytestmark = pytest.mark.family("fsdp")

ELEMENTS = 64
"""Messages with at most this many elements are not gradients but facts about them, such as their norm."""
GATHERS = ("all_gather", "broadcast", "gather", "scatter")


class Products(TorchDispatchMode):
    """Records the dtypes of the inputs of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes: set[torch.dtype] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(name in function.name() for name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear")):
            self.dtypes |= {x.dtype for x in args if isinstance(x, Tensor)}
        return function(*args, **(kwargs or {}))


def _named(dtypes: set[torch.dtype]) -> str:
    return ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes)) or "nothing"


def _float32(
    implementation: Implementation, device: str, evaluated: bool = False, **options: Any
) -> tuple[Any, Tensor, Tensor]:
    """Make a sharded float32 module, which an evaluation may come first of, and this rank's batch."""
    model = wrap(implementation, make(Wide, 0, device, torch.float32), **options)
    x, y = own_batch(0, device)
    if evaluated:
        with torch.no_grad():
            model(x.float())
    return model, x.float(), y.float()


class Wide(nn.Sequential):
    """Matrices only, with so many elements that their messages stand out."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(DIM, 31, bias=False), nn.Tanh(), nn.Linear(31, 2 * DIM, bias=False))


def products_on_rank(implementation: Implementation, compute: torch.dtype | None, device: str) -> dict[str, str]:
    """The dtypes of products in forward, in backward and in evaluation, before a step and after one."""
    model, x, y = _float32(implementation, device, compute_dtype=compute)
    found = {}

    def note(where: str, function: Callable[[], Tensor | None]) -> Tensor | None:
        with Products() as products:
            returned = function()
        found[where] = _named(products.dtypes)
        return returned

    def evaluate(where: str) -> None:
        for mode in (torch.no_grad, torch.inference_mode):
            with mode():
                note(f"{where}, in {mode.__name__}", lambda: model(x))

    model.module.eval()
    evaluate("evaluation")
    model.module.train()
    evaluate("a forward pass that is not trained on")
    forward = note("forward", lambda: (model(x).float() - y).square().mean())
    assert forward is not None
    note("backward", forward.backward)
    model.finish_gradient_synchronization()
    model.module.eval()
    evaluate("evaluation after a step")
    return found


@pytest.mark.parametrize("compute", ["float32", "bfloat16", "float16"])
def test_compute_dtype_is_what_matrices_are_multiplied_in(
    implementation: Implementation, world: World, compute: str, device: str
) -> None:
    dtype = None if compute == "float32" else getattr(torch, compute)
    for found in world.run(products_on_rank, implementation, dtype, device):
        for where, products in found.items():
            assert products == compute, f"{where} multiplied in {products}, with compute_dtype={compute}"


@on_every_rank
def test_each_model_has_its_own_compute_dtype(implementation: Implementation, device: str) -> list[str]:
    dtypes = [torch.bfloat16, None, torch.float16, None]
    made = [(dtype, *_float32(implementation, device, compute_dtype=dtype)) for dtype in dtypes]
    wrong = []
    for dtype, model, x, y in made:
        with Products() as products:
            (model(x).float() - y).square().mean().backward()
        model.finish_gradient_synchronization()
        expected, found = _named({dtype or torch.float32}), _named(products.dtypes)
        if found != expected:
            wrong.append(f"of models with compute_dtype={dtypes}, that with {dtype} multiplied in {found}")
    return wrong


@on_every_rank
def test_each_model_has_its_own_reduce_dtype(implementation: Implementation, device: str) -> list[str]:
    dtypes = [torch.float32, torch.bfloat16, torch.float16]
    made = [(dtype, *_float32(implementation, device, reduce_dtype=dtype)) for dtype in dtypes]
    wrong, elements = [], sum(p.numel() for p in Wide().parameters())
    for dtype, model, x, y in made:
        _, sent = _communicated(model, x, y)
        least, found = _least(elements, dtype, dist.get_world_size()), _nbytes(sent, dtype)
        if sent and found < least:
            wrong.append(
                f"of models with reduce_dtype={dtypes}, that with {dtype} communicates {found} bytes of it, and its "
                f"gradients are {least} at least"
            )
    return wrong


def _communicated(model: Any, x: Tensor, y: Tensor) -> tuple[list[Communication], list[Communication]]:
    """Messages of forward, and messages of backward and synchronization."""
    with recorded() as forward:
        squares = (model(x).float() - y).square().mean()
    with recorded() as backward:
        squares.backward()
        model.finish_gradient_synchronization()
    return forward, backward


def communicated_on_rank(
    implementation: Implementation,
    compute: torch.dtype | None,
    reduce: torch.dtype | None,
    device: str,
    evaluated: bool = False,
) -> tuple[list[Communication], list[Communication], int]:
    """Messages of forward, messages of backward and synchronization, and the elements of the full gradients."""
    model, x, y = _float32(implementation, device, evaluated, compute_dtype=compute, reduce_dtype=reduce)
    return *_communicated(model, x, y), sum(p.numel() for p in Wide().parameters())


def _nbytes(sent: Sequence[Communication], dtype: torch.dtype) -> int:
    return sum(each.nbytes for each in sent if each.dtype == dtype)


def _least(elements: int, dtype: torch.dtype, ranks: int) -> int:
    """Bytes that must be on their way to sum so many elements over the ranks in that dtype."""
    return elements * dtype.itemsize * (ranks - 1) // ranks


CHOICES = ("none", "float32", "bfloat16")
OPTIONS = [(compute, reduce, False) for compute in CHOICES for reduce in CHOICES]
AFTER_AN_EVALUATION = [("bfloat16", "float32", True), ("none", "bfloat16", True)]


@pytest.mark.parametrize(("compute", "reduce", "evaluated"), OPTIONS + AFTER_AN_EVALUATION)
def test_reduce_dtype_is_what_gradients_are_communicated_in(
    implementation: Implementation, world: World, compute: str, reduce: str, evaluated: bool, device: str
) -> None:
    """Each option alone, and both, also after an evaluation; without reduce_dtype both the compute dtype and the
    parameters' own are right."""
    options = [None if name == "none" else getattr(torch, name) for name in (compute, reduce)]
    for _, sent, elements in world.run(communicated_on_rank, implementation, *options, device, evaluated):
        if world.size == 1 or not sent:
            pytest.skip("nothing is communicated through the process group")
        sums = [each for each in sent if each.name in ("all_reduce", "reduce_scatter", "reduce")]
        large = [each for each in sums if each.nbytes > ELEMENTS * each.dtype.itemsize]
        if reduce == "none" and compute == "bfloat16":
            other = [each for each in large if each.dtype not in (torch.bfloat16, torch.float32)]
            assert not other, f"without reduce_dtype there is a {other[0]}"
            continue
        wanted: torch.dtype = options[1] or torch.float32
        least = _least(elements, wanted, world.size)
        found = _nbytes(sent, wanted)
        assert found >= least, (
            f"with compute_dtype={compute} and reduce_dtype={reduce} the gradients are at "
            f"least {least} bytes of {wanted} on their way, and {found} were seen; communicated: "
            f"{'; '.join(map(str, sent))}"
        )
        other = [each for each in large if each.dtype != wanted]
        assert not other, f"with compute_dtype={compute} and reduce_dtype={reduce} there is a {other[0]}"
        computed: torch.dtype = options[0] or torch.float32
        if computed != wanted and not sums:  # messages of gathers and of sums: each dtype has its own share
            gathered = _nbytes(sent, computed)
            assert gathered <= elements * computed.itemsize * 2, "gradients are sent in the compute dtype"


def gathers_on_rank(implementation: Implementation, device: str) -> list[Communication]:
    return communicated_on_rank(implementation, torch.bfloat16, None, device)[0]


def test_parameters_are_gathered_in_the_compute_dtype(
    implementation: Implementation, world: World, device: str, record_property: Any
) -> None:
    """Gathering in compute_dtype halves the bytes, but the contract does not promise it: a note, no failure."""
    for sent in world.run(gathers_on_rank, implementation, device):
        if _nbytes(sent, torch.float32) > _nbytes(sent, torch.bfloat16):
            record_property("note", "with compute_dtype=bfloat16 parameters are gathered in float32: twice the bytes")
            return


@on_every_rank
def test_parameters_and_buffers_are_kept_in_their_own_dtype(implementation: Implementation, device: str) -> str:
    """Parameters with values that bfloat16 cannot hold, and a step so small that bfloat16 would round it away."""
    plain = make(Odd, 0, device, torch.float32)
    options = {"compute_dtype": torch.bfloat16, "reduce_dtype": torch.bfloat16}
    module = make(Odd, 0, device, torch.float32)
    module.register_buffer("table", torch.full((3,), 1 / 3, device=device))
    model = wrap(implementation, module, **options)
    gathered = model.gather_full_parameters()
    for name, tensor in gathered.items():
        if tensor.dtype != torch.float32:
            return f"with compute_dtype=bfloat16 the gathered {name} is of {tensor.dtype}, and its own is torch.float32"
    for parameter in model.parameters():
        if parameter.dtype != torch.float32:
            return f"with compute_dtype=bfloat16 a shard is of {parameter.dtype}, and its own dtype is torch.float32"
    if problem := parameters_as_expected("with compute_dtype=bfloat16, the stored", model, plain, 0):
        return problem
    x, _ = own_batch(0, device)
    model(x.float()).float().sum().backward()
    model.finish_gradient_synchronization()
    for buffer in model.module.buffers():
        if buffer.dtype != torch.float32 or not (buffer == 1 / torch.full((), 3.0, device=device)).all():
            return f"with compute_dtype=bfloat16 a buffer of 1/3 is {buffer} after a step, and its own is torch.float32"
    shards = [local(p).detach().clone() for p in model.parameters()]
    gradients = [None if p.grad is None else local(p.grad).clone() for p in model.parameters()]
    SGDs(model, lr=1e-4).step()
    for before, gradient, after in zip(shards, gradients, model.parameters(), strict=True):
        expected = before if gradient is None else before - 1e-4 * gradient
        if not torch.allclose(local(after), expected, rtol=1e-6, atol=1e-7):
            return "with compute_dtype=bfloat16 a small step of the optimizer is rounded away"
    expected_steps = {
        name: value - before.to(value.device)
        for (name, value), before in zip(full(model).items(), gathered.values(), strict=True)
    }
    return "" if any(step.any() for step in expected_steps.values()) else "a small step of the optimizer is lost"


@on_every_rank
def test_gradients_of_several_passes_add_up_in_the_parameters_dtype(implementation: Implementation, device: str) -> str:
    """Each pass's gradient is a number of bfloat16, in which they are reduced; 256.5 is none."""
    model = wrap(implementation, nn.Linear(4, 4, bias=False).to(device), reduce_dtype=torch.bfloat16)
    for scale in (256.0, *[0.5] * 16):
        (model(torch.ones(1, 4, device=device)).sum() * scale).backward()
        model.finish_gradient_synchronization()
    found = averaged_gradients(model)["weight"]
    return "" if (found == 264).all() else f"gradients of 256 and 16 times 0.5 add up to {found.max().item()}, not 264"


@pytest.mark.parametrize("reduce", [None, torch.float32], ids=["reduced_in_bfloat16", "reduced_in_float32"])
@on_every_rank
def test_low_precision_errs_no_more_than_twice_as_much_as_one_process(
    implementation: Implementation, reduce: torch.dtype | None, device: str
) -> str:
    """Compare with float64: the error is at most twice that of an unsharded module in bfloat16."""
    ranks = dist.get_world_size()
    exact, rounded = make(Wide, 0, device), make(Wide, 0, device, torch.bfloat16)
    sums: dict[str, Tensor] = {}
    x, y = batch(0, ranks, device)
    for rows in torch.arange(len(x), device=device).chunk(ranks):
        ((exact(x[rows]) - y[rows]).square().mean() / ranks).backward()
        rounded.zero_grad()
        (rounded(x[rows].bfloat16()).double() - y[rows]).square().mean().backward()
        for name, gradient in gradients_of(rounded).items():
            sums[name] = sums.get(name, torch.zeros_like(gradient)) + gradient / ranks  # summed in bfloat16
    options = {"compute_dtype": torch.bfloat16, "reduce_dtype": reduce}
    model = wrap(implementation, make(Wide, 0, device, torch.float32), **options)
    x, y = own_batch(0, device)
    (model(x.float()).double() - y).square().mean().backward()
    model.finish_gradient_synchronization()
    found, expected = averaged_gradients(model), gradients_of(exact)

    def error(gradients: dict[str, Tensor]) -> float:
        errors = [(gradients[name].double() - expected[name]).norm() / expected[name].norm() for name in expected]
        return max(errors).item()  # the largest over all tensors: the error of one tensor may be small by luck

    allowed = 2 * (error(sums) + torch.finfo(torch.bfloat16).eps)
    return "" if error(found) <= allowed else f"relative error of a gradient {error(found):.2e}, allowed {allowed:.2e}"


@pytest.mark.parametrize("when", ["between_forward_and_backward", "before_synchronization", "after_evaluation"])
@on_every_rank
def test_gathered_parameters_are_not_the_rounded_ones_of_the_pass(
    implementation: Implementation, when: str, device: str
) -> str:
    """They are as the shards are, in their own dtype: a checkpoint may be saved at any time."""
    model, x, _ = _float32(implementation, device, compute_dtype=torch.bfloat16)
    plain = make(Wide, 0, device, torch.float32)
    if when == "after_evaluation":
        with torch.no_grad():
            model(x)
    else:
        output = model(x)
        if when == "before_synchronization":
            output.float().sum().backward()
    if problem := parameters_as_expected(f"gathered {when.replace('_', ' ')},", model, plain, 0.0):
        return problem
    if when == "between_forward_and_backward":
        output.float().sum().backward()
    if when != "after_evaluation":
        model.finish_gradient_synchronization()
    return parameters_as_expected("gathered at last,", model, plain, 0.0)
