"""Scaling accounted for: what a large model needs on how many devices, and when communication hides behind compute.

Each part is a question with its answer in a sentence, the steps that lead there and a table.
`perf/test_scaling_answers.py` holds them to brute force and puts them into the report. The document of all:

    python -m perf.scaling_answers > docs/scaling-answers.md
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from math import log2

from impl.accounting.mesh import pipeline_utilization
from impl.collectives.accounting import (
    half_bandwidth_bytes,
    ring_all_reduce_seconds,
    ring_meets_tree_bytes,
    tree_all_reduce_seconds,
)
from perf.part import Part
from perf.scaling_part import GB, MESH, MODEL
from perf.swiglu_answers import swiglu
from shardmark.meter.hardware import hardware

CARD, ROOM = 80 * GB, 95 * GB
LENGTH = 4_096
"""Tokens of a sequence, where sequences are counted."""
STAGES = 4


def memory() -> Part:
    """State, what backward needs, and cards for both."""
    model, state, saved = MODEL, MODEL.state, MODEL.saved_per_token
    cards = {tokens: math.ceil((state + saved * tokens) / CARD) for tokens in (0, LENGTH, 16 * LENGTH)}
    return Part(
        "What does a model of 126 blocks of two linears need?",
        "two linears",
        f"Weights, gradients and Adam's state take {state / 1e12:.2f} TB, which is {cards[0]} cards of 80 GB; each "
        f"token saves another {saved / 1e6:.2f} MB for backward.",
        (
            f"Parameters: P = blocks × 2 × D × F = {model.blocks} × 2 × {model.dim} × {model.ffn_dim} = "
            f"{model.parameters:,}.",
            f"Master weights, accumulated gradients, Adam's two states in float32: (4 + 4 + 8) × P = {state:,} bytes.",
            "Saved for backward in bfloat16: the input of each linear, 2 × blocks × (D + F) = "
            f"{saved:,} bytes a token.",
            f"Cards of 80 GB: the state alone takes {state / CARD:.2f}, so {cards[0]}. Not counted are the weights' "
            f"copies in bfloat16, 2 × P = {2 * model.parameters / GB:,.0f} GB if all are there at once.",
        ),
        ("bytes of", "bytes", "of 80 GB cards"),
        (
            *((name, f"{nbytes:,}", f"{nbytes / CARD:.2f}") for name, nbytes in state.entries.items()),
            *(
                (f"state, and {tokens:,} tokens saved", f"{state + saved * tokens:,}", f"{count}")
                for tokens, count in cards.items()
            ),
        ),
    )


def sharded() -> Part:
    """Bytes of a device, and the fewest devices, by batch."""
    too_many = math.ceil(2 * ROOM / MODEL.saved_per_token)
    tokens = (0, 1_024, 2_048, LENGTH, 8_192, 10_000, too_many - 1, too_many)
    least = {each: MODEL.least_devices(each, ROOM) for each in tokens}
    return Part(
        "On how many devices is it below 95 GB each?",
        "least devices",
        f"The state alone needs {least[0]} devices, {LENGTH:,} tokens a device need {least[LENGTH]}, and from "
        f"{too_many:,} tokens a device on no number of devices is enough.",
        (
            "Sharded over N: weights, gradients and state, 16 P bytes, and half of what is saved for backward, every "
            "second linear's; A = 2 × blocks × (D + F) bytes a token, B tokens whose activations a device keeps.",
            "A device has (16 P + A B / 2) / N + A B / 2 bytes.",
            f"Below 95 GB: N > (16 P + A B / 2) / (95e9 - A B / 2), where A B / 2 < 95e9: B < {too_many:,}.",
        ),
        ("B tokens", "least N", "GB a device"),
        tuple(
            (f"{each:,}", f"{count:,}", f"{MODEL.sharded(each, count) / GB:.3f}")
            if count
            else (f"{each:,}", "none", "-")
            for each, count in least.items()
        ),
    )


def meeting() -> Part:
    """The batch at which compute and communication take as long as each other."""
    tokens = MESH.least_tokens(MODEL.ffn_dim)
    times = (
        ("two products, 4 B D F / (N C)", MESH.compute_seconds(tokens, MODEL.dim, MODEL.ffn_dim)),
        ("weights gathered, 4 D F / (Y M_X W)", MESH.weights_seconds(MODEL.dim, MODEL.ffn_dim)),
        ("activations gathered and scattered, 4 B D / (X M_Y W)", MESH.activations_seconds(tokens, MODEL.dim)),
    )
    return Part(
        "From which batch on does compute hide the communication of a forward pass?",
        "compute meets links",
        f"Compute hides it from {tokens / MESH.devices:.1f} tokens a device on, {math.ceil(tokens):,} in total on "
        "X = 16 by Y = 4 devices.",
        (
            f"C = 4.6e14 FLOP/s, W = 2e10 × 9 = 1.8e11 bytes/s, α = C / W = {MESH.intensity:,.1f} FLOPs a byte; "
            "X = 16, Y = 4, N = X Y = 64, M_X = 2, M_Y = 1; weights and activations in bfloat16, B tokens in total.",
            "A block's forward computes 4 B D F / N FLOPs a device: T = 4 B D F / (N C).",
            "FSDP gathers the device's part of both weights, 4 D F / Y bytes: T = 4 D F / (Y M_X W).",
            "Tensor parallel gathers the input and reduces and scatters the output, 2 B D / X bytes each: "
            "T = 4 B D / (X M_Y W).",
            "The two kinds of communication take turns, and compute hides both where "
            "4 B D F / (N C) >= 4 D F / (Y M_X W) + 4 B D / (X M_Y W).",
            "So B = (α F X / M_X) / (F - α Y / M_Y) = "
            f"{MESH.intensity * MODEL.ffn_dim * 8:,.0f} / {MODEL.ffn_dim - MESH.intensity * 4:,.1f} = {tokens:,.1f}, "
            f"and B / N = {tokens / MESH.devices:.1f}. D cancels out.",
            "As in the source, (n-1)/n of a collective counts as 1, which asks for somewhat more tokens than needed.",
        ),
        ("of a block, at that batch", "µs"),
        tuple((name, f"{seconds * 1e6:.1f}") for name, seconds in times),
    )


def levers() -> Part:
    """Changes to the setup that lower that batch, and how far each does."""
    ffn, tokens = MODEL.ffn_dim, MESH.least_tokens(MODEL.ffn_dim)
    best = replace(MESH, fsdp=8, tensor=8)
    stages, narrow = MESH.pipelined(STAGES), replace(MESH, weight_bytes=1, activation_bytes=1)
    stage_tokens, microbatches = stages.least_tokens(ffn), 9 * (STAGES - 1)
    overlapped = MESH.least_tokens(ffn, overlapped=True)
    return Part(
        "What lowers the batch from which on compute hides communication?",
        "a smaller batch",
        f"From {tokens / 64:.0f} tokens a device, overlap lowers it to {overlapped / 64:.0f}, Y = 8 to "
        f"{best.least_tokens(ffn) / 64:.0f}, one byte an element to {narrow.least_tokens(ffn) / 64:.0f}, and "
        f"{STAGES} pipeline stages to {stage_tokens / 64:.0f}.",
        (
            "Overlap of the two kinds, each on its own axes: the larger counts, not the sum. B / N = α / (Y M_X), "
            f"as long as Y <= F M_Y / α = {MESH.most_tensor(ffn):.1f}.",
            "A larger tensor dimension: weights cost α F / (Y M_X) less with Y, activations α Y / M_Y more. In turns "
            f"Y = F M_Y / (2 α) = {MESH.best_tensor(ffn):.1f} is best, with B / N = 4 α² / (M_X M_Y F) = "
            f"{MESH.least_tokens_per_device(ffn):.1f}; overlapped Y = F M_Y / α, with a quarter of that, "
            f"{MESH.least_tokens_per_device(ffn, overlapped=True):.1f}. Beyond Y = F M_Y / α no batch hides the "
            "activations' communication, as both it and compute grow with B.",
            "Pipeline: of S stages each has X = N / (Y S), and B is proportional to X, so it is B / S, with weights "
            "gathered once for all m microbatches. A stage has work m / (m + S - 1) of the time: "
            f"{pipeline_utilization(STAGES, microbatches):.0%} with m = 9 (S - 1) = {microbatches}.",
            f"Sequence parallel: B counts tokens, so X may cut sequences. {tokens:,.0f} tokens are "
            f"{tokens / LENGTH:.1f} sequences of {LENGTH:,}, fewer than X = 16: each is on X × {LENGTH:,} / B = "
            f"{MESH.fsdp * LENGTH / tokens:.1f} devices. Along Y it turns an all-reduce into the reduce-scatter and "
            "all-gather that are counted here, and saves A / Y instead of 2 × blocks × (D + F / Y) bytes a token.",
            "Lower precision on the links: with b bytes an element B = (b α F X / M_X) / (2 F - b α Y / M_Y), and of "
            "one byte instead of two a little less than half.",
        ),
        ("mesh", "tokens a device", "tokens in total"),
        (
            _row("X = 16, Y = 4, in turns", tokens, 64),
            _row("overlapped", overlapped, 64),
            *(
                _row(f"X = {64 // y}, Y = {y}", replace(MESH, fsdp=64 // y, tensor=y).least_tokens(ffn), 64)
                for y in (8, 16, 32)
            ),
            _row(f"{STAGES} stages of X = {stages.fsdp}, Y = 4", stage_tokens, 64),
            _row("X = 16, Y = 4, one byte an element", narrow.least_tokens(ffn), 64),
        ),
    )


def _row(name: str, tokens: float, devices: int) -> tuple[str, ...]:
    return (name, f"{tokens / devices:,.1f}", f"{tokens:,.1f}") if tokens < math.inf else (name, "none", "none")


def tensor_parallel() -> Part:
    """Memory and volume by Y."""
    rows = []
    for devices in (1, 2, 4, 8, 16):
        saved, split = (MODEL.tensor_parallel_saved_per_token(devices, each) for each in (False, True))
        sent = MODEL.tensor_parallel_sent(1, devices)
        state = MODEL.state / devices / GB
        rows.append((f"{devices}", f"{state:,.1f}", f"{saved / 1e6:.2f}", f"{split / 1e6:.2f}", f"{sent / 1e6:.2f}"))
    return Part(
        "What does tensor parallel keep and send?",
        "tensor parallel",
        f"Each of 4 devices keeps {MODEL.state / 4 / GB:,.0f} GB of state and sends {rows[2][4]} MB a token and step.",
        (
            "The first linear's columns and the second's rows are split over Y: 16 P / Y bytes of state a device.",
            "Saved a token: the whole input and a part of the hidden activations, 2 × blocks × (D + F / Y); with "
            "sequence parallel 2 × blocks × (D + F) / Y.",
            "Sent a token: an all-reduce of D bfloat16 in forward, of the output, and one in backward, of the input's "
            "gradient: 2 × blocks × 2 (Y - 1) / Y × 2 D bytes. With sequence parallel it is a quarter more: backward "
            "gathers the input again.",
        ),
        ("Y", "state GB", "saved MB a token", "with sequence parallel", "sent MB a token"),
        tuple(rows),
    )


def all_reduces() -> Part:
    """Around a ring, and by two trees."""
    node = hardware("h100-80gb")
    nbytes = 2 * 2 * MODEL.dim * MODEL.ffn_dim
    rows = []
    for ranks in (2, 8, 64, 512):
        inside = ranks <= node.devices_per_node
        link, latency = (node.link, node.latency) if inside else (node.network, node.network_latency)
        ring, tree = (each(nbytes, ranks, link, latency) for each in (ring_all_reduce_seconds, tree_all_reduce_seconds))
        ring_corner = half_bandwidth_bytes(2 * (ranks - 1), 2 * (ranks - 1) / ranks, link, latency)
        tree_corner = half_bandwidth_bytes(2 * log2(ranks), 2, link, latency)
        sizes = (ring_corner, tree_corner, ring_meets_tree_bytes(ranks, link, latency))
        rows.append(
            (f"{ranks}", *(f"{each * 1e3:,.2f}" for each in (ring, tree)), *(f"{each / 1e6:,.2f}" for each in sizes))
        )
    return Part(
        "When is an all-reduce faster around a ring, when by trees?",
        "ring and tree",
        f"Trees are faster up to {rows[1][5]} MB on 8 H100 and up to {float(sizes[2]) / GB:,.0f} GB on 512; a ring is "
        "faster beyond.",
        (
            "S bytes, n ranks, L seconds a step, W bytes/s in one direction. Ring: T = 2 (n-1) (L + S / (n W)); each "
            "rank sends 2 (n-1) / n × S, which is the least there can be.",
            "Two binary trees with half of the bytes each: T = 2 log2(n) L + 2 S / W; each rank sends 2 S.",
            "They meet at S = n W L (n - 1 - log2(n)): below it the trees are faster, above it the ring.",
            "The corner of each roofline, where latency takes as long as sending: ring S = n L W, trees log2(n) L W. "
            "Below it time is latency, above it bandwidth.",
            f"Here: the gradients of a block in bfloat16, 4 D F = {nbytes:,} bytes; up to 8 ranks NVLink, "
            f"{node.link / GB:.0f} GB/s and {node.latency * 1e6:.1f} µs, beyond the network, "
            f"{node.network / GB:.0f} GB/s and {node.network_latency * 1e6:.0f} µs (h100-80gb in "
            "shardmark/meter/hardware.toml).",
        ),
        ("ranks", "ring ms", "trees ms", "ring's corner MB", "trees' corner MB", "they meet at MB"),
        tuple(rows),
    )


def parts() -> Sequence[Part]:
    """The parts of the document, in its order."""
    return memory(), sharded(), meeting(), levers(), tensor_parallel(), swiglu(), all_reduces()


INTRODUCTION = """# Scaling, accounted for

This page answers what a large model needs in memory, communication and time on many cards, by formulas alone.

A model of 126 blocks of two linears without bias, D = 16384 and F = 53248, and one of SwiGLU: activations and the
communication of gradients in bfloat16; master weights, accumulated gradients and Adam's state in float32.
The formulas are in `impl/accounting/feed_forward.py`, `impl/accounting/mesh.py` and
`impl/collectives/accounting.py`; `perf/test_scaling_answers.py` and `perf/test_swiglu_answers.py` hold each figure
to brute force. `python -m perf.scaling_answers` writes this page.
B, D, F, X, Y, N, C, W, α, M_X and M_Y are the letters of Austin et al., *How to Scale Your Model*, part 5, 2025;
ring: Patarasuk and Yuan, 2009; trees: Sanders, Speck and Träff, 2009; tensor parallel: Shoeybi et al., 2019, and
sequence parallel: Korthikanti et al., 2022; pipeline: Narayanan et al., 2021. GB and MB are powers of ten.
"""


def document() -> str:
    """docs/scaling-answers.md."""
    return INTRODUCTION + "".join("\n" + "\n".join(part.markdown()) + "\n" for part in parts())


if __name__ == "__main__":
    print(document(), end="")
