"""Stock SGLang on a machine without an accelerator, in plain torch.

SGLang's own CPU engine needs Intel AMX and its kernels; its other platforms need a device. This one
swaps what would launch Triton kernels (page allocation, last locations, positions) for torch, and
keeps LoRA from asking for pinned memory. Attention is SGLang's torch_native, or `sparrow`.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform
from torch.overrides import TorchFunctionMode

from sparrow_sglang.plugin.scheduler_hooks import Hook

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

# The machine is somebody's laptop, and torch touches all of the KV pool when it zeroes it: 0.75 GB
# for the embedded model. Both are upper limits.
MAX_TOTAL_TOKENS = 32768
MEMORY_FRACTION = 0.5


class SparrowCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """Out-of-tree, because SGLang's in-tree CPU platform expects Intel AMX."""

    _enum = PlatformEnum.OOT

    def apply_server_args_defaults(self, server_args: "ServerArgs") -> None:
        # SGLang fills in intel_amx on every CPU before it asks the platform.
        if server_args.attention_backend == "intel_amx":
            server_args.attention_backend = self.get_default_attention_backend()
        # The other LoRA backends are Triton kernels.
        server_args.lora_backend = "torch_native"
        if server_args.grammar_backend is None:
            # SGLang's default, xgrammar, stops the scheduler on its first request on a CPU.
            server_args.grammar_backend = "llguidance"
        if server_args.mem_fraction_static is None:
            server_args.mem_fraction_static = MEMORY_FRACTION
            server_args.max_total_tokens = server_args.max_total_tokens or MAX_TOTAL_TOKENS
        # An idle scheduler would keep one core busy, and here there are few.
        server_args.sleep_on_idle = True

    def get_device(self, device_id: int = 0) -> Any:
        # Text, because SGLang takes it for the value of --device.
        return self.device_type

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        # Inductor needs a C++ compiler, and ten seconds for the first request.
        return "eager"

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        from sparrow_sglang.plugin.cpu.allocator import TorchPagedAllocator

        return TorchPagedAllocator


class _WithoutPinnedMemory(TorchFunctionMode):
    """Pinned memory needs an accelerator; without one, ordinary memory does the same."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.pin_memory:
            return args[0]
        kept = {key: value for key, value in (kwargs or {}).items() if key != "pin_memory"}
        return func(*args, **kept)


def without_pinned_memory(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND hook: LoRA asks for pinned memory unconditionally (0.5.17)."""
    with _WithoutPinnedMemory():
        return original(*args, **kwargs)


def without_compiler(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND hook: llguidance compiles its mask, which needs a C++ compiler (0.5.17)."""
    with torch.compiler.set_stance("force_eager"):
        return original(*args, **kwargs)


def no_triton(backend: str) -> bool:
    """REPLACE hook: SGLang decides by the attention backend's name (0.5.17), not by the device."""
    return False


def last_locations(
    req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, prefix_lens: torch.Tensor
) -> torch.Tensor:
    """REPLACE hook: SGLang takes the torch version for two backends by name only (0.5.17)."""
    from sglang.srt.mem_cache.allocation import get_last_loc_torch

    return get_last_loc_torch(req_to_token, req_pool_indices, prefix_lens)


def no_binding(*, tp_rank: int, tp_size: int) -> None:
    """REPLACE hook: SGLang insists on one NUMA node per rank, to bind its AMX kernels (0.5.17)."""


def share_cores(*, tp_size: int, tp_rank: int, local_omp_cpuid: Any) -> None:
    """REPLACE hook: SGLang calls kernels that only its CPU engine has, on Arm always (0.5.17)."""
    if tp_size > 1:
        torch.set_num_threads(max(1, torch.get_num_threads() // tp_size))


def without_nccl(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """BEFORE hook: groups default to NCCL on any device that SGLang does not know (0.5.17)."""
    return args, kwargs | {"use_pynccl": False}


_LORA = "sglang.srt.lora.lora_manager.LoRAManager"
HOOKS = (
    Hook("sglang.srt.utils.common.support_triton", no_triton, "REPLACE"),
    Hook("sglang.srt.mem_cache.allocation.get_last_loc", last_locations, "REPLACE"),
    Hook("sglang.srt.distributed.parallel_state.init_model_parallel_group", without_nccl, "BEFORE"),
    Hook("llguidance.torch.apply_token_bitmask_inplace_kernel", without_compiler, "AROUND"),
    Hook("sglang.srt.utils.numa_utils.init_threads_binding", no_binding, "REPLACE"),
    Hook("sglang.srt.distributed.bootstrap._init_cpu_threads_env", share_cores, "REPLACE"),
    *(
        Hook(f"{_LORA}.{method}", without_pinned_memory, "AROUND")
        for method in (
            "__init__",
            "load_lora_adapter",
            "load_lora_adapter_from_tensors",
            "prepare_lora_batch",
            "fetch_new_loras",
        )
    ),
)
