"""verl's trainer without a GPU, through verl's own extension point VERL_USE_EXTERNAL_MODULES. verl
loads this module in each of its processes. The module registers a platform named `cpu` and a loader
of the class of rollout replicas; get_rollout_replica_class imports SGLang as for an Intel AMX
processor. verl itself is not changed. Two functions of torch and SGLang are patched, as both expect
a device: torch rejects the backend `cpu:gloo,cpu:gloo`, and SGLang's reducer looks for the device
of a shared tensor."""

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from verl.plugin.platform.platform_base import PlatformBase
from verl.plugin.platform.platform_manager import PlatformRegistry
from verl.workers.rollout.replica import RolloutReplicaRegistry


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _zero(*_: Any) -> int:
    return 0


@PlatformRegistry.register(platform="cpu")
class CpuPlatform(PlatformBase):
    device_name = vendor_name = "cpu"
    device_module = SimpleNamespace(
        **dict.fromkeys(("set_device", "synchronize", "empty_cache", "ipc_collect"), _nothing),
        **dict.fromkeys(("memory_allocated", "max_memory_allocated"), _zero),
        **dict.fromkeys(("memory_reserved", "max_memory_reserved"), _zero),
        is_available=lambda: True,
        current_device=lambda: "cpu",
        device_count=lambda: 1,
        get_device_name=lambda *_: "cpu",
        mem_get_info=lambda *_: (0, 0),
        get_rng_state=torch.get_rng_state,
        set_rng_state=torch.set_rng_state,
        manual_seed=torch.manual_seed,
        manual_seed_all=torch.manual_seed,
    )
    set_device = synchronize = set_allocator_settings = empty_cache = _nothing
    profiler_start = profiler_stop = cudart = _nothing

    def is_available(self) -> bool:
        return True

    def current_device(self) -> Any:
        # verl calls this before it shares weights, at a time when SGLang has been imported.
        _share_cpu_tensors()
        return "cpu"

    def device_count(self) -> int:
        return 1

    def manual_seed(self, seed: int) -> None:
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def get_device_capability(self, device_index: int = 0) -> tuple[None, None]:
        return None, None

    def communication_backend_name(self) -> str:
        return "gloo"

    def visible_devices_envvar(self) -> str:
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg: str) -> Iterator[None]:
        yield

    def ray_resource_name(self) -> str:
        return "GPU"

    def ray_noset_envvars(self) -> list[str]:
        return ["RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"]

    def is_ipc_supported(self) -> bool:
        return False


def _share_cpu_tensors() -> None:
    patch_torch: Any = sys.modules.get("sglang.srt.utils.patch_torch")
    if patch_torch is None or hasattr(patch_torch, "_modify_tuple_of_device"):
        return
    modify = patch_torch._modify_tuple_of_device = patch_torch._modify_tuple
    patch_torch._modify_tuple = lambda row, index, change: (
        modify(row, index, change) if len(row) > index else row
    )
    torch.multiprocessing.set_sharing_strategy("file_system")


def _one_gloo(init: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(init)
    def init_process_group(backend: str | None = None, **more: Any) -> None:
        init(backend="gloo" if backend == "cpu:gloo,cpu:gloo" else backend, **more)

    return init_process_group


def _replica() -> type:
    from verl.workers.rollout.sglang_rollout.async_sglang_server import SGLangReplica

    return SGLangReplica


torch.distributed.init_process_group = _one_gloo(torch.distributed.init_process_group)
RolloutReplicaRegistry.register("sglang", _replica)
