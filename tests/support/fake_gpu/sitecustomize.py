"""A machine with GPUs that nobody may use: what PyTorch says of devices is theirs, and work on one is an error.

    PYTHONPATH=tests/support/fake_gpu pytest correctness --device cpu

Python imports a module of this name as it starts, and processes inherit PYTHONPATH: so workers, inner runs of pytest
and ranks see the GPUs too. FAKE_GPUS is their number (default 2); CUDA_VISIBLE_DEVICES hides some, as of real ones.
"""

import os
import sys
from contextlib import nullcontext
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace

H100 = SimpleNamespace(
    name="Fake H100",
    gcnArchName="",
    major=9,
    minor=0,
    total_memory=80 * 2**30,
    multi_processor_count=132,
    max_threads_per_multi_processor=2048,
    regs_per_multiprocessor=65536,
    shared_memory_per_block=49152,
    shared_memory_per_block_optin=232448,
    shared_memory_per_multiprocessor=233472,
    L2_cache_size=50 * 2**20,
    warp_size=32,
    is_integrated=False,
    is_multi_gpu_board=False,
)
"""Properties of each device, by their names in PyTorch."""
STREAM = SimpleNamespace(synchronize=lambda: None)
"""The current stream, on which nothing runs."""


def device_count() -> int:
    """Devices that CUDA_VISIBLE_DEVICES shows, up to the first that is none."""
    number = int(os.environ.get("FAKE_GPUS", "2"))
    shown = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(number)))).split(",")
    invalid = [i for i, device in enumerate(shown) if not device.strip().isdigit() or int(device) >= number]
    return min(invalid, default=len(shown))


def fake(cuda: ModuleType) -> None:
    """Replace the functions of `torch.cuda` that say which devices there are, and the one that begins to use them."""
    import torch

    def use(*_: object) -> None:
        raise RuntimeError("this GPU is a fake one, and runs nothing")

    cuda.device_count = device_count
    cuda.is_available = lambda: device_count() > 0
    cuda.get_device_properties = lambda device=None: H100
    cuda.current_device = lambda: 0
    cuda.is_bf16_supported = lambda including_emulation=True: True
    cuda.get_arch_list = lambda: ["sm_80", "sm_90"]
    cuda.mem_get_info = lambda device=None: (H100.total_memory, H100.total_memory)
    # Libraries ask for these around work on the CPU.
    cuda.current_stream = lambda device=None: STREAM
    cuda.stream = lambda stream: nullcontext()
    cuda.synchronize = lambda device=None: None
    cuda.get_rng_state = lambda device="cuda": torch.zeros(16, dtype=torch.uint8)
    cuda.set_rng_state = lambda state, device="cuda": None
    cuda.nvtx.range_push = lambda name: 0
    cuda.nvtx.range_pop = lambda: 0
    cuda._lazy_init = use
    # The kind of device that PyTorch is built for, which a mesh is on by default. `torch.accelerator` still has none:
    # the compiler would take real streams of it.
    torch._C._get_accelerator = lambda check=None: torch.device("cuda")


def without_driver(triton: ModuleType) -> None:
    """Have PyTorch's compiler, which asks for the CPU's code too, look for no driver for Triton."""
    triton.has_triton = lambda: False


FAKES = {"torch.cuda": fake, "torch.utils._triton": without_driver}
"""Functions that change a module once it is there."""


class _Changing(Loader):
    """The loader of a module of `FAKES`."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        FAKES[module.__name__](module)


class _Finder(MetaPathFinder):
    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        if name not in FAKES:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(name)
        sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            spec.loader = _Changing(spec.loader)
        return spec


sys.meta_path.insert(0, _Finder())
