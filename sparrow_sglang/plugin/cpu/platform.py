"""Stock SGLang on a machine without an accelerator, in plain torch. SGLang's own CPU engine needs
Intel AMX; its other platforms need a device. This platform replaces Triton kernels by torch.
Attention is SGLang's torch_native, or `sparrow`."""

from typing import TYPE_CHECKING, Any

from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

from sparrow_sglang.plugin.names import uses_sparrow
from sparrow_sglang.plugin.server_log import announce

if TYPE_CHECKING:
    from sglang.srt.server_args import ServerArgs

# The machine may be a laptop, and torch zeroes, hence touches, the whole KV pool: 0.75 GB
# for the embedded model. Both are upper limits.
MAX_TOTAL_TOKENS = 32768
MEMORY_FRACTION = 0.5


class SparrowCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """An out-of-tree platform, because SGLang's in-tree CPU platform expects Intel AMX."""

    _enum = PlatformEnum.OOT

    def apply_server_args_defaults(self, server_args: "ServerArgs") -> None:
        if not uses_sparrow(server_args):
            announce(
                "no accelerator found, so SGLang runs on sparrow-sglang's CPU platform, in plain"
                " torch; SGLANG_USE_CPU_ENGINE=1 chooses SGLang's own CPU engine"
            )
        # SGLang fills in intel_amx on every CPU before it calls the platform.
        if server_args.attention_backend == "intel_amx":
            server_args.attention_backend = self.get_default_attention_backend()
        # The other LoRA backends are Triton kernels.
        server_args.lora_backend = "torch_native"
        if server_args.moe_runner_backend == "auto":
            # For some models SGLang would choose other kernels, and lay out the weights for them.
            server_args.moe_runner_backend = "triton"
        if server_args.grammar_backend is None:
            # SGLang's default, xgrammar, stops the scheduler on its first request on a CPU.
            server_args.grammar_backend = "llguidance"
        if server_args.mem_fraction_static is None:
            server_args.mem_fraction_static = MEMORY_FRACTION
            server_args.max_total_tokens = server_args.max_total_tokens or MAX_TOTAL_TOKENS
        # An idle scheduler would keep one core busy, and this machine has few.
        server_args.sleep_on_idle = True

    def get_device(self, device_id: int = 0) -> Any:
        # A string, because SGLang uses it as the value of --device.
        return self.device_type

    def get_default_attention_backend(self) -> str:
        return "torch_native"

    def get_compile_backend(self, mode: str | None = None) -> str:
        # Inductor needs a C++ compiler, and delays the first request by ten seconds.
        return "eager"

    def get_kv_pool_cls(self, *, kind: str) -> None:
        # SGLang's own class, which versions before 0.5.23 request by the method below.
        return None

    def get_mha_kv_pool_cls(self) -> type:
        from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

        return MHATokenToKVPool

    def get_paged_allocator_cls(self) -> type:
        from sparrow_sglang.plugin.cpu.allocator import TorchPagedAllocator

        return TorchPagedAllocator
