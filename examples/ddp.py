"""Data parallelism: each gradient is averaged as soon as backward has it, while backward goes on (Li et al., 2020).

pytest correctness --impl data_parallel=examples/ddp.py:DDP
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


class DDP(nn.Module):
    def __init__(self, module, *, process_group=None):
        super().__init__()
        self.module, self.group = module, process_group or dist.group.WORLD
        self.order = [p for p in module.parameters() if p.requires_grad][::-1]  # as backward comes to them
        self.check_that_ranks_agree()
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                whole = tensor.contiguous()
                dist.broadcast(whole, group=self.group, group_src=0)
                tensor.copy_(whole)
        self.synchronizing = True
        self.ready = set()
        self.sent = []  # (parameter, its gradient, handle), always in `order`, or the ranks would not match
        for p in self.order:
            p.register_post_accumulate_grad_hook(self.on_gradient)

    def check_that_ranks_agree(self):
        """ValueError on every rank, as they would otherwise wait for one another."""
        own = [(name, (*p.shape,), str(p.dtype), p.requires_grad) for name, p in self.module.named_parameters()]
        everyone = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, own, group=self.group)
        if not self.order:
            raise ValueError("the module has no parameter to train")
        differ = {name for other in everyone for name, *_ in set(other) ^ set(everyone[0])}
        for name, *_ in (parameter for one in everyone for parameter in one):
            if name in differ:
                raise ValueError(f"the ranks' modules differ in {name}")

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    def on_gradient(self, p):
        if self.synchronizing:
            self.ready.add(p)
            while len(self.sent) < len(self.order) and self.order[len(self.sent)] in self.ready:
                self.send_next()

    def send_next(self):
        p = self.order[len(self.sent)]
        if p.grad is None:  # other ranks may have one
            p.grad = torch.zeros_like(p)
        gradient = p.grad.contiguous()
        self.sent.append((p, gradient, dist.all_reduce(gradient, group=self.group, async_op=True)))

    def finish_gradient_synchronization(self):
        if not self.synchronizing:
            return
        while len(self.sent) < len(self.order):
            self.send_next()
        for p, gradient, handle in self.sent:
            handle.wait()
            p.grad.copy_(gradient.div_(dist.get_world_size(self.group)))
        self.ready.clear()
        self.sent.clear()

    @contextmanager
    def no_sync(self):
        before, self.synchronizing = self.synchronizing, False
        try:
            yield
        finally:
            self.synchronizing = before

    def state_dict(self, *args, **kwargs):
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args, **kwargs):
        return self.module.load_state_dict(*args, **kwargs)
