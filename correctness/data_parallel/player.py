"""Plays a history on two data-parallel wrappers on this rank and checks the expected state after each event."""

from contextlib import AbstractContextManager, ExitStack
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn

from correctness.data_parallel.averaging import wrap
from correctness.data_parallel.events import FINISH, Event, History, Limits, Setting
from correctness.data_parallel.random_modules import RETURNS, Zoo, has_gradients, numbers, put_together, tensors_of
from correctness.data_parallel.reference import Gradients
from correctness.engine.histories_on_ranks import UNSORTED, Alike
from correctness.support.communication import delayed, quiet, recorded, slow_gradients
from correctness.support.likeness import worst_element
from shardmark.api import Implementation
from shardmark.meter.communication import Communication


class ExpectedError(Exception):
    """Raised by a test, to leave `no_sync`."""


class Both:
    """The wrappers "A" and "B" of a history, on this rank."""

    def __init__(self, implementation: Implementation, history: History, device: str) -> None:
        again = {event.wrapper for event in history.events if event.name == "wrap a part"}
        self.wrappers = {
            name: Wrapper(implementation, setting, device, history.limits, name in again)
            for name, setting in history.settings.items()
        }
        self.wrapped: list[Wrapper] = []
        self.alike: list[Alike] = []
        self.after = 0

    def play(self, event: Event) -> None:
        self.after += 1
        wrapper = self.wrappers[event.wrapper]
        if not wrapper.members:
            return
        with event.under_autocast("all", wrapper.device):
            wrapper.do(event)
        if event.name == "wrap":
            self.wrapped.append(wrapper)
        for what, bits in wrapper.bits:
            self.alike.append(Alike(self.after, f"{what} of {event.wrapper}:", (*wrapper.members,), bits))
        wrapper.bits = []

    def problem(self) -> str:
        return next((wrong for wrapper in self.wrapped for wrong in wrapper.look()), "")


class Wrapper:
    """One wrapper on this rank, with its expected state."""

    def __init__(
        self, implementation: Implementation, setting: Setting, device: str, limits: Limits, again: bool
    ) -> None:
        self.implementation, self.setting, self.device, self.limits = implementation, setting, device, limits
        rank, ranks = dist.get_rank(), dist.get_world_size()
        # Every rank must create every group.
        made = [dist.new_group(members, **UNSORTED) for members in setting.groups or []]
        self.members = setting.members(rank, ranks)
        self.group = next((g for g, of in zip(made, setting.groups or [], strict=True) if of == self.members), None)
        self.alone = [dist.new_group([other]) for other in range(ranks)][rank] if again else None
        self.here = self.members.index(rank) if self.members else -1
        self.contexts: list[AbstractContextManager[None]] = []
        self.made: list[tuple[bool, AbstractContextManager[None]]] = []
        self.frozen: list[int] = []
        self.hooks: dict[int, Any] = {}
        self.local, self.pending = True, False
        self.bits: list[tuple[str, dict[str, int]]] = []
        """Checksums of bits that must be equal on all ranks of the group."""
        self.wrong: list[str] = []
        self.returned: list[tuple[Tensor, Tensor]] = []
        """Losses that forward passes have returned, and copies: users read them late."""
        narrow = setting.options.get("reduce_dtype")
        # Integers have no gradients.
        dtypes = [k.dtype if has_gradients(k.dtype) else torch.float32 for k in setting.kinds]
        self.gradients = [Gradients(dtype, _narrower(dtype, narrow), len(self.members)) for dtype in dtypes]

    def do(self, event: Event) -> None:
        name, inside = event.name, bool(self.contexts)
        if name == "wrap":
            self._wrap(event)
        elif name == "wrap a part":
            wrap(self.implementation, self.module.inner, process_group=self.alone)
        elif name in ("enter", "enter one made before"):
            which = next((i for i, (made_inside, _) in enumerate(self.made) if made_inside == inside), None)
            context = self.model.no_sync() if name == "enter" or which is None else self.made.pop(which)[1]
            context.__enter__()
            self.contexts.append(context)
        elif name == "make no_sync()":
            self.made.append((inside, self.model.no_sync()))
        elif name == "exit":
            self.contexts.pop().__exit__(None, None, None)
        elif name == "exit by an error":
            if self.contexts.pop().__exit__(ExpectedError, ExpectedError(), None):
                self.wrong.append("no_sync() swallows an error")
        elif name in ("forward in no_grad", "forward in inference_mode"):
            with torch.no_grad() if name == "forward in no_grad" else torch.inference_mode():
                self._forward(event, self.here)
        elif name == "forward without backward":
            self._forward(event, self.here)
        elif "backward" in name:
            self._backward(event)
        elif name == FINISH:
            self._finish()
        elif name.startswith("zero"):
            to_none = name == "zero_grad()"
            (self.model if isinstance(self.model, nn.Module) else self.module).zero_grad(set_to_none=to_none)
            for each in self.gradients:
                each.zero(to_none)
        else:
            self._change(event)

    def _wrap(self, event: Event) -> None:
        setting, rank = self.setting, dist.get_rank()
        self.start = f"start {event.seed}"
        options = setting.options | ({} if setting.every else {"find_unused_parameters": True})
        zoo = Zoo(setting.kinds, setting.tied, self.start, rank).to(self.device)
        self.model = wrap(self.implementation, zoo, process_group=self.group, **options)
        self.module = self.model.module
        first = Zoo(setting.kinds, setting.tied, self.start, self.members[0])
        # Equal layouts give equal bits.
        self.parameters = self._state(first.named_parameters())
        self.buffers = self._state([*first.named_buffers()])

    def _reached(self, event: Event, rank: int, pass_: int) -> list[int]:
        """Uses that this rank's pass reaches: some parameters on all ranks, some on none. torch's DDP considers only
        the last forward pass."""
        common, own = event.draw("which"), event.draw("which", rank, 0 if self.limits.torchs else pass_)
        uses = range(len(self.setting.kinds) + len(self.setting.tied))
        if self.setting.every:
            found = [*uses]
        else:
            share = {i: common.choice([0.0, 0.5, 1.0, 1.0]) for i in uses}
            nobody = not (self.limits.torchs or self.limits.plain) and own.random() < 0.1
            found = [] if nobody else [i for i in uses if own.random() < share[i]]
        trainable = [i for i in uses if (j := self._kind(i)) not in self.frozen and not self.setting.kinds[j].frozen]
        if (self.limits.torchs or self.limits.plain) and not set(found) & set(trainable):
            found = [*found, trainable[0]]
        own.shuffle(found)
        return found

    def _kind(self, use: int) -> int:
        kinds = len(self.setting.kinds)
        return use if use < kinds else self.setting.tied[use - kinds]

    def _weights(self, event: Event, rank: int, pass_: int) -> list[Tensor | None]:
        reached, kinds = self._reached(event, rank, pass_), self.setting.kinds
        weights: list[Tensor | None] = [None] * (len(kinds) + len(self.setting.tied))
        for i in reached:
            weights[i] = numbers(f"{event.seed} {self.members[rank]} {pass_} {i}", kinds[self._kind(i)])
        special = event.draw("special")
        if special.random() < 0.04 and special.randrange(len(self.members)) == rank and reached:
            hit, value = weights[reached[0]], special.choice([torch.inf, -torch.inf, torch.nan])
            if hit.is_floating_point():  # in complex products infinities become NaN
                hit.view(-1)[:1] = value
        return weights

    def _forward(self, event: Event, rank: int, pass_: int = 0) -> Tensor:
        weights, order = self._weights(event, rank, pass_), self._reached(event, rank, pass_)
        given = [None if weight is None else weight.to(self.device) for weight in weights]
        seen = event.draw(dist.get_rank(), pass_).randrange(100)
        returns = event.draw("returns", pass_).choice([*RETURNS])
        with event.under_autocast("forward", self.device):
            loss, beside = tensors_of(self.model(given, order=order, seen=seen, returns=returns))
        if self.module.autocast != bool(event.autocast):
            self.wrong.append("a forward pass does not run under the caller's autocast, or runs under one of its own")
        if beside is not None and beside.requires_grad:
            self.wrong.append(f"returned in {returns}, a tensor that needs no gradient requires one")
        self.returned.append((loss.detach(), loss.detach().clone()))
        for name, buffer in self.buffers.items():
            if name.endswith("calls"):
                self.buffers[name] = buffer + 1
            elif not name.endswith(("mask", "rotations")):
                self.buffers[name] = torch.full_like(buffer, seen)
        if any(
            not torch.equal(a.cpu(), b)
            for a, b in zip(given, weights, strict=True)
            if b is not None and not b.isnan().any()
        ):
            self.wrong.append("a forward pass changes its input")
        return loss

    def _backward(self, event: Event) -> None:
        twice = event.name.startswith("two backward")
        passes = [0, 1] if event.name.endswith("two forward passes") else [0]
        slow, delay = event.draw("slow"), event.draw("delay")
        seconds = [0.002 * (slow.random() < 0.1) for _ in range(64)]
        late = delay.choice(self.members) if delay.random() < 0.15 else None
        with ExitStack() as stack:
            sent = stack.enter_context(recorded())
            if late is not None:
                stack.enter_context(delayed(before=0.003, on=late))
            if self.here % 2:
                stack.enter_context(slow_gradients(self.module, lambda i: seconds[i]))
            loss = sum(self._forward(event, self.here, pass_) for pass_ in passes)
            for _ in range(1 + twice):
                if loss.requires_grad:
                    loss.backward(retain_graph=twice)
        if self.contexts:
            self.wrong += [f"in no_sync(): it communicates, in {each}" for each in sent if self._is_gradient(each)]
        for rank in range(len(self.members)):
            self._expect(event, rank, passes, 1 + twice)
        self.local, self.pending = True, not self.contexts

    def _is_gradient(self, each: Communication) -> bool:
        """Whether it may be one. torch's DDP broadcasts buffers in a forward pass, also in no_sync()."""
        return has_gradients(each.dtype) and not (self.limits.plain and each.name == "broadcast")

    def _expect(self, event: Event, rank: int, passes: list[int], times: int) -> None:
        terms: dict[int, list[Tensor]] = {}
        for pass_ in passes:
            for use, weight in enumerate(self._weights(event, rank, pass_)):
                i = self._kind(use)
                if weight is not None and i not in self.frozen and not self.setting.kinds[i].frozen:
                    terms.setdefault(i, []).append(weight * 2 if i in self.hooks else weight)
        for i, each in terms.items():
            self.gradients[i].add(rank, each * times)

    def _finish(self) -> None:
        self.model.finish_gradient_synchronization()
        if self.contexts:
            return
        for each in self.gradients:
            each.average()
        self.local = self.pending = False
        found = {n: p.grad for n, p in self.module.named_parameters() if p.grad is not None and p.grad.any()}
        self.bits.append(("the average gradients", {name: _bits(grad) for name, grad in found.items()}))

    def _change(self, event: Event) -> None:
        """Apply the event to the module: freeze a parameter, change a buffer, and so on."""
        name, draw = event.name, event.draw("what")
        trainable = [i for i, kind in enumerate(self.setting.kinds) if not kind.frozen]
        if name in ("freeze", "thaw"):
            self.frozen = draw.sample(trainable[2:], len(trainable) // 3) if name == "freeze" else []
            for i in trainable:
                self.module.uses[i].requires_grad_(i not in self.frozen)
        elif name == "hook":
            hooked = [i for i in trainable[::2] if i not in self.frozen]
            self.hooks = {i: self.module.uses[i].register_hook(lambda grad: grad * 2) for i in hooked}
        elif name == "unhook":
            for handle in self.hooks.values():
                handle.remove()
            self.hooks = {}
        elif name == "gradients are replaced":
            for use, each in zip(self.module.uses, self.gradients, strict=False):
                cleared = draw.random() < 0.5
                if use.grad is not None:
                    use.grad = torch.zeros_like(use.grad) if cleared else use.grad.clone()
                if cleared:
                    each.zero(to_none=False)
            if draw.random() < 0.5:
                put_together(self.module.uses)
        elif name == "optimizer step":
            torch.optim.SGD(self.module.parameters(), lr=2**-8).step()
            self.parameters = self._state(self.module.named_parameters())
            # mixed layouts may make the optimizer round differently
            if all(len({*kind.layouts}) == 1 for kind in self.setting.kinds):
                bits = {name: _bits(value) for name, value in self.parameters.items()}
                self.bits.append(("the parameters", bits))
        elif name == "state_dict()":
            if not self.limits.plain and list(self.model.state_dict()) != list(self.module.state_dict()):
                self.wrong.append(f"state_dict() has the names {list(self.model.state_dict())}")
        elif name != "eval on one rank" or draw.choice(self.members) == dist.get_rank():
            model = self.model if isinstance(self.model, nn.Module) else self.module
            with quiet(f"{name.split()[0]}()"):
                model.train(name == "train")
            if any(each.training != (name == "train") for each in self.module.modules()):
                self.wrong.append(f"{name}() does not reach the module")

    def look(self) -> list[str]:
        """Return what is wrong now. Gradients are undefined between backward and `finish`."""
        wrong, self.wrong = self.wrong, []
        if any(not torch.equal(loss.nan_to_num(), copy.nan_to_num()) for loss, copy in self.returned):
            wrong.append("what an earlier forward pass returned is another number now")
        states = [("parameter", self.parameters, self._state(self.module.named_parameters()))]
        if not self.limits.plain:
            states.append(("buffer", self.buffers, self._state(self.module.named_buffers())))
        for what, expected, found in states:
            for name, value in expected.items():
                if name not in found or _bits(found[name]) != _bits(value):
                    how = _worst(found[name], value) if name in found else "it is missing"
                    wrong.append(f"the {what} {name!r} is wrong: {how}")
        for i, kind in enumerate(self.setting.kinds):
            p = self.module.uses[i]
            name = next((name for name, each in self.module.named_parameters() if each is p), f"number {i}")
            if p.requires_grad != (not kind.frozen and i not in self.frozen):
                wrong.append(f"{name!r} requires {'a' if p.requires_grad else 'no'} gradient, unlike before")
            if not self.pending and (line := self.gradients[i].wrong(self.here, p.grad, p)):
                wrong.append(f"the gradient of {name!r}, {kind}, {line}")
        return wrong

    @staticmethod
    def _state(tensors: Any) -> dict[str, Tensor]:
        return {name: tensor.detach().cpu().clone() for name, tensor in tensors}


def _worst(found: Tensor, expected: Tensor) -> str:
    return worst_element(
        *(torch.view_as_real(x.resolve_conj()) if x.is_complex() else x.double() for x in (found, expected))
    )


def _narrower(own: torch.dtype, wire: torch.dtype | None) -> torch.dtype:
    return own if wire is None or own.is_complex or torch.finfo(wire).eps < torch.finfo(own).eps else wire


def _bits(tensor: Tensor) -> int:
    """Checksum of a tensor's bits in row-major order; all NaNs count as equal."""
    values = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    if values.is_floating_point():
        values = values.nan_to_num(nan=12.5, posinf=torch.inf, neginf=-torch.inf)
    return crc32(values.view(-1).view(torch.uint8).numpy().tobytes())
