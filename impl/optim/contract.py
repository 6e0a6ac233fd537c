"""The contract of AdamW, the check that a target meets it, and the family."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from impl.optim.accounting import adamw_peak
from shardmark.api import Family, Race, Refusable, RegistryError, add_family, dtypes_in, tensors_of


class Optimizer(Protocol):
    """`Optimizer(params, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=1e-2)` makes a `torch.optim.Optimizer`.

    Must:

    - `step()` is algorithm 2 of the paper (Loshchilov, Hutter, "Decoupled Weight Decay Regularization", 2019) for every
      parameter that has a gradient, a zero gradient too, whatever their number, sizes, strides and dtypes, and whether
      gradients have a graph, as accurate as its dtype allows: in float64 throughout for float64. Each parameter counts
      its own steps; one whose `.grad` is None does not change, nor does its state; it may be of integers. The grad
      mode, autocast and torch's default dtype change nothing, also where they differ from step to step. It seeds no
      random numbers of the process's.
    - Parameters are updated in place, where their data is at that step, and no memory beside them; they may be cast
      before their first step, or it is an error. `.grad` is not written, and its memory not used after the step.
    - Each param group has its own arguments, which a step reads anew, as schedulers change them, also those that took
      the group before a step. A parameter may be replaced in a group's list, and its state moved to the new one: a step
      trains the new one, or raises an error. Groups may be added later, and have no parameters. Optimizers share
      nothing. A group keeps keys that the optimizer does not know, as a scheduler's `initial_lr`, also through a state.
      PyTorch's schedulers, an optimizer's hooks before and after steps, `zero_grad` and `GradScaler` work; betas may be
      a list. A group or a state that is refused, and a closure that raises, leave the optimizer as it was.
    - inf and NaN in a gradient reach their own elements, as in torch's.
    - After a parameter's first steps nothing more is kept, nor a closure's loss.
    - After `load_state_dict` training goes on as if it had not stopped, with the saved arguments and exactly the saved
      state, in a new optimizer or in one that has made other steps; torch's AdamW goes on from the state too. After
      `state.clear()` it begins anew. Ids in a state are those of its groups, in their order. A copy, deep or pickled,
      goes on as well, with its options and its defaults for groups added later, on parameters of its own, or copying
      it or its step raises an error.
    - A sparse gradient is an error or treated as what it stands for.

    Should: a loaded state is a copy; a complex parameter is an error or treated as a pair of numbers; ValueError for
    no parameters, for a negative lr, eps or weight_decay, for betas outside [0, 1), and for a state whose groups have
    other numbers of parameters.

    Not asked: arguments that are tensors; global hooks (`register_optimizer_step_pre_hook`) of an optimizer that holds
    another.

    Options of some:

    `max_grad_norm`: the update uses gradients scaled by min(1, max_grad_norm / (norm + 1e-6)), as after
    `clip_grad_norm_`, but `.grad` does not change. The norm is that of all gradients together, computed in float32 or
    better; after the step `grad_norm` holds it, as a tensor without dims. Where it is inf or NaN the step is skipped:
    parameters, moments and step counts do not change.

    `master_weights`: for each bfloat16 or float16 parameter the optimizer keeps a float32 copy, "master_weight" in its
    state, made from the parameter's value at its first step that is not skipped. Moments and update are in float32, and
    the parameter is the rounded master weight. float32 and float64 parameters have none.
    """

    param_groups: list[dict[str, Any]]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient, after the closure where there is one; return its result."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Each parameter's state has "step", "exp_avg" and "exp_avg_sq", with torch's meaning: the moments are without
        bias correction. It may have more."""
        ...


DEFAULTS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 1e-2}


def _check(target: Any, device: str) -> None:
    """Check that two steps on x² give the same result as torch's AdamW."""
    if not callable(target):
        raise RegistryError(f"{target!r} is neither a class of torch.optim.Optimizer nor makes one")
    x = torch.ones(3, device=device, requires_grad=True)
    optimizer: Any = target([x], **DEFAULTS)
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise RegistryError(f"{target!r} makes {optimizer!r}, and no torch.optim.Optimizer")
    for _ in range(2):
        optimizer.zero_grad()
        (x * x).sum().backward()
        optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())
    expected = _after_two_steps()
    if not torch.allclose(x.detach().cpu(), torch.full((3,), expected), rtol=1e-5):
        raise RegistryError(f"two steps from 1 down x² led to {x.tolist()} and not to {expected:.6f}")


def _after_two_steps() -> float:
    x: Tensor = torch.ones(1, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.AdamW([x], **DEFAULTS)
    for _ in range(2):
        x.grad = 2 * x.detach()
        optimizer.step()
    return x.item()


FAMILY = add_family(
    Family(
        "optimizer",
        Optimizer,
        reference="plain",
        check=_check,
        may_refuse=(
            Refusable("dtypes", lambda params, **_: dtypes_in(tensors_of(params)), elsewhere=True),
            Refusable(
                "devices",
                lambda params, **_: next((p.device.type for p in tensors_of(params)), None),
                elsewhere=True,
            ),
        ),
        memory=adamw_peak,  # a user's own optimizer: the state, and a temporary as large as one parameter
        time=Race("torch_fused"),
    )
)
