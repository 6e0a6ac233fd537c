"""Two right data-parallel wrappers in few lines: the base of planted defects."""

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from impl.distributed import backward_twice, broadcast_state, check_same_module


class Plain(nn.Module):
    """One all-reduce per parameter after backward."""

    def __init__(self, module: nn.Module, *, process_group: dist.ProcessGroup | None = None) -> None:
        super().__init__()
        self.check(module, process_group)
        self.module = module
        self.group = process_group or dist.group.WORLD
        self.size = dist.get_world_size(self.group)
        self.synchronizing = True
        self.start()

    def check(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        check_same_module(module, group)

    def start(self) -> None:
        broadcast_state(self.module, self.group)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def finish_gradient_synchronization(self) -> None:
        if self.synchronizing:
            self.average([p for p in self.module.parameters() if p.requires_grad])

    def average(self, parameters: list[nn.Parameter]) -> None:
        for p in parameters:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            own = p.grad.contiguous().resolve_conj()
            self.reduce(own)
            p.grad.copy_(own)

    def reduce(self, gradient: Tensor) -> None:
        """Replace a contiguous gradient by its average."""
        dist.all_reduce(gradient, group=self.group)
        gradient.div_(self.size)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self.synchronizing = self.synchronizing, False
        try:
            yield
        finally:
            self.synchronizing = before

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.load_state_dict(*args, **kwargs)


class Overlapped(Plain):
    """Starts each all-reduce when its gradient is ready, in reverse parameter order."""

    def start(self) -> None:
        super().start()
        self.order = [p for p in self.module.parameters() if p.requires_grad][::-1]
        self.ready: set[nn.Parameter] = set()
        self.handles: list[dist.Work] = []
        for p in self.order:
            p.register_post_accumulate_grad_hook(self.hook())

    def hook(self) -> Callable[[Tensor], None]:
        """The hook of a parameter's gradient: it must not keep the wrapper, whose parameters would stay in memory."""
        this = weakref.ref(self)

        def on_gradient(parameter: Tensor) -> None:
            if (wrapper := this()) is not None:
                wrapper.on_gradient(parameter)

        return on_gradient

    def on_gradient(self, parameter: nn.Parameter) -> None:
        if parameter in self.ready:  # its first gradient is being communicated
            raise backward_twice()
        if self.synchronizing:
            self.ready.add(parameter)
            while len(self.handles) < len(self.order) and self.order[len(self.handles)] in self.ready:
                self.launch(self.order[len(self.handles)])

    def launch(self, parameter: nn.Parameter) -> None:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        parameter.grad = parameter.grad.contiguous().resolve_conj()
        self.handles.append(dist.all_reduce(parameter.grad, group=self.group, async_op=True))

    def finish_gradient_synchronization(self) -> None:
        if not self.synchronizing:
            return
        for p in self.order[len(self.handles) :]:
            self.launch(p)
        self.wait()
        self.handles.clear()
        self.ready.clear()

    def wait(self) -> None:
        for handle, p in zip(self.handles, self.order, strict=True):
            handle.wait()
            p.grad.div_(self.size)
