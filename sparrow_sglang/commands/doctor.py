"""`sparrow doctor`: does sparse decode work with this machine, this SGLang and this model?

What needs no SGLang is checked before it is imported, which takes ten seconds.
"""

import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from typing import TYPE_CHECKING, NamedTuple

from sparrow_sglang.attention_backends.dense_side import dense_backend
from sparrow_sglang.attention_backends.kernel_limits import (
    describe_fit,
    kernel_problems,
    rule_problems,
)
from sparrow_sglang.commands.plan import NO_GAIN, Plan
from sparrow_sglang.commands.serve import (
    check_flags,
    check_model,
    check_port,
    parse_server_args,
    with_defaults,
)
from sparrow_sglang.config import SCHEDULE_VARIABLE, SOURCE_VARIABLE, ConfigError
from sparrow_sglang.errors import InputError
from sparrow_sglang.models import ModelError
from sparrow_sglang.noise import VARIABLE as NOISE_VARIABLE
from sparrow_sglang.planning.model_shape import KV_ITEMSIZES, ModelShape
from sparrow_sglang.planning.step_time import GPUS
from sparrow_sglang.plugin.lossless.refusals import (
    FORCED_ACCEPTANCE,
    describe_lossless,
    is_lossless,
)
from sparrow_sglang.plugin.refusals import BACKEND, uses_sparrow
from sparrow_sglang.schedule import BudgetSchedule, ScheduleError
from sparrow_sglang.sglang_arguments import read_model_config, resolved
from sparrow_sglang.sglang_install import (
    SUPPORTED,
    import_problem,
    installed_version,
    version_problems,
)
from sparrow_sglang.validation import nearest_first

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

ENTRY_POINTS = {"sglang.srt.plugins": "sparrow", "sglang.srt.platforms": "sparrow_cpu"}
PACKAGES = ("sparrow-sglang", "torch", "transformers", "triton", "flashinfer-python")
VARIABLES = (
    *("SGLANG_PLUGINS", "SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE"),
    *(SCHEDULE_VARIABLE, "SPARROW_CACHE"),
)
# The other ones are set by this package itself, or by its developers.
_KNOWN = (
    *VARIABLES,
    *(SOURCE_VARIABLE, "SPARROW_COMMIT", "SPARROW_RECORD", NOISE_VARIABLE, FORCED_ACCEPTANCE),
)
_GAIN_BATCH = 16
_ACCEPTANCE = 0.95


class Check(NamedTuple):
    """One line of the report; `status` is ok, FAIL, WARN or note."""

    status: str
    name: str
    detail: str


def examine(argv: Sequence[str]) -> Iterator[Check]:
    """Checks in the order in which a server would fail; `argv` is that of `sparrow serve`."""
    words, failed = None, False
    try:
        words = with_defaults(argv)
    except ModelError as error:
        # The demo model, which was not requested, may be missing.
        model = Check("FAIL" if argv else "note", "model", str(error))
    for check in _without_sglang(words):
        failed |= check.status == "FAIL"
        yield check
    if words is None:
        yield model
    if failed or (words is None and model.status == "FAIL"):
        yield Check("note", "plugin", "not checked, as long as something above fails")
        return
    plugin = _check_plugin()
    yield from (plugin, _check_platform())
    if plugin.status != "FAIL" and words is not None:
        yield from _check_model(words)


def _without_sglang(words: Sequence[str] | None) -> Iterator[Check]:
    problems = version_problems()
    tested = "" if installed_version() in SUPPORTED else f"; tested: {', '.join(SUPPORTED)}"
    status = "FAIL" if problems else "WARN" if tested else "ok"
    yield Check(status, "SGLang", *problems or [installed_version() + tested])
    yield Check("ok", "packages", ", ".join(f"{name} {_version(name)}" for name in PACKAGES))
    for group, name in ENTRY_POINTS.items():
        if not any(entry.name == name for entry in entry_points(group=group)):
            fix = "run pip install -e . in the checkout, which alone has none"
            yield Check("FAIL", "entry point", f"{group}: no {name}; {fix}")
    yield _check_environment()
    if words is None or problems:
        return
    for name, check in (("flags", check_flags), ("port", check_port), ("model", check_model)):
        try:
            check(words)
        except (ScheduleError, ConfigError) as error:
            yield Check("FAIL", "schedule", str(error))
        except ValueError as error:
            yield Check("FAIL", name, str(error))
            return


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _check_environment() -> Check:
    values = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    unknown = [n for n in os.environ if n.startswith("SPARROW_") and n not in _KNOWN]
    if unknown:
        near = nearest_first(unknown[0], [name.lower() for name in _KNOWN])[0].upper()
        return Check("WARN", "environment", f"nobody reads {unknown[0]}: did you mean {near}?")
    listed = ", ".join(f"{name}={value}" for name, value in values.items())
    return Check("ok", "environment", listed or f"none of {', '.join(VARIABLES)} is set")


def _check_plugin() -> Check:
    try:
        # Any of SGLang's dependencies may be missing.
        import_module("sglang.srt.server_args")
    except ImportError as error:
        return Check("FAIL", "plugin", import_problem(error))
    from sglang.srt.plugins import load_plugins

    from sparrow_sglang.plugin import registration as plugin
    from sparrow_sglang.plugin.state import PROCESS

    load_plugins()
    try:
        plugin.require_registration()
    except RuntimeError as error:
        return Check("FAIL", "plugin", str(error))
    detail = f"attention backend {BACKEND!r} registered, {len(PROCESS.hooks)} hooks in effect"
    return Check("ok", "plugin", detail)


def _check_platform() -> Check:
    import torch
    from sglang.srt.platforms import current_platform

    kind = type(current_platform).__name__
    if torch.cuda.is_available():
        return Check("ok", "platform", f"{torch.cuda.get_device_name()} ({kind})")
    if kind == "SparrowCpuPlatform":
        return Check("ok", "platform", f"CPU, {torch.get_num_threads()} threads ({kind})")
    fix = "sparse decode needs an NVIDIA GPU, or a machine without accelerator"
    return Check("FAIL", "platform", f"{kind} on {current_platform.device_type}: {fix}")


def _check_model(words: Sequence[str]) -> Iterator[Check]:
    from sparrow_sglang.plugin.server_args import resolve_schedule
    from sparrow_sglang.plugin.server_log import describe

    try:
        # SGLang's own start-up messages would drown the report.
        server_args = parse_server_args([*words, "--log-level", "error"])
    except (ScheduleError, ConfigError) as error:
        yield Check("FAIL", "schedule", str(error))
        return
    except (ValueError, RuntimeError, OSError) as error:
        yield Check("FAIL", "model", str(error))
        return
    if not uses_sparrow(server_args):
        detail = f"--attention-backend {server_args.attention_backend} decodes densely"
        yield Check("note", "model", detail)
        return
    model_config = read_model_config(server_args)
    hf_config = model_config.hf_config
    architecture = " ".join(hf_config.architectures or ["unknown"])
    yield Check("ok", "model", f"{server_args.model_path} ({architecture})")
    schedule, source = resolve_schedule(server_args, hf_config)
    yield _check_kernels(server_args, model_config, schedule)
    lossless = describe_lossless(resolved(server_args))
    detail = f"sparse decode with {describe(schedule, source, hf_config, lossless)}"
    if schedule.is_foreign(hf_config):
        yield Check("WARN", "schedule", f"{detail}; sparrow calibrate makes one for this model")
    else:
        yield Check("ok", "schedule", detail)
    yield _check_gain(server_args, model_config, schedule)


def _check_kernels(
    server_args: "ServerArgs", model_config: "ModelConfig", schedule: BudgetSchedule
) -> Check:
    """Whether the GPU kernels take the model, also if this machine has no GPU."""
    view = resolved(server_args)
    if view.device == "cuda":
        fit = describe_fit(view, model_config)
        prefill = dense_backend(server_args, model_config)
        return Check("ok", "kernels", f"{fit}; prefill by {prefill}")
    problems = kernel_problems(view, model_config) + rule_problems(schedule)
    gpu = f"would refuse: {'; '.join(problems)}" if problems else "would take the model, too"
    return Check("note" if problems else "ok", "kernels", f"torch on {view.device}; a GPU {gpu}")


def _check_gain(
    server_args: "ServerArgs", model_config: "ModelConfig", schedule: BudgetSchedule
) -> Check:
    """What `sparrow plan` predicts for this GPU, or for an H100, at the model's whole context."""
    import torch

    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else "h100"
    gpu = next((key for key in GPUS if key in name), None)
    dtype = resolved(server_args).kv_cache_dtype
    if gpu is None or dtype not in KV_ITEMSIZES:
        return Check("note", "gain", f"not predicted for {name} with a {dtype} cache")
    try:
        shape = ModelShape.from_config(model_config.hf_config.to_dict())
    except InputError as error:
        return Check("note", "gain", f"not predicted: {error}")
    plan = Plan(shape, schedule, schedule, gpu, _GAIN_BATCH)
    longest = min(model_config.context_len, 32768)
    if is_lossless(view := resolved(server_args)):
        most = view.speculative_num_draft_tokens - 1
        ms, drafts = plan.lossless(longest, _ACCEPTANCE, most)
        gain = plan.ms(longest) / ms
        detail = f"lossless decoding {gain:.2f}x as fast as dense at {longest:,} tokens"
        if not drafts:
            detail = f"no gain at {longest:,} tokens: decodes densely"
        return Check(
            "ok" if gain >= NO_GAIN else "WARN",
            "gain",
            f"{detail} (predicted for {_GAIN_BATCH} sequences on {gpu.upper()}, acceptance rate"
            f" {_ACCEPTANCE})",
        )
    status = "ok" if plan.speedup(longest) >= NO_GAIN else "WARN"
    detail = f"{plan.verdict([longest])} (predicted for {_GAIN_BATCH} sequences on {gpu.upper()})"
    return Check(status, "gain", f"{detail}; {plan.reason(longest)}")
