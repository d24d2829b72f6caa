"""`sparrow doctor`: does sparse decode work with this machine, this SGLang and this model? What
needs no SGLang is checked before it is imported, which takes ten seconds."""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from sparrow_sglang.attention_backends.dense_side import dense_backend
from sparrow_sglang.attention_backends.kernel_limits import kernel_problems
from sparrow_sglang.commands.plan import BATCHES, LENGTHS, NO_GAIN, predictions, verdict
from sparrow_sglang.commands.serve import check_flags, parse_server_args, with_defaults
from sparrow_sglang.errors import InputError
from sparrow_sglang.json_values import shortened
from sparrow_sglang.models import ModelError, missing_tokenizer, missing_weights
from sparrow_sglang.planning.model_shape import ModelShape
from sparrow_sglang.planning.rounds import plans
from sparrow_sglang.planning.step_time import GPUS
from sparrow_sglang.plugin.lossless.mode import captures_decode, mode_of
from sparrow_sglang.plugin.names import BACKEND, LOOKUPS_FIELD, uses_sparrow
from sparrow_sglang.provenance import package_versions
from sparrow_sglang.schedules.names import SCHEDULE_VARIABLE
from sparrow_sglang.schedules.schedule import BudgetSchedule, ScheduleError
from sparrow_sglang.sglang_compat.arguments import read_model_config, resolved
from sparrow_sglang.sglang_compat.versions import (
    SUPPORTED,
    import_problem,
    installed_version,
    version_problems,
)

if TYPE_CHECKING:
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

_PREDICTED = {
    "tp_size": (1,),
    "quantization": (None,),
    "kv_cache_dtype": ("auto", "bf16", "bfloat16"),
}
VARIABLES = (
    *("SGLANG_PLUGINS", "SGLANG_PLATFORM", "SGLANG_USE_CPU_ENGINE"),
    *(SCHEDULE_VARIABLE, "SPARROW_CACHE"),
)


class Check(NamedTuple):
    """One line of the report; `status` is ok, FAIL, WARN or note."""

    status: str
    name: str
    detail: str


def main(argv: Sequence[str]) -> int:
    """Print the checks; the exit code is 1 if one failed."""
    statuses: set[str] = set()
    for check in examine(argv):
        print(f"{check.status:<5} {check.name:<12} {shortened(check.detail)}", flush=True)
        statuses.add(check.status)
    if "FAIL" in statuses:
        print("Something is in the way; see FAIL above.")
        return 1
    print("It works, but see WARN above." if "WARN" in statuses else "It works.")
    return 0


def examine(argv: Sequence[str]) -> Iterator[Check]:
    """Checks in the order in which a server would fail; `argv` is that of `sparrow serve`."""
    failed = False
    for check in _without_sglang(argv):
        failed |= check.status == "FAIL"
        yield check
    if failed:
        yield Check("note", "plugin", "not checked, as long as something above fails")
        return
    plugin = _check_plugin()
    yield from (plugin, _check_platform())
    if plugin.status != "FAIL":
        # A missing demo model is reported above.
        with suppress(ModelError):
            # In the dtype that GPUs would take.
            yield from _check_model(with_defaults(argv, cpu_dtype=False))


def _without_sglang(argv: Sequence[str]) -> Iterator[Check]:
    problems = version_problems()
    tested = "" if installed_version() in SUPPORTED else f"; tested: {', '.join(SUPPORTED)}"
    status = "FAIL" if problems else "WARN" if tested else "ok"
    yield Check(status, "SGLang", *problems or [installed_version() + tested])
    packages = (f"{name} {version or 'missing'}" for name, version in package_versions().items())
    yield Check("ok", "packages", ", ".join(packages))
    values = [f"{name}={os.environ[name]}" for name in VARIABLES if os.environ.get(name)]
    yield Check("ok", "environment", ", ".join(values) or f"none of {', '.join(VARIABLES)} is set")
    if problems:
        return
    try:
        check_flags(argv)
    except ValueError as error:
        yield Check("FAIL", "flags", str(error))
        return
    try:
        with_defaults(argv)
    except ModelError as error:
        # The demo model, which was not requested, may be missing.
        yield Check("FAIL" if argv else "note", "model", str(error))


def _check_plugin() -> Check:
    try:
        # Any of SGLang's dependencies may be missing.
        import_module("sglang.srt.server_args")
    except ImportError as error:
        return Check("FAIL", "plugin", import_problem(error))
    from sglang.srt.plugins import load_plugins

    from sparrow_sglang.plugin.registration import require_registration
    from sparrow_sglang.plugin.state import PROCESS

    load_plugins()
    try:
        require_registration()
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
        threads = f"decode takes {torch.get_num_threads()} threads of the CPU ({kind})"
        return Check("note", "platform", f"no NVIDIA GPU: {threads}, for trials and tests only")
    fix = "sparse decode needs an NVIDIA GPU, or a machine without accelerator"
    return Check("FAIL", "platform", f"{kind} on {current_platform.device_type}: {fix}")


def _check_model(arguments: Sequence[str]) -> Iterator[Check]:
    from sparrow_sglang.plugin.arguments.server_args import resolve_schedule

    try:
        # SGLang's own start-up messages would drown the report.
        server_args = parse_server_args([*arguments, "--log-level", "error"])
    except ScheduleError as error:
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
    if problem := _missing_files(server_args):
        yield Check("FAIL", "model", problem)
        return
    architecture = " ".join(hf_config.architectures or ["unknown"])
    yield Check("ok", "model", f"{server_args.model_path} ({architecture})")
    schedule = resolve_schedule(server_args, hf_config)
    yield _check_kernels(server_args, model_config, schedule)
    view = resolved(server_args)
    detail = f"sparse decode with {mode_of(view).describe(view, schedule, hf_config)}"
    if schedule.is_foreign(hf_config):
        yield Check("WARN", "schedule", f"{detail}; sparrow calibrate makes one for this model")
    else:
        yield Check("ok", "schedule", detail)
    yield _check_gain(server_args, model_config, schedule)


def _missing_files(server_args: "ServerArgs") -> str | None:
    """What the model's folders lack, in one line; of models on the hub nothing is known."""
    folder = Path(server_args.model_path)
    tokenizer = Path(server_args.tokenizer_path or folder)
    problem = None
    if folder.is_dir() and server_args.load_format != "dummy":
        problem = missing_weights(folder)
    if tokenizer.is_dir() and not server_args.skip_tokenizer_init:
        problem = problem or missing_tokenizer(tokenizer)
    return problem


def _check_kernels(
    server_args: "ServerArgs", model_config: "ModelConfig", schedule: BudgetSchedule
) -> Check:
    """Whether the GPU kernels take the model, also if this machine has no GPU."""
    view = resolved(server_args)
    if view.device == "cuda":
        return Check("ok", "kernels", f"prefill by {dense_backend(server_args, model_config)}")
    problems = kernel_problems(view, model_config)
    gpu = f"would refuse: {'; '.join(problems)}" if problems else "would take the model, too"
    return Check("note" if problems else "ok", "kernels", f"torch on {view.device}; a GPU {gpu}")


def _check_gain(
    server_args: "ServerArgs", model_config: "ModelConfig", schedule: BudgetSchedule
) -> Check:
    """What `sparrow plan` predicts for this GPU."""
    import torch

    view = resolved(server_args)
    mode = mode_of(view)
    if mode.is_dense and not captures_decode(view):
        return Check("note", "gain", "none: without CUDA graphs nothing is drafted")
    name = torch.cuda.get_device_name().lower() if torch.cuda.is_available() else view.device
    gpu = next((key for key in GPUS if key in name), None)
    not_predicted = [
        f"{field}={getattr(view, field)}"
        for field, values in _PREDICTED.items()
        if getattr(view, field) not in values
    ]
    if gpu is None or not_predicted:
        return Check("note", "gain", f"not predicted for {', '.join([name, *not_predicted])}")
    try:
        shape = ModelShape.from_config(model_config.hf_config.to_dict())
    except InputError as error:
        return Check("note", "gain", f"not predicted: {error}")
    lengths = [length for length in LENGTHS if length <= model_config.context_len]
    cases = [(batch, length) for batch in BATCHES for length in lengths]
    rounds = plans(view.speculative_num_draft_tokens or 1, not getattr(view, LOOKUPS_FIELD))
    predicted = predictions(shape, gpu, cases, rounds=rounds, drafting=schedule, schedule=schedule)
    if not predicted:
        return Check("note", "gain", f"not predicted for contexts of {model_config.context_len}")
    line = verdict(predicted, "lossless" if mode.is_dense else "sparse")
    return Check("WARN" if line == NO_GAIN else "ok", "gain", f"predicted: {line}")
