"""Plays the events of a history on an AdamW and on a float64 reference, and compares the two."""

import pickle
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from correctness.engine.calls import MODES
from correctness.optim.events import Event, History, Sizes
from correctness.optim.training import ClipThenAdamW, assert_near
from impl.optim.base import HALF, MASTER

COPIES: dict[str, Callable[[Any], Any]] = {"copied": deepcopy, "pickled": lambda x: pickle.loads(pickle.dumps(x))}


class Training:
    """Parameters and their optimizer. All trainings of one history draw the same values.

    `wide` rounds all values to the history's dtypes and then holds them in float64.
    """

    def __init__(self, target: Any, history: History, device: str, wide: bool, seed: int = 0) -> None:
        self.target, self.options, self.device, self.wide = target, history.options, device, wide
        self.made = history.options | history.defaults
        self.generator = torch.Generator().manual_seed(seed)
        count = iter(range(99))
        self.groups: list[dict[str, Any]] = []
        self.dtypes: dict[Tensor, torch.dtype] = {}
        for shapes, own in history.groups:
            params = []
            for shape in shapes:
                dtype = history.dtypes[next(count) % len(history.dtypes)]
                params.append(laid_out(self.random(shape, dtype), history.layout).requires_grad_())
                self.dtypes[params[-1]] = dtype
            self.groups.append({"params": params, **own})
        self.optimizer = target([dict(self.groups[0])], **self.made)
        if history.scheduled:
            LambdaLR(self.optimizer, lambda count: 1.0)
        self.kept: tuple[Any, list[Tensor]] | None = None
        self.held = [*self.optimizer.param_groups]
        """Groups, as callers hold them who change their options."""

    @property
    def params(self) -> list[Tensor]:
        """Parameters of the groups that the optimizer has now."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def random(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        x = torch.randn(shape, dtype=torch.float64, generator=self.generator).to(self.device, dtype)
        return x.double() if self.wide else x

    def add_groups(self) -> None:
        for group in self.groups[len(self.optimizer.param_groups) :]:
            self.optimizer.add_param_group(dict(group))
            self.held.append(self.optimizer.param_groups[-1])

    def load(self, how: str, others: Sizes, steps: int | None) -> None:
        """Load a state; parameters stay, also those that a "used" optimizer has stepped. PyTorch makes new groups."""
        self._copy(COPIES[how]) if how in COPIES else self._load(how, others, steps)
        self.held = [*self.optimizer.param_groups]

    def _copy(self, copy: Callable[[Any], Any]) -> None:
        """Go on with a copy, as of a model and its optimizer; the caller writes over the parameters it was of. Where it
        or its step is an error, go on without."""
        try:
            tried = copy(self.optimizer)
            for group in tried.param_groups:
                for p in group["params"]:
                    p.grad = torch.zeros_like(p)
            tried.step()
        except Exception:
            return
        old = self.params
        self.optimizer, self.groups, self.dtypes = copy((self.optimizer, self.groups, self.dtypes))
        for p in old:
            p.grad = None
            p.detach().fill_(torch.nan)

    def _load(self, how: str, others: Sizes, steps: int | None) -> None:
        now = deepcopy(self.optimizer.state_dict()), [p.detach().clone() for p in self.params]
        if steps is not None and how != "back":
            for state in (state for state in now[0]["state"].values() if float(state.get("step", 0))):
                state["step"] = torch.full_like(state["step"], steps) if isinstance(state["step"], Tensor) else steps
        if how == "cleared":
            if not self.options.get("master_weights"):  # one made anew is the rounded parameter
                self.optimizer.state.clear()
            return
        if how == "back":
            groups = len(now[0]["param_groups"])
            back = self.kept if self.kept is not None and len(self.kept[0]["param_groups"]) == groups else now
            self.optimizer.load_state_dict(deepcopy(back[0]))
            self._restore(back[1])
            return
        self.optimizer = self.target([{"params": g["params"]} for g in self.optimizer.param_groups], **self.made)
        if how == "used":
            self.step(others)
            self._restore(now[1])
        self.optimizer.load_state_dict(now[0])

    def change(self, how: str, index: int) -> None:
        """Change a parameter as a caller does; one with a master weight, whose value the next step overwrites, may get
        other memory."""
        p = self.params[index % len(self.params)]
        value = self.random(tuple(p.shape), self.dtypes[p])
        stepped = float(self.optimizer.state.get(p, {}).get("step", 0)) > 0
        if self.options.get("master_weights") and self.dtypes[p] in HALF and stepped:
            if how == "by .data =":
                p.data = p.data.clone()
            return
        if how == "in place":
            with torch.no_grad():
                p.copy_(value)
        else:
            p.data = value

    def fail(self, error: str) -> None:
        """Make an error of the caller's, which must leave the optimizer as it is."""
        groups = len(self.optimizer.param_groups)
        own = [*self.params[:1], torch.ones(3, dtype=torch.float64, device=self.device, requires_grad=True)]
        match error:
            case "closure":
                with suppress(ZeroDivisionError):
                    self.optimizer.step(lambda: 1 / 0)
            case "group":
                for bad in ({"params": own}, {"params": own[-1:], "lr": -1.0}):
                    with suppress(Exception):
                        self.optimizer.add_param_group(bad)
                        self.optimizer.state.pop(self.optimizer.param_groups.pop()["params"][-1], None)
                now = len(self.optimizer.param_groups)
                assert now == groups, f"of {groups} groups {now} are there after one that is refused"
            case "state":
                state = deepcopy(self.optimizer.state_dict())
                bad = deepcopy(state)
                bad["param_groups"][0]["params"].append(99)
                for each in bad["state"].values():
                    each |= {name: x * 2 for name, x in each.items() if isinstance(x, Tensor)}
                try:
                    self.optimizer.load_state_dict(bad)
                except Exception:
                    return
                self.optimizer.load_state_dict(state)
                self.held = [*self.optimizer.param_groups]

    def step(self, sizes: Sizes, event: Event | None = None) -> None:
        self.clear(set_to_none=not (event and event.same_tensors))
        layout = event.layout if event else "contiguous"
        grads = []
        for k, p in enumerate(self.params):
            size = sizes[k % len(sizes)]
            value = None if size is None else self.random(tuple(p.shape), torch.float64) * size
            grads.append(None if value is None else laid_out(value.to(self.dtypes[p]).to(p.dtype), layout))
        stays = [
            (k, p, p.detach().clone()) for k, (p, g) in enumerate(zip(self.params, grads, strict=True)) if g is None
        ]

        def give() -> float:
            for p, grad in zip(self.params, grads, strict=True):
                if event and event.same_tensors and p.grad is not None and grad is not None:
                    p.grad.copy_(grad)
                else:
                    p.grad = None if grad is None else laid_out(grad.clone(), layout)
            if event and event.freezes is not None:
                p = self.params[event.freezes % len(self.params)]
                p.requires_grad_(not p.requires_grad)
            return 3.5

        if event and event.by_closure:
            found = self.optimizer.step(give)
            assert found == 3.5, f"step(closure) returned {found}, and the closure 3.5"
        else:
            give()
            self.optimizer.step()
        for k, p, before in stays:
            assert p.grad is None, f"parameter {k} had no gradient, and has one after the step"
            assert_equal(p, before, f"parameter {k} has changed, which had no gradient")
        for k, (p, grad) in enumerate(zip(self.params, grads, strict=True)):
            if p.grad is not None and grad is not None:
                assert_equal(p.grad, grad, f"the step has written into the gradient of parameter {k}")
                p.grad.fill_(torch.nan)  # the caller may overwrite it, so the state must not share its memory

    def clear(self, set_to_none: bool) -> None:
        self.optimizer.zero_grad(set_to_none=set_to_none)
        for k, p in enumerate(self.params):
            left = p.grad is not None and (set_to_none or bool(p.grad.any()))
            assert not left, f"zero_grad leaves the gradient of parameter {k}"

    def play(self, event: Event) -> None:
        if event.error:
            self.fail(event.error)
        if event.loads:
            self.load(event.loads, event.others, event.steps)
        if event.weights:
            self.change(*event.weights)
        self.held[event.group % len(self.held)].update(event.changes)
        self.step(event.sizes, event)
        if event.remembers:
            self.kept = deepcopy(self.optimizer.state_dict()), [p.detach().clone() for p in self.params]

    def _restore(self, values: list[Tensor]) -> None:
        with torch.no_grad():
            for p, value in zip(self.params, values, strict=True):
                p.copy_(value)


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The values in another memory layout, where `x` has enough dimensions for it."""
    match layout:
        case "transposed" if x.ndim > 1:
            return x.transpose(0, -1).contiguous().transpose(0, -1)
        case "apart" if x.ndim:
            return x[..., None].expand(*x.shape, 2).contiguous()[..., 0]  # torch.stack refuses some under autocast
        case "channels_last" if x.ndim == 4:
            return x.contiguous(memory_format=torch.channels_last)
    return x.contiguous()


def assert_equal(found: Tensor, expected: Tensor, what: str) -> None:
    """Fail unless equal to the bit, NaN counting as 0."""
    assert torch.equal(found.detach().nan_to_num(), expected.nan_to_num()), what


class Beside:
    """The AdamW under test and the reference: parameters, state and norm must be equal after each event.

    Values may differ by `rtol` of the tensor's largest.
    """

    def __init__(self, target: Any, history: History, device: str, rtol: float | None = None) -> None:
        self.device = device
        with MODES[history.mode](device):
            self.found = Training(target, history, device, wide=False)
            others = replace(history, options={"max_grad_norm": 7.0} if "max_grad_norm" in history.options else {})
            self.another = Training(target, others, device, wide=False, seed=1) if history.another else None
        self.exact = Training(ClipThenAdamW, history, device, wide=True)
        self.rtol = rtol or (1e-9 if set(history.dtypes) == {torch.float64} else 1e-5)
        self.until_added = history.added_before

    def play(self, event: Event) -> None:
        self._play(self.exact, event)
        with MODES[event.mode](self.device):
            self._play(self.found, event)
            if self.another is not None:
                self._play(self.another, event)
        self.until_added -= 1

    def _play(self, training: Training, event: Event) -> None:
        if self.until_added == 0:
            training.add_groups()
        training.play(event)

    def problem(self) -> str:
        found, exact, rtol = self.found, self.exact, self.rtol
        norm = exact.optimizer.norm
        if norm is not None:
            mine = getattr(found.optimizer, "grad_norm", None)
            assert mine is not None, f"grad_norm is None, expected {norm.item():.9g}"
            assert_near(mine.double(), norm, rtol * (1 + norm.item() if norm.isfinite() else 1), "grad_norm")
        saved = [training.optimizer.state_dict() for training in (found, exact)]
        here, there = (dict(each["state"]) for each in saved)
        for i, (mine, theirs) in enumerate(zip(*(each["param_groups"] for each in saved), strict=True)):
            for name in theirs.keys() & {"name", "initial_lr"}:
                own, wanted = mine.get(name), theirs[name]
                assert own == wanted, f"{name!r} of group {i} is {own!r}, expected {wanted!r}"
        for k, (p, q) in enumerate(zip(found.params, exact.params, strict=True)):
            what, mine, theirs = f"parameter {k} of shape {tuple(q.shape)}", here.get(k, {}), there.get(k, {})
            count, wanted = float(mine.get("step", 0)), float(theirs.get("step", 0))
            assert count == wanted, f"{what}: its state counts {count:g} steps, expected {wanted:g}"
            pairs = [(name, mine[name], theirs[name]) for name in ("exp_avg", "exp_avg_sq") if wanted]
            has_master = found.options.get("master_weights") and found.dtypes[p] in HALF and wanted
            if has_master:
                pairs.append((MASTER, mine[MASTER], q.detach()))
                assert torch.equal(p.detach(), mine[MASTER].to(p.dtype)), f"{what} is not its master weight, rounded"
            else:
                pairs.append(("its value", p.detach(), q.detach()))
            for name, x, y in pairs:
                if y.numel():
                    x, largest = x.double(), y.abs().nan_to_num(0, 0, 0).max().item()
                    if x.shape != y.shape or not (x - y).abs().max().item() <= rtol * (1 + largest):  # or NaN
                        assert_near(x, y, rtol * (1 + largest), f"{what}: {name}")
        return ""
