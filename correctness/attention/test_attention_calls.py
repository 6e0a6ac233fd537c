"""Calls of attention are independent: nothing is shared, changed, or held longer than needed."""

from functools import partial

import pytest
import torch
from torch import Tensor

from correctness.attention.accuracy import random_inputs, results
from correctness.support.contracts import (
    Note,
    assert_near,
    assert_unchanged,
    gradient_of_gradient,
    is_ours,
)
from correctness.support.global_state import global_state_stays
from impl.attention import Attention, eager_attention
from shardmark.api import Implementation, Unsupported

pytestmark = [pytest.mark.family("attention"), pytest.mark.usefixtures("poisoned")]

NAMES = ("q", "k", "v", "gradient of the output")


def _inputs(device: str, q_len: int = 33, k_len: int = 33, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return random_inputs((2, q_len, 16), (2, k_len, 16), dtype, device)


def _exact(inputs: list[Tensor], is_causal: bool) -> dict[str, Tensor]:
    return results(eager_attention, [x.double() for x in inputs], is_causal)


def test_leaves_its_inputs_as_they_are(implementation: Implementation, device: str) -> None:
    for is_causal in (True, False):
        inputs = _inputs(device)
        before = {name: x.clone() for name, x in zip(NAMES, inputs, strict=True)}
        with global_state_stays("forward or backward"):
            results(implementation.watched, inputs, is_causal)
        assert_unchanged(before, dict(zip(NAMES, inputs, strict=True)), "after forward and backward")


def test_leaves_results_of_other_operations_as_they_are(implementation: Implementation, device: str) -> None:
    """Another operation may have saved its result for its own backward, as exp does."""
    for is_causal in (True, False):
        *qkv, grad = _inputs(device)
        given = {name: x.detach().requires_grad_().clone() for name, x in zip(NAMES[:3], qkv, strict=True)}
        torch.autograd.grad(implementation.watched(*given.values(), is_causal=is_causal), [*given.values()], grad)
        assert_unchanged(dict(zip(NAMES, qkv, strict=False)), given, "after forward and backward")


@pytest.mark.parametrize("first_backward", [0, 1], ids=["in_order", "in_reverse"])
def test_two_forwards_before_either_backward(implementation: Implementation, first_backward: int, device: str) -> None:
    """Two layers or two batches: equal shapes, different values and masks."""
    calls = [(_inputs(device), True), (_inputs(device), False)]
    leaves = [[x.detach().requires_grad_() for x in inputs[:3]] for inputs, _ in calls]
    outputs = [implementation.watched(*qkv, is_causal=causal) for qkv, (_, causal) in zip(leaves, calls, strict=True)]
    for i in (first_backward, 1 - first_backward):
        inputs, is_causal = calls[i]
        gradients = torch.autograd.grad(outputs[i], leaves[i], inputs[3])
        found = {"out": outputs[i], **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
        assert_near(found, _exact(inputs, is_causal), f"of two calls, the {'first' if i == 0 else 'second'}")


@pytest.mark.parametrize("with_gradients", [True, False], ids=["gradients", "no_gradients"])
def test_results_stay_while_other_calls_run(implementation: Implementation, with_gradients: bool, device: str) -> None:
    def call() -> dict[str, Tensor]:
        inputs = _inputs(device)
        if with_gradients:
            return results(implementation.watched, inputs, is_causal=True)
        with torch.no_grad():
            return {"out": implementation.watched(*inputs[:3], is_causal=True)}

    first = call()
    before = {name: x.clone() for name, x in first.items()}
    call()
    assert_unchanged(before, first, "while a second call ran, of the first")


def test_the_same_tensors_twice_in_a_graph(implementation: Implementation, device: str) -> None:
    """Attention over attention's output, with the same k and v; and over one tensor as q, k and v."""

    def twice(attention: Attention, q: Tensor, k: Tensor, v: Tensor, grad: Tensor) -> dict[str, Tensor]:
        q, k, v = leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        once = attention(q, k, v, is_causal=True)
        out = attention(once, k, v, is_causal=False) + attention(k, k, k, is_causal=True) + once
        return dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, leaves, grad), strict=True))

    inputs = _inputs(device)
    wanted = twice(eager_attention, *(x.double() for x in inputs))
    assert_near(twice(implementation.watched, *inputs), wanted, "called three times in one graph")


SEQUENCE = [  # q_len, k_len, dtype, is_causal
    (6, 6, torch.float32, True),
    (4, 9, torch.float32, True),
    (9, 4, torch.float32, True),
    (6, 6, torch.bfloat16, True),
    (6, 6, torch.float32, False),
    (3, 12, torch.float32, True),
    (6, 6, torch.float64, True),
    (6, 9, torch.float32, True),
    (6, 6, torch.float32, True),
]


def test_calls_of_other_shapes_and_dtypes_between(implementation: Implementation, device: str) -> None:
    """A mask or buffer cached by an earlier call must not be used for another shape or dtype."""
    ran = 0
    for q_len, k_len, dtype, is_causal in SEQUENCE:
        inputs = _inputs(device, q_len, k_len, dtype)
        try:
            found = results(implementation.watched, inputs, is_causal)
        except Unsupported:
            continue
        share = 0.1 if dtype == torch.bfloat16 else 1e-3
        assert_near(found, _exact(inputs, is_causal), f"q_len {q_len}, k_len {k_len}, {dtype} after others", share)
        ran += 1
    if not ran:
        pytest.skip("takes none of these shapes and dtypes")


@pytest.mark.parametrize("mode", ["gradients", "no_grad", "inference_mode"])
def test_the_same_tensors_changed_in_place_give_other_results(
    implementation: Implementation, mode: str, device: str
) -> None:
    """Parameters, token buffers and KV caches (with fewer heads) change in place between calls."""
    q, k, v, grad = inputs = random_inputs((4, 33, 16), (2, 33, 16), torch.float32, device)
    tensors = [x.requires_grad_(mode == "gradients") for x in (q, k, v)]
    with {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}.get(mode, torch.enable_grad)():
        implementation.watched(*tensors, is_causal=True)
        for x in tensors:
            x.data.mul_(-0.5)
        out = implementation.watched(*tensors, is_causal=True)
    wanted = _exact(inputs, True)
    found = {"out": out}
    if mode == "gradients":
        found |= dict(zip(("dq", "dk", "dv"), torch.autograd.grad(out, tensors, grad), strict=True))
    assert_near(found, {name: wanted[name] for name in found}, f"{mode}, after a change in place")


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "nothing_requires_grad"])
@pytest.mark.parametrize(("q_len", "k_len"), [(40, 33), (1, 33), (33, 1), (2, 2)])
def test_gives_the_same_output_without_gradients(
    implementation: Implementation, q_len: int, k_len: int, mode: str, device: str
) -> None:
    """One query is no step of a decoder, which would see all keys: a causal one sees the first."""
    *qkv, _ = inputs = _inputs(device, q_len, k_len)
    contexts = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}
    for is_causal in (True, False):
        with contexts.get(mode, torch.enable_grad)():
            leaves = [x.detach().requires_grad_(mode == "no_grad") for x in qkv]
            out = implementation.watched(*leaves, is_causal=is_causal)
        assert not out.requires_grad, "the output requires a gradient where none is asked for"
        assert_near({"out": out}, {"out": _exact(inputs, is_causal)["out"]}, mode, share=1e-4)


@pytest.mark.parametrize("is_causal", [True, False], ids=["causal", "full"])
def test_trains_on_what_it_was_first_evaluated_on(implementation: Implementation, is_causal: bool, device: str) -> None:
    """Lengths that no other test has: tensors cached under inference_mode cannot be saved for backward."""
    inputs = _inputs(device, 43, 39)
    with torch.inference_mode():
        implementation.watched(*inputs[:3], is_causal=is_causal)
    found = results(implementation.watched, inputs, is_causal)
    assert_near(found, _exact(inputs, is_causal), "trained on lengths that were evaluated first")


def _penalty_gradients(attention: Attention, inputs: list[Tensor], is_causal: bool, needed: str) -> dict[str, Tensor]:
    """Gradients of a loss that penalizes the gradients of those of q, k and v that are needed.

    The output's gradient depends on the output, and all leaves get theirs: else `once_differentiable` does not raise.
    """
    qkv = {name: x.detach().requires_grad_(name in needed) for name, x in zip("qkv", inputs, strict=False)}
    leaves = {name: qkv[name] for name in needed}
    loss = (inputs[3] * attention(*qkv.values(), is_causal=is_causal).square()).sum()
    gradients = torch.autograd.grad(loss, [*leaves.values()], create_graph=True)
    (loss + sum(x.square().sum() for x in gradients)).backward()
    assert all(x.grad is not None for x in leaves.values()), f"one of {needed} has no gradient"
    return {f"d{name}": x.grad for name, x in leaves.items()}


@pytest.mark.compiled_every_time("causal")
@pytest.mark.parametrize(
    ("heads", "is_causal", "needed"),
    [(2, True, "qkv"), (4, False, "qkv"), (4, True, "k"), (4, False, "q"), (2, True, "v"), (4, True, "kv")],
    ids=["causal", "grouped", "grouped_k_alone", "grouped_q_alone", "v_alone", "grouped_kv"],
)
def test_a_second_derivative_is_right_or_a_clear_error(
    implementation: Implementation, heads: int, is_causal: bool, needed: str, device: str
) -> None:
    inputs = random_inputs((heads, 33, 16), (2, 33, 16), torch.float32, device)
    wording = r"double backward|derivative for \S+ is not implemented|create_graph=False"
    twice = partial(_penalty_gradients, is_causal=is_causal, needed=needed)
    found = gradient_of_gradient(implementation, lambda: twice(implementation.watched, inputs), wording)
    if found is not None:
        wanted = twice(eager_attention, [x.double() for x in inputs])
        assert_near(found, wanted, "differentiated twice")


def test_a_gradient_with_create_graph_is_no_constant(
    implementation: Implementation, device: str, record_property: Note
) -> None:
    """If the output's gradient is a constant, `once_differentiable` raises no error."""
    q, k, v, grad = _inputs(device)
    out = implementation.watched(q.requires_grad_(), k, v)
    (grad_q,) = torch.autograd.grad(out, q, grad, create_graph=True)
    if not grad_q.requires_grad:
        assert not is_ours(implementation), "with create_graph=True the gradient of q is a constant"
        record_property("note", "with create_graph=True its gradients may be constants, without an error")


def _assert_right_or_an_error(out: Tensor, qkv: list[Tensor], inputs: list[Tensor], when: str) -> None:
    try:
        gradients = torch.autograd.grad(out, qkv, inputs[3])
    except RuntimeError:
        return
    wanted = _exact(inputs, True)
    del wanted["out"]
    assert_near(dict(zip(wanted, gradients, strict=True)), wanted, when)


def test_a_backward_after_a_change_in_place_is_right_or_an_error(implementation: Implementation, device: str) -> None:
    """Autograd sees a change of what `save_for_backward` has, such as a gate's product in place of the output. The
    compiler's views hide it: it is left out."""
    for name in ("q", "k", "v", "the output"):
        inputs = _inputs(device)
        qkv = [x.detach().clone().requires_grad_() for x in inputs[:3]]
        with torch.compiler.set_stance("force_eager"):
            out = implementation.watched(*qkv, is_causal=True)
        with torch.no_grad():
            dict(zip("qkv", qkv, strict=True)).get(name, out).mul_(-0.5)
        _assert_right_or_an_error(out, qkv, inputs, f"in a backward after {name} has changed in place")


@pytest.mark.should("equal calls give equal bits")
def test_is_deterministic(implementation: Implementation, device: str, record_property: Note) -> None:
    inputs = _inputs(device)
    first, second = (results(implementation.watched, inputs, is_causal=True) for _ in range(2))
    differ = [name for name in first if not torch.equal(first[name], second[name])]
    if differ:
        assert not is_ours(implementation), f"{', '.join(differ)} of two equal calls differ"
        record_property("note", f"{', '.join(differ)} of two equal calls differ in their last bits")
