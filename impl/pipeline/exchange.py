"""Messages of a rank: outputs of its stages and gradients of their inputs, sent and received by micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from impl.pipeline.actions import Action, Kind
from impl.pipeline.messages import message_after, receipt_for, receipt_of, send_of

Tensors = tuple[Tensor, ...]
Shapes = tuple[torch.Size, ...]
Like = list[tuple[torch.Size, torch.dtype]]

MOST_UNDER_WAY = 4
"""Tensors that a rank sends at once: each is in memory until it has been taken."""


class Exchange:
    """Sends are started and waited for at the end of a step; receipts are started and waited for where the tensors are
    used. A rank announces shapes and dtypes of a stage's outputs to the next one once for micro-batches of the same
    shapes, unless `like` says them, from those shapes, for every stage but the first."""

    def __init__(
        self, group: dist.ProcessGroup, rank_of: dict[int, int], like: Callable[[Shapes], Like] | None = None
    ) -> None:
        self.group, self.rank_of, self.like = group, rank_of, like
        self.under_way: list[tuple[Any, Tensor]] = []
        """Handles of sends, with what they send."""
        self.known: dict[tuple[int, Shapes, Any], Like] = {}
        """Shapes and dtypes of a stage's inputs, by stage, by the shapes of what the micro-batch is in stage 0, and by
        the caller's autocast."""

    def begin(self, shapes: Sequence[Shapes], device: torch.device) -> None:
        """Begin a step whose micro-batches have those shapes in stage 0."""
        self.shapes, self.device = shapes, device
        enabled = torch.is_autocast_enabled(device.type)
        self.autocast = torch.get_autocast_dtype(device.type) if enabled else None
        self.leaving: dict[Action, Tensors] = {}
        self.arriving: dict[Action, tuple[Tensors, list[Any]]] = {}
        self.outputs_like: dict[tuple[int, int], Like] = {}
        if self.like is not None:
            self.known = {(stage, each, self.autocast): self.like(each) for each in shapes for stage in self.rank_of}

    def leave(self, action: Action, tensors: Tensors) -> None:
        """Give what the action has found to the neighbour: at once if it is on this rank, or to its send."""
        if action.kind == Kind.FORWARD:
            self.outputs_like[action.stage, action.micro_batch] = [(each.shape, each.dtype) for each in tensors]
        send = message_after(action, self.rank_of)
        if send is not None:
            self.leaving[send] = tensors
            return
        self.arriving[receipt_of(send_of(action))] = tensors, []

    def wait_for(self, action: Action) -> None:
        """Wait until the tensors are there that the action needs of another rank, if any."""
        _, handles = self.arriving.get(receipt_for(action), ((), []))
        for handle in handles:
            handle.wait()

    def arrived(self, action: Action) -> Tensors:
        """Tensors that the action needs, which are there."""
        tensors, _ = self.arriving.pop(receipt_for(action))
        return tensors

    def send(self, action: Action) -> None:
        to = self.rank_of[receipt_of(action).stage]
        tensors = self.leaving.pop(action)
        self._wait(MOST_UNDER_WAY - len(tensors))
        if action.kind == Kind.SEND_FORWARD:
            key = action.stage + 1, self.shapes[action.micro_batch], self.autocast
            like = [(x.shape, x.dtype) for x in tensors]
            if key not in self.known:
                dist.send_object_list([like], group=self.group, group_dst=to)
                self.known[key] = like
            if self.known[key] != like:
                known = _described(self.known[key])
                expected = f"{known} for an earlier one of the same shapes" if self.like is None else f"not {known}"
                found = f"{_described(like)} for micro-batch {action.micro_batch}"
                raise ValueError(f"stage {action.stage} returned {found}, and {expected}")
        for tensor in tensors:
            tensor = tensor.contiguous()
            self.under_way.append((dist.isend(tensor, group=self.group, group_dst=to), tensor))

    def receive(self, action: Action) -> None:
        if action.kind == Kind.RECEIVE_FORWARD:
            source = self.rank_of[action.stage - 1]
            key = action.stage, self.shapes[action.micro_batch], self.autocast
            if key not in self.known:
                announced: list[Any] = [None]
                dist.recv_object_list(announced, group=self.group, group_src=source)
                self.known[key] = announced[0]
            like = self.known[key]
        else:
            source = self.rank_of[action.stage + 1]
            like = self.outputs_like[action.stage, action.micro_batch]
        tensors = tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in like)
        handles = [dist.irecv(tensor, group=self.group, group_src=source) for tensor in tensors]
        self.arriving[action] = tensors, handles

    def end(self) -> None:
        """Wait until what was sent has been taken."""
        self._wait(0)

    def _wait(self, most: int) -> None:
        """Wait until no more tensors than that are being sent. No rank waits for ever: plans end also where each send
        waits for its receipt."""
        while len(self.under_way) > max(most, 0):
            handle, _ = self.under_way.pop(0)
            handle.wait()


def _described(like: Like) -> str:
    return ", ".join(f"{tuple(shape)} {str(dtype).removeprefix('torch.')}" for shape, dtype in like)
