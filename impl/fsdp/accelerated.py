"""FSDP2 as Hugging Face's accelerate applies it, where that package is installed: `pip install accelerate`."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.torch_version import TorchVersion

from impl.accounting.library.fsdp import accelerate_peak
from impl.fsdp.library import TorchFSDP2
from shardmark.registry import register

OLDEST = "1.15"
"""The first accelerate that this has run with."""


class AcceleratedFSDP2(TorchFSDP2):
    """`accelerate.utils.fsdp2_prepare_model`, which is what `Accelerator.prepare` does to a model.

    accelerate chooses units by the names of their classes. Those of `wrap` that no name singles out, as where blocks
    and what comes after them have linears of one class, are sharded before, which accelerate leaves as they are. It
    makes a unit of its own of a final norm, that stays gathered after forward.

    An `Accelerator` would take ranks and device from the environment, once a process, and refuse FSDP on CPUs; so the
    function is given the few things that it reads of one. Its optimizers, its autocast and its loaders are not here.
    """

    def _shard(self, units: list[nn.Module], *, reshard_after_forward: bool, **options: Any) -> nn.Module:
        # Here, as it takes a second that others need not wait.
        from accelerate.utils import FullyShardedDataParallelPlugin, fsdp2_prepare_model

        module, *parts = units
        mesh: DeviceMesh = options["mesh"]
        classes = singled_out(module, parts)
        for part in parts[::-1]:
            if not isinstance(part, classes):
                fully_shard(part, reshard_after_forward=reshard_after_forward, **options)
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=reshard_after_forward,
            auto_wrap_policy="transformer_based_wrap" if classes else "no_wrap",
            transformer_cls_names_to_wrap=[kind.__name__ for kind in classes],
            mixed_precision_policy=options["mp_policy"],
            cpu_offload=options["offload_policy"],
        )
        accelerator = SimpleNamespace(
            state=SimpleNamespace(fsdp_plugin=plugin),
            torch_device_mesh=mesh,
            parallelism_config=SimpleNamespace(fsdp_dim_names=mesh.mesh_dim_names),
            mixed_precision="no",  # beyond the plugin's own
            device=next(module.parameters()).device,
            is_main_process=mesh.get_local_rank() == 0,
        )
        prepared: nn.Module = fsdp2_prepare_model(accelerator, module)
        return prepared


def singled_out(module: nn.Module, units: list[nn.Module]) -> tuple[type[nn.Module], ...]:
    """Those of the units' classes whose name, anywhere within the module, is a unit's."""
    parts = [part for part in module.modules() if part is not module]
    return tuple(
        kind
        for kind in dict.fromkeys(map(type, units))
        if all(part in units for part in parts if isinstance(part, kind) or type(part).__name__ == kind.__name__)
    )


def requires_accelerate(device: str) -> str | None:
    """Reason unless accelerate is installed, and new enough."""
    try:
        found = version("accelerate")
    except PackageNotFoundError:
        return "needs the package accelerate"
    return None if TorchVersion(found) >= OLDEST else f"needs accelerate {OLDEST} or later, and {found} is installed"


register("fsdp", "accelerate", AcceleratedFSDP2, memory=accelerate_peak, requires=(requires_accelerate,))
