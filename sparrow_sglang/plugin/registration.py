"""Entry point of SGLang's plugins: makes the attention backend `sparrow` known to SGLang.

SGLang calls `register` once in the launching process and once in every scheduler. It logs the
errors of plugins and goes on, and it does the same for hooks that it cannot apply. So the backend's
factory, which no scheduler gets past, looks at what went wrong and refuses to start.
"""

import pkgutil
from typing import TYPE_CHECKING, Any

from sparrow_sglang.attention_backends.kernel_limits import kernel_problems
from sparrow_sglang.loaded_schedules import LoadedSchedules
from sparrow_sglang.plugin import control as server_control
from sparrow_sglang.plugin import exact_acceptance, server_args
from sparrow_sglang.plugin import scheduler_hooks as hooks
from sparrow_sglang.plugin.announce import announce, describe
from sparrow_sglang.plugin.audit import hooks as audit_hooks
from sparrow_sglang.plugin.refusals import (
    BACKEND,
    model_problems,
    refuse,
    runner_problems,
    server_problems,
    version_problems,
)

if TYPE_CHECKING:
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
    from sglang.srt.model_executor.model_runner import ModelRunner


class _Registration:
    """What `register` did in this process, for the factory to check."""

    error: Exception | None = None
    wanted: tuple[hooks.Hook, ...] = ()


def register() -> None:
    """Register backend, arguments and hooks; called by SGLang, at most once per process."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(BACKEND)(build_backend)
    try:
        refuse(version_problems())
        server_args.install()
        _Registration.wanted = (
            hooks.HOOKS
            + server_control.HOOKS
            + audit_hooks.HOOKS
            + exact_acceptance.HOOKS
            + _platform_hooks()
        )
        _register_hooks(_Registration.wanted)
    except Exception as error:
        _Registration.error = error
        raise


def build_backend(runner: "ModelRunner") -> "AttentionBackend":
    """The backend's factory, called in every scheduler once model and KV pool exist.

    Raises:
        RuntimeError: the plugin did not load as a whole.
        ValueError: this SGLang, model, schedule or these arguments cannot be served.
    """
    refuse(version_problems())
    require_registration()
    refuse(server_problems(runner.server_args))
    refuse(model_problems(runner.model_config))
    if runner.device == "cuda":
        refuse(kernel_problems(runner.server_args, runner.model_config))
    refuse(runner_problems(runner))
    loaded, source = server_args.resolve_schedules(
        runner.server_args, runner.model_config.hf_config
    )
    if runner.ps.tp_rank == runner.ps.pp_rank == 0 and not runner.ps.dp_rank:
        announce(start_up_line(loaded, source, runner.model_config.hf_config))
    from sparrow_sglang.attention_backends.backend import SparrowAttnBackend

    backend = SparrowAttnBackend(runner, loaded)
    hooks.decode_by(backend.budgets)
    return backend


def require_registration() -> None:
    """Raise RuntimeError unless `register` succeeded here and SGLang applied every hook."""
    if _Registration.error is not None:
        raise RuntimeError(
            f"sparrow-sglang could not be registered: {_Registration.error!r}. Install the SGLang"
            f" that it was made for, or choose another --attention-backend than {BACKEND}"
        ) from _Registration.error
    missing = [hook.target for hook in _Registration.wanted if not _is_applied(hook)]
    if missing or not _Registration.wanted:
        raise RuntimeError(
            f"SGLang did not apply these hooks of sparrow-sglang: {missing or 'any'}. Without them"
            " sparse decode would be wrong; install the SGLang that it was made for"
        )


def start_up_line(loaded: LoadedSchedules, source: str, hf_config: Any) -> str:
    """What is in force and why, and for which model it was calibrated, in one line."""
    others = [
        f"{other.name} ({other.calibration(hf_config)})"
        if other.is_foreign(hf_config)
        else other.name
        for other in loaded.named
        if other is not loaded.in_force
    ]
    also = f"; also loaded: {', '.join(others)}" if others else ""
    return f"sparse decode with {describe(loaded.in_force, source, hf_config)}{also}"


def _platform_hooks() -> tuple[hooks.Hook, ...]:
    from sglang.srt.platforms import current_platform

    from sparrow_sglang.plugin.cpu import platform as cpu_platform

    on_cpu = isinstance(current_platform, cpu_platform.SparrowCpuPlatform)
    return cpu_platform.HOOKS if on_cpu else ()


def _register_hooks(wanted: tuple[hooks.Hook, ...]) -> None:
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in wanted:
        HookRegistry.register(hook.target, hook.function, HookType[hook.kind])


def _is_applied(hook: hooks.Hook) -> bool:
    """Whether the wrappers that SGLang put round the target hold this hook's function."""
    try:
        wrapper: Any = pkgutil.resolve_name(hook.target)
    except (ImportError, AttributeError):
        return False
    while wrapper is not None:
        cells = getattr(wrapper, "__closure__", None) or ()
        if any(cell.cell_contents is hook.function for cell in cells):
            return True
        wrapper = getattr(wrapper, "__wrapped__", None)
    return False
