"""How much does an optimizer hold that was made before sharding, on the model and the GPUs of accelerate's benchmark?
It writes docs/optimizer-order.md: python -m studies.optimizer_order

The benchmark publishes plots without numbers, so its findings in words stand beside the prediction.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from impl.fsdp.optimizer_order import rewire
from shardmark.meter.recording import mark
from shardmark.predict.simulation.caching_allocator import AtMark
from studies.published.decoders import Decoder, DecoderSize, loss_of
from studies.published.memory_rows import held
from studies.published.programs import Program

PAGE = Path(__file__).parents[1] / "docs" / "optimizer-order.md"
ON = "h100-80gb"
RANKS = (2, 8)
QWEN = DecoderSize("llama", layers=28, width=1536, heads=12, kv_heads=2, ffn_width=8960, vocab=151_936)
"""Qwen2.5-1.5B, without the biases of q, k and v, a tenth of a thousandth of its parameters."""
BATCH, LENGTH = 2, 128
VARIANTS = ("after", "before", "before_repaired")
MARKS = ("sharding", "backward 1", "step 1", "backward 2", "step 2")


@cache
def training(variant: str) -> Program:
    """Two steps of the benchmark: AdamW in float32, products in bfloat16, gradients freed as a step begins."""

    def run() -> None:
        model = Decoder(QWEN, LENGTH)
        model.output.weight = model.embedding.weight
        optimizer = torch.optim.AdamW(model.parameters()) if variant != "after" else None
        before = dict(model.named_parameters()) if variant == "before_repaired" else {}
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.bfloat16, torch.bfloat16)
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        if optimizer is None:
            optimizer = torch.optim.AdamW(model.parameters())
        if before:
            rewire(optimizer, before, dict(model.named_parameters()))
        before.clear()
        mark("sharding")
        tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        for step in (1, 2):
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = loss_of(model, tokens, tokens)
            loss.backward()
            mark(f"backward {step}")
            optimizer.step()
            mark(f"step {step}")

    return run


def at_marks(variant: str, ranks: int) -> dict[str, AtMark]:
    """The allocator's bytes on one rank at each of `MARKS`."""
    found = held(training(variant), ON, ranks)
    return {name: found[name][0] for name in MARKS}


def page() -> str:
    """The page's text."""
    allocated = {(ranks, variant): at_marks(variant, ranks) for ranks in RANKS for variant in VARIANTS}
    lines = [
        f"| {ranks} | {variant} | {' | '.join(f'{at[name].allocated / 2**30:.2f}' for name in MARKS)} | "
        f"{at['step 2'].reserved / 2**30:.2f} |"
        for (ranks, variant), at in allocated.items()
    ]
    last = {key: at["step 2"].allocated for key, at in allocated.items()}
    few, many = (last[ranks, "before"] / last[ranks, "after"] for ranks in RANKS)
    apart = max(abs(last[ranks, "before_repaired"] / last[ranks, "after"] - 1) for ranks in RANKS)
    head = "| ranks | optimizer | " + " | ".join(MARKS) + " | reserved |\n" + "|---" * (len(MARKS) + 3) + "|"
    table = "\n".join([head, *lines])
    return TEXT.format(few=f"{few:.2f}", many=f"{many:.2f}", apart=f"{100 * apart:.1g}", table=table, on=ON)


TEXT = """# An optimizer made before its model was sharded

**Unrepaired, it trains nothing, and a rank holds {few} times the memory on 2 GPUs and {many} times on 8. Repaired, it
has the losses of one made afterwards, and its memory within {apart}%.**

FSDP2 gives a model new parameters. accelerate's benchmark of FSDP2
([benchmarks/fsdp2](https://github.com/huggingface/accelerate/tree/main/benchmarks/fsdp2)) compares an optimizer made
after sharding, one made before, one made before and repaired, and its own `Accelerator.prepare`.

- **Losses**: `pytest perf/test_optimizer_order.py --ranks 2 --report out.html` trains a transformer in each variant,
  holds each loss to that of a single process, and draws them by step. accelerate's variant runs where accelerate is
  installed (`impl/fsdp/accelerated.py`), and has the same losses.
- **Memory on the ranks at hand**: the same test meters it after each stage and step, and holds it to a closed form
  (`impl/fsdp/optimizer_order_accounting.py`). With n ranks, parameters, gradients and two moments take 4/n of the
  parameters' bytes where the optimizer was repaired, by accelerate too. Unrepaired, all of the parameters, their
  shards, and gradients that nobody frees take 1 + 2/n: as much on 2 ranks, and more on all larger numbers. While it
  shards, PyTorch frees each full parameter if no optimizer holds it; accelerate keeps all until the model is prepared.
- **Memory on the benchmark's hardware** is predicted below: Qwen2.5-1.5B, 2 sequences of 128 tokens on each H100,
  AdamW in float32 and products in bfloat16. Its authors publish plots without numbers, and say that on 8 H100s the
  unrepaired optimizer takes significantly more memory, that the others are alike, and that 2 GPUs do not show it. The
  prediction agrees.

GiB allocated on one rank after each stage, and reserved at the end, predicted for {on}:

{table}

Gradients are freed as the next step begins. The model is made on the GPU here, and on the CPU there, so reserved bytes
include room for all of it.

Written by `python -m studies.optimizer_order`.
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
