"""Full sharding: a rank stores 1/n of each parameter, and gathers a unit's while it runs (Zhao et al., 2023).

pytest correctness --impl fsdp=examples/fsdp.py:FSDP
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten


def blocks(module):
    """The units besides the root module: the modules in its lists of layers that are called themselves."""
    listed = (block for part in module.modules() if isinstance(part, nn.ModuleList) for block in part)
    return [block for block in listed if not isinstance(block, nn.ModuleList | nn.ModuleDict)]


class FSDP(nn.Module):
    def __init__(self, module, *, process_group=None, compute_dtype=None, reduce_dtype=None, wrap=blocks):
        super().__init__()
        self.module, self.group = module, process_group or dist.group.WORLD
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.compute_dtype, self.reduce_dtype = compute_dtype, reduce_dtype or compute_dtype
        self.check()
        with torch.no_grad():
            for buffer in module.buffers():
                dist.broadcast(buffer, group=self.group, group_src=0)
            self.shard_parameters()
        roots = dict.fromkeys([*wrap(module), module])
        self.units = [Unit(self, root, roots) for root in roots]
        for part in module.modules():
            part.is_sharded = True

    def check(self):
        """ValueError on every rank, for what cannot be sharded."""
        own = [(name, (*p.shape,)) for name, p in self.module.named_parameters()]
        everyone = [None] * self.ranks
        dist.all_gather_object(everyone, own, group=self.group)
        differ = {name for other in everyone for name, _ in set(other) ^ set(everyone[0])}
        for name, _ in (parameter for one in everyone for parameter in one):
            if name in differ:
                raise ValueError(f"the ranks' modules differ in {name}")
        if not any(p.requires_grad for p in self.module.parameters()):
            raise ValueError("the module has no parameter to train")
        if any(hasattr(part, "is_sharded") for part in self.module.modules()):
            raise ValueError("the module is sharded already")

    def shard_parameters(self):
        shards, self.shapes = {}, {}
        for p in self.module.parameters():  # a tied one comes once
            whole = p.detach().contiguous()
            dist.broadcast(whole, group=self.group, group_src=0)
            shards[p] = nn.Parameter(self.padded(whole).chunk(self.ranks)[self.rank].clone(), p.requires_grad)
            self.shapes[shards[p]] = p.shape
        for part in self.module.modules():
            part._parameters.update({name: shards[p] for name, p in part._parameters.items() if p is not None})

    def padded(self, full):
        """Flat, with zeros at the end so that it divides by the ranks."""
        return nn.functional.pad(full.reshape(-1), (0, -full.numel() % self.ranks))

    def gather(self, shard, dtype):
        own = shard.detach().to(dtype)
        full = own.new_empty(self.ranks * own.numel())
        dist.all_gather_into_tensor(full, own, group=self.group)
        return full[: self.shapes[shard].numel()].view(self.shapes[shard])

    def reduce(self, shard, gradient):
        flat = self.padded(gradient.to(self.reduce_dtype or shard.dtype))
        own = flat.new_empty(shard.numel())
        dist.reduce_scatter_tensor(own, flat, group=self.group)
        return own.div_(self.ranks).to(shard.dtype)

    def cast(self, x):
        floating = isinstance(x, torch.Tensor) and x.is_floating_point()
        return x.to(self.compute_dtype) if self.compute_dtype and floating else x

    def forward(self, *args, **kwargs):
        args, kwargs = tree_map(self.cast, (args, kwargs))
        with saved_tensors_hooks(self.save, self.load):
            return self.module(*args, **kwargs)

    def save(self, x):
        """In place of a full parameter autograd saves which one it is, to gather it again in backward."""
        where = x.untyped_storage().data_ptr()
        for unit in self.units:
            if where in unit.shards_by_memory:
                return unit, unit.shards_by_memory[where], x.size(), x.stride(), x.storage_offset()
        return x

    def load(self, saved):
        if isinstance(saved, torch.Tensor):
            return saved
        unit, shard, *layout = saved
        return unit.full[shard].as_strided(*layout)

    def finish_gradient_synchronization(self):
        """Do nothing: every gradient is reduced when backward returns."""

    @torch.no_grad()
    def gather_full_parameters(self):
        full = {p: self.gather(p, p.dtype) for p in self.module.parameters()}
        return {name: full[p].clone() for name, p in self.module.named_parameters(remove_duplicate=False)}


class Unit:
    """Modules whose parameters are gathered together: for the root's forward, and again for its backward."""

    def __init__(self, fsdp, root, roots):
        self.fsdp = fsdp
        own = [(part, name, shard) for part in modules_of(root, roots) for name, shard in part._parameters.items()]
        self.places = [(part, name, shard) for part, name, shard in own if shard is not None]
        self.shards = list(dict.fromkeys(shard for _, _, shard in self.places))
        self.shards_by_memory = {}  # in forward: the address of each full parameter -> its shard
        self.full = {}  # in backward: shard -> full parameter
        if self.shards:
            root.register_forward_pre_hook(self.before_forward, prepend=True)
            root.register_forward_hook(self.after_forward, always_call=True)

    def gather(self):
        return [self.fsdp.gather(shard, self.fsdp.cast(shard).dtype) for shard in self.shards]

    def before_forward(self, root, args):
        self.thread, *gathered = Gather.apply(self, *self.shards)
        full = dict(zip(self.shards, gathered, strict=True))
        self.shards_by_memory = {x.untyped_storage().data_ptr(): shard for shard, x in full.items()}
        for part, name, shard in self.places:
            part._parameters[name] = full[shard]

    def after_forward(self, root, args, out):
        for part, name, shard in self.places:
            part._parameters[name] = shard
        self.shards_by_memory = {}
        leaves, spec = tree_flatten(out)
        floating = [i for i, x in enumerate(leaves) if isinstance(x, torch.Tensor) and x.is_floating_point()]
        for i, x in zip(floating, Leave.apply(self, self.thread, *(leaves[i] for i in floating)), strict=True):
            leaves[i] = x
        return tree_unflatten(leaves, spec)

    def before_backward(self):
        self.full = dict(zip(self.shards, self.gather(), strict=True))

    def after_backward(self, gradients):
        self.full = {}
        pairs = zip(self.shards, gradients, strict=True)
        return [self.fsdp.reduce(shard, gradient) if shard.requires_grad else None for shard, gradient in pairs]


def modules_of(root, roots):
    """The modules of a unit, without those of units inside it."""
    yield root
    for child in root.children():
        if child not in roots:
            yield from modules_of(child, roots)


class Gather(torch.autograd.Function):
    """From shards to full parameters, and from their gradients to this rank's part of the average.

    A thread leads from here to `Leave`, so that backward comes here on every rank: also on one whose loss does not need
    these parameters.
    """

    @staticmethod
    def forward(ctx, unit, *shards):
        ctx.unit, full = unit, unit.gather()
        ctx.mark_non_differentiable(*(x for x, shard in zip(full, shards, strict=True) if not shard.requires_grad))
        return shards[0].new_zeros(()), *full

    @staticmethod
    def backward(ctx, _, *gradients):
        return None, *ctx.unit.after_backward(gradients)


class Leave(torch.autograd.Function):
    """Marks the end of a unit's forward: its backward starts here, and gathers the unit again."""

    @staticmethod
    def forward(ctx, unit, thread, *outputs):
        ctx.unit, ctx.thread = unit, thread
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx, *gradients):
        ctx.unit.before_backward()
        return None, torch.zeros_like(ctx.thread), *gradients
