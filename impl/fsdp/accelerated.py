"""FSDP2 as Hugging Face's accelerate applies it, where that package is installed: `pip install accelerate`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.optim import Optimizer
from torch.torch_version import TorchVersion

from impl.fsdp.library import TorchFSDP2
from shardmark.api import register

OLDEST = "1.15"
"""The oldest version of accelerate that this was run with."""


class AcceleratedFSDP2(TorchFSDP2):
    """`accelerate.utils.fsdp2_prepare_model`, which is what `Accelerator.prepare` does to a model.

    accelerate chooses units by the names of their classes. Where some units of `wrap` and other modules have the same
    class (linears in blocks and after them), no name singles those units out. They are sharded here beforehand, and
    accelerate leaves them as they are. It also makes the final norm a unit, which stays gathered after forward.

    An `Accelerator` reads ranks and device from the environment, once a process, and refuses FSDP on CPUs. So the
    function gets a stand-in with the few attributes that it reads. accelerate's optimizers, autocast and loaders are
    not used; `prepare` gives an optimizer of PyTorch the shards.
    """

    def _shard(self, units: list[nn.Module], *, reshard_after_forward: bool, **options: Any) -> nn.Module:
        module, *parts = units
        mesh: DeviceMesh = options["mesh"]
        classes = singled_out(module, parts)
        for part in parts[::-1]:
            if not isinstance(part, classes):
                fully_shard(part, reshard_after_forward=reshard_after_forward, **options)
        return _prepared(
            module,
            mesh,
            classes,
            reshard_after_forward=reshard_after_forward,
            mixed_precision_policy=options["mp_policy"],
            cpu_offload=options["offload_policy"],
        )


def _prepared(module: nn.Module, mesh: DeviceMesh, classes: tuple[type[nn.Module], ...], **options: Any) -> nn.Module:
    # Imported here because it takes a second.
    from accelerate.utils import FullyShardedDataParallelPlugin, fsdp2_prepare_model

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap" if classes else "no_wrap",
        transformer_cls_names_to_wrap=[kind.__name__ for kind in classes],
        **options,
    )
    accelerator = SimpleNamespace(
        state=SimpleNamespace(fsdp_plugin=plugin),
        torch_device_mesh=mesh,
        parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
        mixed_precision="no",  # the plugin's policy sets all dtypes
        device=next(module.parameters()).device,
        is_main_process=mesh.get_local_rank() == 0,
    )
    prepared: nn.Module = fsdp2_prepare_model(accelerator, module)
    return prepared


def prepare(
    model: nn.Module, optimizer: Optimizer, mesh: DeviceMesh, classes: tuple[type[nn.Module], ...], **options: Any
) -> nn.Module:
    """Shard each module of the classes and the rest of the model, and give the shards to an optimizer that was made
    before and has no state yet: what `Accelerator.prepare(model, optimizer)` does. `options` are those of accelerate's
    plugin.

    accelerate finds a parameter again by its address, which a stand-in of one element keeps in the meantime. It holds
    the full parameters beside all shards until the model is prepared; then they are freed.
    """
    from accelerate.utils import fsdp2_switch_optimizer_parameters

    names = {parameter.data_ptr(): name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        group["params"] = [_stand_in(parameter) for parameter in group["params"]]
    prepared = _prepared(model, mesh, classes, **options)
    after = dict(prepared.named_parameters())
    fsdp2_switch_optimizer_parameters(optimizer, {address: after[name] for address, name in names.items()})
    return prepared


def _stand_in(parameter: Tensor) -> Tensor:
    held = torch.empty(1, dtype=parameter.dtype, device=parameter.device)
    held.data_ptr = parameter.data_ptr()  # type: ignore[method-assign, assignment]
    return held


def singled_out(module: nn.Module, units: list[nn.Module]) -> tuple[type[nn.Module], ...]:
    """The units' classes that accelerate can choose by name: all instances, and all modules of that name, are units."""
    parts = [part for part in module.modules() if part is not module]
    return tuple(
        kind
        for kind in dict.fromkeys(map(type, units))
        if all(part in units for part in parts if isinstance(part, kind) or type(part).__name__ == kind.__name__)
    )


def requires_accelerate(device: str) -> str | None:
    """Return the reason unless accelerate is installed in version `OLDEST` or later."""
    try:
        found = version("accelerate")
    except PackageNotFoundError:
        return "needs the package accelerate"
    return None if TorchVersion(found) >= OLDEST else f"needs accelerate {OLDEST} or later, and {found} is installed"


register("fsdp", "accelerate", AcceleratedFSDP2, requires=(requires_accelerate,), called="accelerate's FSDP2")
