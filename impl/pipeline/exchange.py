"""Messages of a rank: outputs of its stages and gradients of their inputs, sent and received by micro-batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from impl.pipeline.actions import Action, Kind
from impl.pipeline.messages import message_after, receipt_of

Tensors = tuple[Tensor, ...]
Shapes = tuple[torch.Size, ...]
Like = list[tuple[torch.Size, torch.dtype]]


class Exchange:
    """Sends are started and waited for at the end of a step; receipts are started and waited for where the tensors are
    used. Shapes and dtypes of a stage's outputs are told the next rank once for micro-batches of the same shapes."""

    def __init__(self, group: dist.ProcessGroup, rank_of: dict[int, int]) -> None:
        self.group, self.rank_of = group, rank_of
        self.known: dict[tuple[int, Shapes], Like] = {}
        """Shapes and dtypes of a stage's inputs, by stage and by the shapes of what the micro-batch is in stage 0."""

    def begin(self, shapes: Sequence[Shapes]) -> None:
        """Begin a step whose micro-batches have those shapes in stage 0."""
        self.shapes = shapes
        self.leaving: dict[Action, Tensors] = {}
        self.arriving: dict[Action, tuple[Tensors, list[Any]]] = {}
        self.under_way: list[tuple[Any, Tensor]] = []
        self.inputs_like: dict[tuple[int, int], Like] = {}
        self.outputs_like: dict[tuple[int, int], Like] = {}

    def leave(self, action: Action, tensors: Tensors) -> None:
        """Give what the action has found to the neighbour: at once if it is on this rank, or to its send."""
        forward = action.kind == Kind.FORWARD
        if forward:
            self.outputs_like[action.stage, action.micro_batch] = [(each.shape, each.dtype) for each in tensors]
        send = message_after(action, self.rank_of)
        if send is not None:
            self.leaving[send] = tensors
            return
        receipt = receipt_of(action.as_kind(Kind.SEND_FORWARD if forward else Kind.SEND_BACKWARD))
        self.arriving[receipt] = tensors, []

    def arrived(self, action: Action) -> Tensors:
        """Tensors that the action needs, once they are there."""
        forward = action.kind == Kind.FORWARD
        receipt = action.as_kind(Kind.RECEIVE_FORWARD if forward else Kind.RECEIVE_BACKWARD)
        tensors, works = self.arriving.pop(receipt)
        for work in works:
            work.wait()
        return tensors

    def send(self, action: Action) -> None:
        to = self.rank_of[receipt_of(action).stage]
        tensors = self.leaving.pop(action)
        if action.kind == Kind.SEND_FORWARD:
            key = action.stage + 1, self.shapes[action.micro_batch]
            if key not in self.known:
                self.known[key] = [(each.shape, each.dtype) for each in tensors]
                dist.send_object_list([self.known[key]], group=self.group, group_dst=to)
        for tensor in tensors:
            tensor = tensor.contiguous()
            self.under_way.append((dist.isend(tensor, group=self.group, group_dst=to), tensor))

    def receive(self, action: Action) -> None:
        if action.kind == Kind.RECEIVE_FORWARD:
            source = self.rank_of[action.stage - 1]
            key = action.stage, self.shapes[action.micro_batch]
            if key not in self.known:
                told: list[Any] = [None]
                dist.recv_object_list(told, group=self.group, group_src=source)
                self.known[key] = told[0]
            like = self.known[key]
        else:
            source = self.rank_of[action.stage + 1]
            like = self.outputs_like[action.stage, action.micro_batch]
        tensors = tuple(torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in like)
        works = [dist.irecv(tensor, group=self.group, group_src=source) for tensor in tensors]
        self.arriving[action] = tensors, works

    @property
    def device(self) -> str:
        return "cuda" if dist.get_backend(self.group) == "nccl" else "cpu"

    def end(self) -> None:
        """Wait until what was sent has been taken."""
        for work, _ in self.under_way:
            work.wait()
        self.under_way.clear()
