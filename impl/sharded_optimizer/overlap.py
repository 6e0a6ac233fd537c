"""Overlap the all-gather of updated parameters with forward: each submodule waits just before it reads its own."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any

from torch import nn

from impl.sharded_optimizer.shards import ShardedBucket


class ForwardOverlap:
    """Hooks on `module` and its submodules; they keep nothing alive, and do nothing once `self` is freed.

    If the module's forward ends before a bucket's all-gather was waited for, no submodule that owns the bucket's
    parameters ran. Another module, such as a parent, may have read them before they were updated: `read_too_early`
    reports this.
    """

    def __init__(self, module: nn.Module, bucket_of: Mapping[nn.Parameter, ShardedBucket]) -> None:
        self._bucket_of = bucket_of
        weak = weakref.ref(self)

        def wait_for_own(submodule: nn.Module, args: Any) -> None:
            if (alive := weak()) is not None:
                alive._wait(submodule)

        def wait_for_rest(*_: Any, forward: bool = False) -> None:
            if (alive := weak()) is not None:
                alive._wait_for_rest(forward)

        for submodule in module.modules():
            if next(submodule.parameters(recurse=False), None) is not None:
                submodule.register_forward_pre_hook(wait_for_own)
        module.register_forward_hook(partial(wait_for_rest, forward=True))
        module.register_state_dict_pre_hook(wait_for_rest)
        module.register_load_state_dict_pre_hook(wait_for_rest)

    def read_too_early(self, parameter: nn.Parameter) -> bool:
        """Called for a parameter with a new gradient: True if forward read it without waiting for its update."""
        return self._bucket_of[parameter].late

    def _wait(self, submodule: nn.Module) -> None:
        for parameter in submodule.parameters(recurse=False):
            if (bucket := self._bucket_of.get(parameter)) is not None:
                bucket.finish_gathering()
                bucket.late = False

    def _wait_for_rest(self, forward: bool) -> None:
        for bucket in {bucket for bucket in self._bucket_of.values() if bucket.gathering}:
            bucket.finish_gathering()
            bucket.late = forward
