"""`sparrow doctor`: does sparse decode work with this machine, this SGLang and this model?

In: the command line of a server. Out: one `Check` after the other, each with what was found and, if
it failed, what to do. SGLang only logs errors of a plugin, so this command looks for them.
"""

import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.metadata import PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sparrow_sglang.attention_backends.dense_side import dense_backend
from sparrow_sglang.attention_backends.kernel_limits import (
    describe_fit,
    fp8_problems,
    kernel_problems,
    rule_problems,
)
from sparrow_sglang.commands.serve import (
    check_port,
    missing_files,
    model_argument,
    parse_server_args,
)
from sparrow_sglang.config import SCHEDULE_VARIABLE, SOURCE_VARIABLE, ConfigError
from sparrow_sglang.errors import InputError
from sparrow_sglang.models import ModelError
from sparrow_sglang.noise import VARIABLE as NOISE_VARIABLE
from sparrow_sglang.plugin.refusals import BACKEND, UnsupportedError, uses_sparrow
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
VARIABLES = (
    "SGLANG_PLUGINS",
    "SGLANG_PLATFORM",
    "SGLANG_USE_CPU_ENGINE",
    SCHEDULE_VARIABLE,
    "SPARROW_CACHE",
)
# The other ones are set by this package itself, or by its developers.
_KNOWN = (*VARIABLES, SOURCE_VARIABLE, "SPARROW_COMMIT", "SPARROW_RECORD", NOISE_VARIABLE)


class Check(NamedTuple):
    """One line of the report; `status` is ok, FAIL, WARN or note."""

    status: str
    name: str
    detail: str


def examine(argv: Sequence[str]) -> Iterator[Check]:
    """Checks in the order in which a server would fail; `argv` is that of `sparrow serve`."""
    sglang = _check_sglang()
    yield sglang
    yield _check_packages()
    yield from _check_entry_points()
    yield _check_environment()
    if sglang.status == "FAIL":
        return
    plugin = _check_plugin()
    yield plugin
    yield _check_platform()
    if plugin.status == "FAIL":
        yield Check("note", "model", "not checked, because the plugin did not load")
        return
    yield from _check_model(argv)
    yield _check_port(argv)


def _check_sglang() -> Check:
    if problems := version_problems():
        return Check("FAIL", "SGLang", *problems)
    try:
        # SGLang's dependencies are installed separately, and any of them may be missing.
        folder = Path(str(import_module("sglang.srt.server_args").__file__)).parents[1]
    except ImportError as error:
        return Check("FAIL", "SGLang", import_problem(error))
    place = f"{installed_version()} in {folder}"
    if installed_version() in SUPPORTED:
        return Check("ok", "SGLang", place)
    tested = ", ".join(SUPPORTED)
    return Check("WARN", "SGLang", f"{place}; not tested with, but probed below; tested: {tested}")


def _check_packages() -> Check:
    names = ("sparrow-sglang", "torch", "transformers", "triton", "flashinfer-python")
    return Check("ok", "packages", ", ".join(f"{name} {_version(name)}" for name in names))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _check_entry_points() -> Iterator[Check]:
    for group, name in ENTRY_POINTS.items():
        values = [entry.value for entry in entry_points(group=group) if entry.name == name]
        if values:
            yield Check("ok", "entry point", f"{group}: {name} = {values[0]}")
        else:
            fix = "run pip install -e . in the checkout, which alone has none"
            yield Check("FAIL", "entry point", f"{group}: no {name}; {fix}")


def _check_environment() -> Check:
    values = {name: os.environ[name] for name in VARIABLES if os.environ.get(name)}
    names = [name.strip() for name in values.get("SGLANG_PLUGINS", "").split(",") if name.strip()]
    if names and not set(ENTRY_POINTS.values()) <= set(names):
        ours = ",".join(ENTRY_POINTS.values())
        detail = f"SGLANG_PLUGINS={','.join(names)} leaves sparrow out: unset it, or add {ours}"
        return Check("FAIL", "environment", detail)
    unknown = [n for n in os.environ if n.startswith("SPARROW_") and n not in _KNOWN]
    if unknown:
        near = nearest_first(unknown[0], [name.lower() for name in _KNOWN])[0].upper()
        return Check("WARN", "environment", f"nobody reads {unknown[0]}: did you mean {near}?")
    listed = ", ".join(f"{name}={value}" for name, value in values.items())
    return Check("ok", "environment", listed or f"none of {', '.join(VARIABLES)} is set")


def _check_plugin() -> Check:
    from sglang.srt.plugins import load_plugins

    from sparrow_sglang.plugin import registration as plugin
    from sparrow_sglang.plugin.server_args import FIELDS
    from sparrow_sglang.plugin.state import PROCESS

    load_plugins()
    try:
        plugin.require_registration()
    except RuntimeError as error:
        return Check("FAIL", "plugin", str(error))
    probed = f"{len(PROCESS.hooks)} hooks probed and in effect, flags {', '.join(FIELDS)}"
    return Check("ok", "plugin", f"attention backend {BACKEND!r} registered; {probed}")


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


def _check_model(argv: Sequence[str]) -> Iterator[Check]:
    from sparrow_sglang.plugin.server_args import resolve_schedule
    from sparrow_sglang.plugin.server_log import start_up_line

    try:
        # SGLang's own start-up messages would drown the report.
        server_args = parse_server_args([*argv, "--log-level", "error"])
    except UnsupportedError as error:
        yield Check("FAIL", "model", str(error))
        return
    except (ScheduleError, ConfigError) as error:
        yield Check("ok", "model", "nothing in the way of sparse decode")
        yield Check("FAIL", "schedule", str(error))
        return
    except (ValueError, RuntimeError, OSError) as error:
        # The demo model, which nobody asked for, may be missing.
        missing = isinstance(error.__cause__, ModelError) and model_argument(argv) is None
        yield Check("note" if missing else "FAIL", "model", str(error))
        return
    if not uses_sparrow(server_args):
        detail = f"--attention-backend {server_args.attention_backend} decodes densely"
        yield Check("note", "model", detail)
        return
    model_config = read_model_config(server_args)
    hf_config = model_config.hf_config
    architecture = " ".join(hf_config.architectures or ["unknown"])
    yield Check("ok", "model", f"{server_args.model_path} ({architecture})")
    for problem in missing_files(server_args):
        yield Check("FAIL", "files", problem)
    schedule, source = resolve_schedule(server_args, hf_config)
    yield _check_kernels(server_args, model_config, schedule)
    detail = start_up_line(schedule, source, hf_config)
    if schedule.is_foreign(hf_config):
        yield Check("WARN", "schedule", f"{detail}; sparrow calibrate makes one for this model")
    else:
        yield Check("ok", "schedule", detail)


def _check_port(argv: Sequence[str]) -> Check:
    try:
        check_port(argv)
    except InputError as error:
        return Check("FAIL", "port", str(error))
    return Check("ok", "port", "free")


def _check_kernels(
    server_args: "ServerArgs", model_config: "ModelConfig", schedule: BudgetSchedule
) -> Check:
    """Whether the GPU kernels take the model, also if this machine has no GPU.

    On a GPU only FP8 can fail here: the other checks passed when the arguments were resolved.
    """
    import torch

    problems = kernel_problems(resolved(server_args), model_config) + rule_problems(schedule)
    device = resolved(server_args).device
    if device == "cuda" and resolved(server_args).kv_cache_dtype == "fp8_e4m3":
        # A server checks this after loading the model, as the checkpoint may ask for FP8, too.
        problems += fp8_problems(torch.cuda.get_device_capability())
        if problems:
            return Check("FAIL", "kernels", "; ".join(problems))
    if device != "cuda":
        here = f"plain torch on {device}"
        if problems:
            return Check("note", "kernels", f"{here}; a GPU would refuse: {'; '.join(problems)}")
        return Check("ok", "kernels", f"{here}; a GPU would take the model, too")
    fit = describe_fit(resolved(server_args), model_config)
    return Check("ok", "kernels", f"{fit}; prefill by {dense_backend(server_args, model_config)}")
