"""Entry points of SGLang's platforms and plugins.

SGLang runs `activate` during `import sglang`, when it is only half imported, so that nothing here
imports it at the top. It calls `register` once in the launching process and in every scheduler. It
only logs errors of plugins and hooks, so the backend's factory checks for such errors and refuses
to start."""

import importlib.util
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from sparrow_sglang.attention_backends.dense_side import dense_backend
from sparrow_sglang.plugin.arguments import server_args
from sparrow_sglang.plugin.arguments.layer_refusals import unknown_attributes
from sparrow_sglang.plugin.arguments.refusals import (
    device_problems,
    model_problems,
    not_registered,
    runner_problems,
    server_problems,
)
from sparrow_sglang.plugin.hooks import (
    CPU_HOOKS,
    HOOKS,
    failing_probes,
    is_applied,
    register_hooks,
)
from sparrow_sglang.plugin.lossless.mode import mode_of
from sparrow_sglang.plugin.names import BACKEND, refuse
from sparrow_sglang.plugin.scheduler import adapter_checks, allocation
from sparrow_sglang.plugin.scheduler.exact_acceptance import record_size
from sparrow_sglang.plugin.scheduler.weight_checks import Checkpoint
from sparrow_sglang.plugin.server_log import announce
from sparrow_sglang.plugin.state import PROCESS, Hook, SchedulerState
from sparrow_sglang.processes import ignore_sigint_if_shielded
from sparrow_sglang.sglang_compat.arguments import resolved
from sparrow_sglang.sglang_compat.versions import (
    INSTALL,
    SUPPORTED,
    installed_version,
    ranks,
    version_problems,
)

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner


CPU_PLATFORM = "sparrow_sglang.plugin.cpu.platform:SparrowCpuPlatform"


def activate() -> str | None:
    """Qualified name of the CPU platform, or None where SGLang has a platform of its own."""
    ignore_sigint_if_shielded()
    server_args.install_on_import()
    return CPU_PLATFORM if on_cpu_platform() else None


def on_cpu_platform() -> bool:
    """Whether SGLang runs on our CPU platform here."""
    # The variable selects SGLang's own CPU engine, which needs Intel AMX.
    return os.environ.get("SGLANG_USE_CPU_ENGINE", "0") != "1" and not has_accelerator()


def has_accelerator() -> bool:
    """Whether this machine has a device that SGLang should serve from."""
    return (
        torch.cuda.is_available()  # ROCm too
        or torch.xpu.is_available()
        or torch.backends.mps.is_available()
        # These packages add their device to torch on import, which may not have happened yet.
        or any(
            importlib.util.find_spec(name) is not None
            for name in ("torch_npu", "habana_frameworks", "torch_musa")
        )
    )


def register() -> None:
    """Register backend, arguments and hooks."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(BACKEND)(build_backend)
    try:
        refuse(version_problems())
        server_args.install()
        from sglang.srt.platforms import current_platform

        from sparrow_sglang.plugin.cpu.platform import SparrowCpuPlatform
        from sparrow_sglang.plugin.lossless import algorithm

        algorithm.register()

        on_cpu = isinstance(current_platform, SparrowCpuPlatform)
        PROCESS.hooks = HOOKS + CPU_HOOKS if on_cpu else HOOKS
        refuse(probe_problems(PROCESS.hooks))
        register_hooks(PROCESS.hooks)
    except Exception as error:
        PROCESS.error = error
        raise


def build_backend(runner: "ModelRunner") -> "AttentionBackend":
    """The backend's factory, called in every scheduler once model and KV pool exist. Raises
    `RuntimeError` if the plugin did not load as a whole, `InputError` on what is refused."""
    refuse(version_problems())
    view, model_config = resolved(runner.server_args), runner.model_config
    mode = mode_of(view)
    if PROCESS.error is None and mode.hooks:
        _add_hooks(mode.hooks)
    require_registration()
    refuse(server_problems(view))
    refuse(model_problems(model_config))
    schedule = server_args.resolve_schedule(runner.server_args, model_config.hf_config)
    refuse(device_problems(view, model_config, schedule))
    refuse(runner_problems(runner))
    rank = ranks(runner)
    if rank.tp_rank == rank.pp_rank == 0 and not rank.dp_rank:
        if installed_version() not in SUPPORTED:
            announce(f"SGLang {installed_version()} has not been tested, but all hooks fit into it")
        line = mode.describe(view, schedule, model_config.hf_config)
        if runner.device == "cuda":
            line += f"; prefill by {dense_backend(runner.server_args, model_config)}"
        announce(f"sparse decode with {line}")
    from sparrow_sglang.attention_backends.backend import SparrowAttnBackend

    backend = SparrowAttnBackend(runner, schedule)
    if runner.device == "cuda":
        table = runner.req_to_token_pool.req_to_token
        allocation.compile_kernels(runner.token_to_kv_pool_allocator, table, mode.is_dense)
    if (lora_manager := getattr(runner, "lora_manager", None)) is not None:
        # Now, and not while requests wait for the first adapter.
        adapter_checks.module_shapes(lora_manager.base_hf_config)
    PROCESS.scheduler = SchedulerState(
        backend.budgets,
        backend.decode_guard,
        record=record_size(runner.server_args, model_config),
        mode=mode,
        checkpoint=Checkpoint.of_model(model_config),
    )
    return backend


def probe_problems(hooks: Sequence[Hook]) -> list[str]:
    """Functions and attributes of this SGLang that differ from what we rely on."""
    return [
        f"SGLang {installed_version()}: {problem}; {INSTALL}"
        for problem in (*failing_probes(hooks), *unknown_attributes())
    ]


def require_registration() -> None:
    """Raise RuntimeError unless `register` succeeded here and SGLang applied every hook."""
    if PROCESS.error is not None:
        raise not_registered(PROCESS.error) from PROCESS.error
    missing = [hook.target for hook in PROCESS.hooks if not is_applied(hook)]
    if missing or not PROCESS.hooks:
        raise RuntimeError(
            f"SGLang did not apply these hooks of sparrow-sglang: {missing or 'any'}; {INSTALL}"
        )


def _add_hooks(hooks: tuple[Hook, ...]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry

    refuse(probe_problems(hooks))
    register_hooks(hooks)
    HookRegistry.apply_hooks()
    PROCESS.hooks += hooks
