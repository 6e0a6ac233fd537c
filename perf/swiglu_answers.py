"""Feed-forward networks of SwiGLU on a mesh: data parallel, FSDP, tensor parallel, and the last two together."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from impl.accounting.mesh import Mesh
from impl.collectives.accounting import all_reduce_bytes_sent, bytes_sent
from perf.part import Part
from perf.scaling_part import GB, MESH, MODEL

GATED = replace(MODEL, linears=3, hidden_saved=4)
"""The feed-forward networks of Llama 3.1 405B."""
TOKENS = 64 * 1_024
"""Tokens of a step, over all devices."""
AXES = MESH.fsdp_axes + MESH.tensor_axes


@dataclass(frozen=True)
class Layout:
    """The model on the devices of a mesh, whose first dimension is FSDP's, or data parallel's if not `sharded`."""

    name: str
    mesh: Mesh
    sharded: bool = True

    @property
    def state(self) -> float:
        """Bytes of a device."""
        return GATED.state / self.mesh.tensor / (self.mesh.fsdp if self.sharded else 1)

    @property
    def saved(self) -> int:
        """Bytes that forward saves on a device in a step of TOKENS, with sequence parallelism along Y."""
        per_token = GATED.tensor_parallel_saved_per_token(self.mesh.tensor, sequence_parallel=True)
        return per_token * TOKENS // self.mesh.fsdp

    @property
    def sent(self) -> int:
        """Bytes that a device sends in a step of TOKENS, with sequence parallelism along Y."""
        weights = self.mesh.weight_bytes * GATED.parameters // self.mesh.tensor
        if self.sharded:  # gathered in forward and in backward, their gradients reduced and scattered
            of_weights = 3 * bytes_sent("all_gather", weights, self.mesh.fsdp)
        else:
            of_weights = all_reduce_bytes_sent(weights, self.mesh.fsdp)
        tokens = TOKENS // self.mesh.fsdp
        return of_weights + GATED.tensor_parallel_sent(tokens, self.mesh.tensor, sequence_parallel=True)

    @property
    def least_tokens(self) -> float:
        """Tokens of a device from which on compute hides communication, as `Mesh.least_tokens` has it. Data parallel
        sends twice as many bytes behind backward, which computes twice as long: as many tokens as FSDP needs."""
        if self.mesh.fsdp > 1:  # one device along Y sends no activations
            return self.mesh.least_tokens(GATED.ffn_dim, overlapped=self.mesh.tensor == 1) / self.mesh.devices
        return 0 if self.mesh.tensor <= self.mesh.most_tensor(GATED.ffn_dim) else math.inf


def layouts() -> tuple[Layout, ...]:
    """Layouts of the same devices. One that is alone has all axes of the links, which two together share."""
    gated = replace(MESH, linears=GATED.linears)
    alone = replace(gated, fsdp=gated.devices, tensor=1, fsdp_axes=AXES)
    return (
        Layout("data parallel", alone, sharded=False),
        Layout("FSDP", alone),
        Layout("tensor parallel", replace(gated, fsdp=1, tensor=gated.devices, tensor_axes=AXES)),
        Layout(f"both, X = {gated.fsdp}, Y = {gated.tensor}", gated),
        Layout("both, X = 8, Y = 8", replace(gated, fsdp=8, tensor=8)),
    )


def swiglu() -> Part:
    """State, what backward needs, bytes sent, and when compute hides them, of each layout."""
    data, sharded, tensor, both, _ = layouts()
    most = tensor.mesh.most_tensor(GATED.ffn_dim)
    return Part(
        "With SwiGLU, what do data parallel, FSDP, tensor parallel and both keep and send?",
        "SwiGLU",
        f"On 64 devices {GATED.parameters / GB:,.1f} billion parameters take {data.state / GB:,.0f} GB a device under "
        f"data parallel and {sharded.state / GB:,.1f} GB sharded; compute hides communication from "
        f"{sharded.least_tokens:,.0f} tokens a device on under FSDP, and from {both.least_tokens:,.0f} under both.",
        (
            f"A block has three linears: P = blocks × 3 × D × F = {GATED.parameters:,}, with 16 P = {GATED.state:,} "
            "bytes of state. Saved a token in bfloat16: the input, the gate, what SiLU makes of it, the other branch, "
            f"and their product, 2 × blocks × (D + 4 F) = {GATED.saved_per_token:,} bytes; with SiLU and the product "
            "computed again it is 2 × blocks × (D + 2 F).",
            "A block's forward computes 6 B D F / N FLOPs a device, half more than two linears, and its weights have "
            "half more bytes: FSDP needs the same number of tokens a device, B / N = α / M_X. Data parallel needs that "
            "number too: it sends twice the bytes behind backward alone, which computes twice as long.",
            "Activations are as many as with two linears: gate and other branch take the same input, whose gradients "
            "are added before they are sent. So Y may be half more, up to 3 F M_Y / (2 α) = "
            f"{most:.1f} where all {AXES} axes are tensor parallel's: up to there any batch hides it.",
            "Both, in turns: B = (3 α F X / M_X) / (3 F - 2 α Y / M_Y).",
        ),
        ("64 devices", "state GB", f"saved GB at {TOKENS:,} tokens", "sent GB", "hidden from tokens a device"),
        tuple(
            (
                each.name,
                f"{each.state / GB:,.1f}",
                f"{each.saved / GB:,.1f}",
                f"{each.sent / GB:,.1f}",
                f"{each.least_tokens:,.1f}" if each.least_tokens else "any",
            )
            for each in layouts()
        ),
    )
