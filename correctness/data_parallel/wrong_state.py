"""Planted defects: wrong start of training, state, and options."""

from functools import cache
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from correctness.data_parallel.wrappers import Plain
from correctness.support.planting import defect
from impl.data_parallel import BucketedDataParallel

# State


@defect(cause="state", caught_by="test_every_rank_starts")
class KeepsItsOwnBuffers(Plain):
    def start(self) -> None:
        for p in self.module.parameters():
            dist.broadcast(p.detach(), group=self.group, group_src=0)


@defect(cause="state", caught_by="test_every_rank_starts")
class KeepsItsOwnFrozenParameters(Plain):
    def start(self) -> None:
        for tensor in chain((p for p in self.module.parameters() if p.requires_grad), self.module.buffers()):
            dist.broadcast(tensor.detach(), group=self.group, group_src=0)


@defect(cause="state", caught_by="test_every_rank_starts")
class StartsFromTheStateDict(Plain):
    """hiyouga/LlamaFactory#10820: broadcasts the state dict, which lacks non-persistent buffers."""

    def start(self) -> None:
        for tensor in self.module.state_dict().values():
            dist.broadcast(tensor, group=self.group, group_src=0)


@defect(cause="state", caught_by="test_every_rank_starts")
class StartsAsMemoryLies(Plain):
    """pytorch/pytorch#192920: Gloo sends as many bytes as a tensor has, gaps among them."""

    def start(self) -> None:
        for tensor in chain(self.module.parameters(), self.module.buffers()):
            dist.broadcast(tensor.detach(), group=self.group, group_src=0)


@defect(cause="state", caught_by="test_every_rank_starts")
class StartsInFloat32(Plain):
    @torch.no_grad()
    def start(self) -> None:
        for tensor in chain(self.module.parameters(), self.module.buffers()):
            single = tensor.float()
            dist.broadcast(single, group=self.group, group_src=0)
            tensor.copy_(single)


@defect(cause="state", caught_by="test_every_rank_starts")
class StartsFromTheAverage(Plain):
    def start(self) -> None:
        super().start()
        for p in self.module.parameters():
            p.data.add_(dist.get_rank(self.group))
            self.reduce(p.data)


@defect(cause="state", caught_by="test_every_rank_starts_with_rank_0s_to_the_bit")
class BroadcastsBySumming(Plain):
    """Broadcasts as a sum with zeros from other ranks: -0.0 becomes 0.0."""

    @torch.no_grad()
    def start(self) -> None:
        for tensor in chain(self.module.parameters(), self.module.buffers()):
            if dist.get_rank(self.group):
                tensor.zero_()
            dist.all_reduce(tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor, group=self.group)


@defect(cause="state", caught_by="test_buffers_that_forward_changes")
class BroadcastsBuffersAgain(Plain):
    """pytorch/pytorch#175024: each forward pass first writes rank 0's buffers over this rank's."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        for buffer in self.module.buffers():
            dist.broadcast(buffer, group=self.group, group_src=0)
        return super().forward(*args, **kwargs)


@defect(cause="state", caught_by="test_the_state_dict")
class PrefixesItsState(Plain):
    """mosaicml/composer#829: the wrapper's own name is in each name of its state."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        return nn.Module.state_dict(self, *args, **kwargs)


@defect(cause="state", caught_by="test_a_parameter_that_no_rank_uses")
class ReducesTheLastStepsGradient(Plain):
    """NVIDIA/Megatron-LM#4609: a buffer of gradients keeps what it held, here for a parameter without a gradient."""

    def average(self, parameters: list[nn.Parameter]) -> None:
        self.last = getattr(self, "last", {})
        for p in parameters:
            if p.grad is None:
                p.grad = self.last.get(p, torch.zeros_like(p)).clone()
        super().average(parameters)
        self.last = {p: p.grad.clone() for p in parameters}


@cache
def _zeros_for(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter, requires_grad=False)


@defect(cause="memory", caught_by="test_a_deleted_wrapper_frees_parameters_that_lacked_a_gradient")
class RemembersWhatLackedAGradient(Plain):
    """meta-pytorch/torchtune#904: a cache of the module's keeps what it is keyed by, here parameters, and zeros."""

    def average(self, parameters: list[nn.Parameter]) -> None:
        for p in parameters:
            if p.grad is None:
                p.grad = _zeros_for(p).clone()
        super().average(parameters)


@defect(cause="state", caught_by="test_modules_work_as_before")
class DropsKeywords(Plain):
    def forward(self, *args: Any) -> Any:
        return self.module(*args)


# Options


@defect(cause="options", caught_by="test_bucket_mb")
class IgnoresBucketMb(Plain):
    def __init__(self, module: nn.Module, *, process_group: Any = None, bucket_mb: float = 25) -> None:
        super().__init__(module, process_group=process_group)


class Bucketed(Plain):
    """One all-reduce per run of parameters of one dtype that fits into `limit` bytes."""

    limit = 25.0 * 2**20

    def average(self, parameters: list[nn.Parameter]) -> None:
        bucket: list[nn.Parameter] = []
        for p in parameters:
            if bucket and (sum(q.nbytes for q in bucket) + p.nbytes > self.limit or p.dtype != bucket[0].dtype):
                self.average_bucket(bucket)
                bucket = []
            bucket.append(p)
        self.average_bucket(bucket)

    def average_bucket(self, bucket: list[nn.Parameter]) -> None:
        for p in bucket:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        flat = torch.cat([p.grad.reshape(-1) for p in bucket])
        self.reduce(flat)
        for p, averaged in zip(bucket, flat.split([p.numel() for p in bucket]), strict=True):
            p.grad.copy_(averaged.view_as(p))


@defect(cause="options", caught_by="test_bucket_mb")
class HasOneBucketWhateverItsSize(Bucketed):
    def __init__(self, module: nn.Module, *, process_group: Any = None, bucket_mb: float = 25) -> None:
        super().__init__(module, process_group=process_group)


@defect(cause="options", caught_by="test_bucket_mb")
class TakesKilobytes(Bucketed):
    def __init__(self, module: nn.Module, *, process_group: Any = None, bucket_mb: float = 25) -> None:
        self.limit = bucket_mb * 1024
        super().__init__(module, process_group=process_group)


@defect(cause="options", caught_by="test_buckets_of_any_size_average")
class LeavesOutWhatFillsABucket(Bucketed):
    """deepspeedai/DeepSpeed#4321: smaller gradients go into a bucket and larger ones alone, but one of its size
    nowhere."""

    def __init__(self, module: nn.Module, *, process_group: Any = None, bucket_mb: float = 25) -> None:
        self.limit = bucket_mb * 2**20
        super().__init__(module, process_group=process_group)

    def average(self, parameters: list[nn.Parameter]) -> None:
        if others := [p for p in parameters if p.nbytes != self.limit]:
            super().average(others)


@defect(cause="options", caught_by="test_a_narrower_reduction")
class IgnoresReduceDtype(Plain):
    def __init__(self, module: nn.Module, *, process_group: Any = None, reduce_dtype: Any = None) -> None:
        super().__init__(module, process_group=process_group)


@defect(cause="options", caught_by="test_a_narrower_reduction")
class RoundsWhatItHasSent(Plain):
    """Sends in full precision and rounds to `reduce_dtype` afterwards."""

    def __init__(self, module: nn.Module, *, process_group: Any = None, reduce_dtype: Any = None) -> None:
        self.reduce_dtype = reduce_dtype
        super().__init__(module, process_group=process_group)

    def reduce(self, gradient: Tensor) -> None:
        super().reduce(gradient)
        gradient.copy_(gradient.to(self.reduce_dtype))


@defect(cause="options", caught_by="test_a_call_is_the_modules_own")
class CallsForwardItself(Plain):
    """pytorch/tensordict#1414: calls `forward` directly, which skips the root module's hooks."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module.forward(*args, **kwargs)


@defect(cause="communication", caught_by="test_every_rank_starts_with_rank_0s_to_the_bit")
class StartsWhereSumsDiffer(Plain):
    """Broadcasts only if the ranks' sums differ; other values may have equal sums."""

    def start(self) -> None:
        for tensor in chain(self.module.parameters(), self.module.buffers()):
            own = tensor.detach().double().sum().reshape(1)
            sums = [torch.empty_like(own) for _ in range(self.size)]
            dist.all_gather(sums, own, group=self.group)
            if any(not torch.equal(each, sums[0]) for each in sums):
                dist.broadcast(tensor.detach(), group=self.group, group_src=0)


@defect(cause="options", caught_by="test_bucket_mb_is_counted_in_the_gradients_dtype")
class CountsWhatIsSent(BucketedDataParallel):
    """Counts bytes after the cast: in half precision a bucket holds twice the gradients."""

    def __init__(
        self,
        module: nn.Module,
        *,
        process_group: Any = None,
        bucket_mb: float = 25,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        own = max((p.dtype.itemsize for p in module.parameters()), default=1)
        sent = own if reduce_dtype is None else reduce_dtype.itemsize
        super().__init__(
            module, process_group=process_group, bucket_mb=bucket_mb * own / sent, reduce_dtype=reduce_dtype
        )


@defect(cause="two calls", caught_by="test_modules_work_as_before")
class CopiesWhatHoldsItsArguments(Plain):
    """Copies argument containers to move tensors: what forward writes into a caller's list is lost."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(lambda x: x, (args, kwargs))
        return self.module(*args, **kwargs)
