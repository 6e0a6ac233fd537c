"""accelerate's FSDP2: it has the same units as a real `Accelerator` makes; where it cannot run, it gives the reason."""

import os
import weakref
from importlib.metadata import PackageNotFoundError

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.functional import cross_entropy

from impl.fsdp import accelerated, by_type
from impl.fsdp.accelerated import AcceleratedFSDP2, prepare, requires_accelerate, singled_out
from impl.model.layers import Block
from impl.model.sizes import SIZES
from impl.model.transformer import Transformer
from shardmark.ranks.world import World


def _transformer(device: str) -> Transformer:
    torch.manual_seed(0)
    return Transformer(SIZES["tiny"], context_length=8).to(device)


def _units(model: nn.Module) -> list[tuple[str, list[str]]]:
    """List each unit's name and the parameters in it."""
    units = {name: part for name, part in model.named_modules() if isinstance(part, FSDPModule)}
    owned: dict[str, list[str]] = {name: [] for name in units}
    for name, _ in model.named_parameters():
        owned[max((u for u in units if not u or name.startswith(f"{u}.")), key=len)].append(name)
    return sorted(owned.items())


def prepared_on_rank(device: str) -> list[list[tuple[str, list[str]]]]:
    """Return our units and those of an `Accelerator`, which is made to shard on this machine."""
    from accelerate import Accelerator
    from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin

    ours = AcceleratedFSDP2(_transformer(device), wrap=by_type(Block, nn.Embedding))
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=ranks, LOCAL_WORLD_SIZE=ranks, OMP_NUM_THREADS="1")
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", transformer_cls_names_to_wrap=["Block", "Embedding"]
    )
    accelerator = Accelerator(cpu=device == "cpu", fsdp_plugin=plugin)
    accelerator.state.fsdp_plugin, accelerator.state.distributed_type = plugin, DistributedType.FSDP
    model = _transformer(device)
    theirs, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters()))
    return [_units(ours.module), _units(theirs)]


@pytest.mark.skipif(requires_accelerate("cpu") is not None, reason=requires_accelerate("cpu") or "")
def test_units_are_those_that_an_accelerator_makes(pair: World, device: str) -> None:
    for ours, theirs in pair.run(prepared_on_rank, device):
        assert ours == theirs
        assert [name for name, _ in ours] == ["", "blocks.0", "blocks.1", "embedding", "norm"]


def with_early_optimizer(device: str) -> list[float]:
    """Differences of each step's loss to that of an optimizer made after sharding; and the full parameters left."""
    losses, left = [], []
    for early in (True, False):
        model = _transformer(device)
        full = [weakref.ref(parameter) for parameter in model.parameters()]
        mesh = init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("ranks",))
        if early:
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            prepare(model, optimizer, mesh, (Block,))
            left = [parameter for parameter in (each() for each in full) if parameter is not None]
        else:
            for module in (*model.blocks, model):
                fully_shard(module, mesh=mesh)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = torch.arange(16, device=device).view(2, 8)
        for _ in range(3):
            loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert losses[2] < losses[0]
    return [*(one - other for one, other in zip(losses[:3], losses[3:], strict=True)), float(len(left))]


@pytest.mark.skipif(requires_accelerate("cpu") is not None, reason=requires_accelerate("cpu") or "")
def test_an_optimizer_made_before_trains_as_one_made_after(pair: World, device: str) -> None:
    for *differences, left in pair.run(with_early_optimizer, device):
        assert differences == pytest.approx([0.0] * 3, abs=1e-5)  # CUDA sums an embedding's gradient in any order
        assert left == 0


def test_classes_are_singled_out_by_names_that_only_units_have() -> None:
    model = _transformer("cpu")
    assert singled_out(model, [*model.blocks, model.embedding, model.output]) == (Block, nn.Embedding)
    linears = [part for part in model.modules() if isinstance(part, nn.Linear)]
    assert singled_out(model, linears) == (type(model.output),)
    assert singled_out(model, linears[1:]) == ()
    assert singled_out(model, [model.blocks[0]]) == ()


@pytest.mark.parametrize(
    ("installed", "says"),
    [
        (None, "needs the package accelerate"),
        ("1.9.2", "needs accelerate 1.15 or later, and 1.9.2 is installed"),
        ("1.15.0", None),
        ("2.0", None),
    ],
)
def test_where_it_does_not_run_it_says_why(
    installed: str | None, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        if installed is None:
            raise PackageNotFoundError(name)
        return installed

    monkeypatch.setattr(accelerated, "version", version)
    assert requires_accelerate("cpu") == says
